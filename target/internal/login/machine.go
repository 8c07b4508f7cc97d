package login

import (
	"strconv"

	"kubevirt.io/disk/chap"
)

const (
	// maxSegment is the longest data segment of a Login Response, in bytes. It is the default of
	// MaxRecvDataSegmentLength, which applies until the end of login (RFC 7143 6.3).
	maxSegment = 8192
	// maxSteps limits the requests of a login, not counting those that only continue a longer text.
	// The standard wants at least six exchanges to be possible (6.2).
	maxSteps = 64
)

// Machine is the login phase of one connection. It is not safe for concurrent use.
type Machine struct {
	cfg    *Config
	stage  Stage
	done   bool
	failed bool

	first   Request // header fields of the first request; Data is nil
	started bool    // first is set
	opened  bool    // the first complete text has been answered
	steps   int

	pending  []byte              // text of earlier requests with the C bit
	received int                 // bytes of text in total
	seen     map[string]struct{} // keys received so far
	out      []byte              // response text that is not sent yet

	auth     authState
	proposed bool // the target has proposed the AuthMethod
	exchange *chap.Exchange

	declared bool // our MaxRecvDataSegmentLength has been sent
	neg      negotiation
	res      Result
}

// NewMachine makes the machine for a new connection. The caller closes it when the login is over.
func NewMachine(cfg *Config) *Machine {
	return &Machine{
		cfg:  cfg,
		seen: make(map[string]struct{}),
		neg:  negotiation{params: defaultParams()},
	}
}

// Done says whether the login has reached full feature phase.
func (m *Machine) Done() bool { return m.done }

// Authenticated says whether the initiator has named itself and, if authentication is required, has
// authenticated. Before that, the initiator must only be told what everybody may know.
func (m *Machine) Authenticated() bool { return m.opened && m.authenticated() }

// Result returns the result so far.
func (m *Machine) Result() Result {
	r := m.res
	r.Params = m.neg.params
	return r
}

// Close gives up the login and its outstanding challenge. It may be called at any time, and more
// than once.
func (m *Machine) Close() {
	if m.exchange != nil {
		m.exchange.Close()
		m.exchange = nil
	}
	if !m.done {
		m.failed = true
	}
}

// Step handles a request. After a response with a status other than success, every further request
// is refused.
func (m *Machine) Step(req *Request) Response {
	resp, r := m.step(req)
	if r != nil {
		if !m.done {
			m.Close()
		}
		return Response{CSG: req.CSG, Status: r.status, Err: r, Reason: r.reason}
	}
	return resp
}

func (m *Machine) step(req *Request) (Response, *refusal) {
	if r := m.checkHeader(req); r != nil {
		return Response{}, r
	}
	if !req.Continue || len(req.Data) == 0 {
		if m.steps++; m.steps > maxSteps {
			return Response{}, refuse(StatusInitiatorError, "too_many_steps",
				"the login has not ended after %d requests", maxSteps)
		}
	}
	if len(m.out) > 0 { // this request only fetches the rest of the response (RFC 7143 6.2)
		if len(req.Data) > 0 || req.Continue {
			return Response{}, refuse(StatusInitiatorError, "unexpected_text",
				"text in a request that should only fetch the rest of a response")
		}
		return m.respond(req)
	}
	if m.received += len(req.Data); m.received > maxKeyBytes {
		return Response{}, refuse(StatusInitiatorError, "too_much_text",
			"more than %d bytes of login text", maxKeyBytes)
	}
	if req.Continue {
		m.pending = append(m.pending, req.Data...)
		return Response{CSG: m.stage}, nil
	}
	text := req.Data
	if len(m.pending) > 0 {
		text = append(m.pending, req.Data...)
		m.pending = nil
	}
	pairs, err := ParsePairs(text)
	if err != nil {
		return Response{}, refuse(StatusInitiatorError, "bad_text", "%v", err)
	}
	if r := m.handle(req, pairs); r != nil {
		return Response{}, r
	}
	return m.respond(req)
}

