package login

import (
	"errors"

	"kubevirt.io/disk/chap"
)

const methodCHAP = "CHAP"

// authState is the progress of SecurityNegotiation.
type authState uint8

const (
	authOpen      authState = iota // no method chosen yet
	authStart                      // CHAP; waiting for its algorithms
	authChallenge                  // CHAP; waiting for the response to the challenge
	authDone                       // authenticated, or agreed on None if that is allowed
)

// authenticated says whether the security stage may end.
func (m *Machine) authenticated() bool {
	return m.auth == authDone || m.auth == authOpen && m.cfg.Auth == nil
}

// security handles the keys of a step of SecurityNegotiation (RFC 7143 12.1).
func (m *Machine) security(req *Request, pairs []Pair) *refusal {
	keys := make(map[string]*string, len(pairs))
	for i := range pairs {
		keys[pairs[i].Key] = &pairs[i].Value
	}
	if m.auth == authOpen {
		if r := m.chooseMethod(req, keys); r != nil {
			return r
		}
		// An initiator may send the first step of CHAP together with its choice of CHAP.
		if m.auth == authStart && keys[keyChapA] == nil {
			return unexpected(keys, keyAuthMethod)
		}
	}
	switch m.auth {
	case authStart:
		return m.startCHAP(keys)
	case authChallenge:
		return m.finishCHAP(keys)
	}
	return unexpected(keys, keyAuthMethod)
}

// unexpected refuses keys that do not belong to the step (RFC 7143 9.2).
func unexpected(keys map[string]*string, allowed ...string) *refusal {
	n := 0
	for _, key := range allowed {
		if keys[key] != nil {
			n++
		}
	}
	if len(keys) > n {
		return refuse(StatusInitiatorError, "auth_out_of_order",
			"authentication keys that do not belong to this step")
	}
	return nil
}

// chooseMethod answers the initiator's AuthMethod (RFC 7143 12.1), or proposes one itself.
func (m *Machine) chooseMethod(req *Request, keys map[string]*string) *refusal {
	offer := keys[keyAuthMethod]
	if offer == nil {
		if r := unexpected(keys); r != nil {
			return r
		}
		switch {
		case m.cfg.Auth == nil:
		case req.Transit || m.proposed:
			return refuse(StatusAuthenticationFailure, "no_auth_offered",
				"the initiator offers no authentication, but the target requires it")
		default:
			// The initiator leaves the proposal to the target (RFC 7143 6.3.2).
			m.proposed = true
			m.out = AppendPair(m.out, keyAuthMethod, methodCHAP)
		}
		return nil
	}
	method := valueNone
	if m.cfg.Auth != nil {
		method = methodCHAP
	}
	if firstOf(*offer, method) == valueReject {
		if m.cfg.Auth == nil {
			return refuse(StatusAuthenticationFailure, "no_common_auth",
				"the initiator offers %s and insists on authentication, but the target has no "+
					"credentials", quote(*offer))
		}
		return refuse(StatusAuthenticationFailure, "no_auth_offered",
			"the initiator offers %s, but the target requires CHAP", quote(*offer))
	}
	m.auth = authDone
	if method == methodCHAP {
		m.auth = authStart
	}
	if m.proposed && keys[keyChapA] != nil {
		return nil // this answers the target's proposal
	}
	m.out = AppendPair(m.out, keyAuthMethod, method)
	return nil
}

func (m *Machine) startCHAP(keys map[string]*string) *refusal {
	offer := keys[keyChapA]
	if offer == nil {
		return refuse(StatusMissingParameter, "missing_chap_a", "CHAP_A is missing")
	}
	if r := unexpected(keys, keyAuthMethod, keyChapA); r != nil {
		return r
	}
	m.exchange = m.cfg.Auth.Begin(m.res.InitiatorName)
	c, err := m.exchange.Start(*offer)
	if err != nil {
		return refuseCHAP(err)
	}
	m.auth = authChallenge
	m.out = AppendPair(m.out, keyChapA, c.Algorithm)
	m.out = AppendPair(m.out, keyChapI, c.Identifier)
	m.out = AppendPair(m.out, keyChapC, c.Challenge)
	return nil
}

func (m *Machine) finishCHAP(keys map[string]*string) *refusal {
	if r := unexpected(keys, keyChapN, keyChapR, keyChapI, keyChapC); r != nil {
		return r
	}
	if name := keys[keyChapN]; name != nil {
		m.res.Tried = *name
	}
	proof, err := m.exchange.Verify(chap.Reply{Name: keys[keyChapN], Response: keys[keyChapR],
		Identifier: keys[keyChapI], Challenge: keys[keyChapC]})
	if err != nil {
		return refuseCHAP(err)
	}
	m.auth = authDone
	m.res.User = m.exchange.User()
	m.exchange.Close()
	m.exchange = nil
	if proof != nil {
		m.out = AppendPair(m.out, keyChapN, proof.Name)
		m.out = AppendPair(m.out, keyChapR, proof.Response)
	}
	return nil
}

// refuseCHAP returns the refusal for a failed exchange (RFC 7143 9.2).
func refuseCHAP(err error) *refusal {
	var failure *chap.Error
	if !errors.As(err, &failure) {
		return refuse(StatusTargetError, "internal_error", "%v", err)
	}
	status := StatusInitiatorError
	switch failure.Kind {
	case chap.FailureAuthentication:
		status = StatusAuthenticationFailure
	case chap.FailureMissing:
		status = StatusMissingParameter
	}
	return refuse(status, failure.Reason, "%s", failure.Error())
}