// checkHeader checks the header fields that every request has (RFC 7143 6.3, 11.12).
func (m *Machine) checkHeader(req *Request) *refusal {
	if m.done || m.failed {
		return refuse(StatusInitiatorError, "login_over",
			"a Login Request after the end of the login")
	}
	if !m.started {
		m.started = true
		m.first = *req
		m.first.Data = nil
		m.stage = req.CSG
		switch {
		case req.VersionMin > 0: // the only version is 0
			return refuse(StatusUnsupportedVersion, "unsupported_version", "the initiator asks "+
				"for versions %d to %d, but only 0 is supported", req.VersionMin, req.VersionMax)
		case req.CSG != SecurityNegotiation && req.CSG != OperationalNegotiation:
			return refuse(StatusInitiatorError, "bad_stage", "a login cannot begin in stage %v",
				req.CSG)
		}
	}
	f := &m.first
	switch {
	case req.VersionMin != f.VersionMin || req.VersionMax != f.VersionMax:
		return refuse(StatusInitiatorError, "header_changed",
			"the version range changed during login")
	case req.ISID != f.ISID || req.TSIH != f.TSIH || req.CID != f.CID:
		return refuse(StatusInitiatorError, "header_changed",
			"ISID, TSIH or CID changed during login")
	case req.CSG != m.stage:
		return refuse(StatusInitiatorError, "bad_stage", "a request for stage %v in stage %v",
			req.CSG, m.stage)
	case req.Transit && req.Continue:
		return refuse(StatusInitiatorError, "bad_flags", "the T and C bits are both set")
	case req.Transit && (req.NSG <= m.stage || req.NSG != OperationalNegotiation &&
		req.NSG != FullFeature):
		return refuse(StatusInitiatorError, "bad_stage", "a transition from stage %v to %v",
			m.stage, req.NSG)
	}
	return nil
}

// handle answers the keys of one complete text. The answers go to out.
func (m *Machine) handle(req *Request, pairs []Pair) *refusal {
	if r := checkPairs(pairs, m.seen); r != nil {
		// After libiscsi, and so QEMU, has offered CHAP and got None as the answer, it sends its
		// name again. RFC 7143 6.2 requires us to refuse such a login.
		if m.cfg.Auth == nil && m.auth == authDone && m.stage == OperationalNegotiation {
			r.text += ". libiscsi and QEMU do this if they have a credential and the target has " +
				"none: give it to the target, too, or remove it from the initiator"
		}
		return r
	}
	if !m.opened {
		if r := m.open(pairs); r != nil {
			return r
		}
	}
	var security, operational []Pair
	for _, p := range pairs {
		switch role := roles[p.Key]; {
		case role == roleUnknown:
			m.out = AppendPair(m.out, p.Key, valueNotUnderstood)
		case role == roleIgnored:
		case role == roleAlias:
			m.res.InitiatorAlias = printable(p.Value)
		case role == roleName && !m.opened: // open handles it
		case role == roleSecurity && m.stage == SecurityNegotiation:
			security = append(security, p)
		case role == roleOperational && m.stage == OperationalNegotiation:
			operational = append(operational, p)
		default:
			return refuse(StatusInitiatorError, "key_not_allowed",
				"key %s is not allowed here, in stage %v", p.Key, m.stage)
		}
	}
	m.opened = true
	if m.stage == SecurityNegotiation {
		return m.security(req, security)
	}
	var r *refusal
	if m.out, r = m.neg.answer(m.out, operational); r != nil {
		return r
	}
	if !m.declared {
		m.declared = true
		m.neg.params.RecvMaxDataSegment = MaxDataSegment
		m.out = AppendPair(m.out, keyMaxRecvDataSegmentLength, strconv.Itoa(MaxDataSegment))
	}
	return nil
}

// respond makes the response from the text in out. If the initiator asks for the transition to the
// next stage and nothing prevents it, respond makes it.
func (m *Machine) respond(req *Request) (Response, *refusal) {
	resp := Response{CSG: m.stage}
	n := min(len(m.out), maxSegment)
	resp.Data = m.out[:n:n]
	if n < len(m.out) {
		m.out = m.out[n:]
		resp.Continue = true
		return resp, nil
	}
	m.out = nil
	if !req.Transit || m.stage == SecurityNegotiation && !m.authenticated() {
		return resp, nil
	}
	if req.NSG == FullFeature {
		if r := m.neg.params.checkBursts(); r != nil {
			return Response{}, r
		}
		m.done = true
		m.seen = nil
	}
	m.stage = req.NSG
	resp.Transit, resp.NSG = true, req.NSG
	return resp, nil
}
