package chap

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"strconv"
	"strings"
)

// minChallengeLen is the shortest challenge, in bytes. With a longer digest the challenge is as
// long as the digest. RFC 1994 2.3 has no length: challenges should be unique and unpredictable.
const minChallengeLen = 16

// FailureKind tells the login which status to end with after a failed exchange (RFC 7143 9.2).
type FailureKind uint8

// The kinds of failure.
const (
	// The initiator is not who it claims to be, or there is no way to find out: status 0201.
	FailureAuthentication FailureKind = iota + 1
	// A key of the step is missing: status 0207.
	FailureMissing
	// A key or value is not one that the step defines: status 0200.
	FailureProtocol
)

// Error is the failure of an exchange. It contains no secret, challenge or response.
type Error struct {
	Kind   FailureKind
	Reason string // a short stable label, such as bad_password
	text   string
}

func (e *Error) Error() string { return "CHAP: " + e.text }

func fail(kind FailureKind, reason, format string, args ...any) *Error {
	return &Error{Kind: kind, Reason: reason, text: fmt.Sprintf(format, args...)}
}

// Challenge is what the target sends to an initiator, spelled as the keys are.
type Challenge struct {
	Algorithm  string // CHAP_A
	Identifier string // CHAP_I
	Challenge  string // CHAP_C
}

// Reply is the initiator's answer to a challenge. A nil value is a key that was not sent.
type Reply struct {
	Name       *string // CHAP_N
	Response   *string // CHAP_R
	Identifier *string // CHAP_I, with Challenge: asks the target to authenticate itself
	Challenge  *string // CHAP_C
}

// Proof authenticates the target to the initiator, spelled as the keys are.
type Proof struct {
	Name     string // CHAP_N
	Response string // CHAP_R
}

// Exchange is the CHAP part of one login. It belongs to one goroutine, which calls Start and Verify
// once each.
type Exchange struct {
	auth          *Authenticator
	initiatorName string

	algorithm  Algorithm
	identifier byte
	challenge  []byte // nil: none is outstanding
	user       string
}

// Start chooses one of the algorithms that the initiator offers (CHAP_A) and returns the challenge.
// Errors are *Error.
func (e *Exchange) Start(offer string) (Challenge, error) {
	alg, spelled, ok := selectAlgorithm(offer)
	if !ok {
		return Challenge{}, fail(FailureAuthentication, "no_common_algorithm",
			"none of the offered algorithms %s is supported", quote(offer))
	}
	e.Close()
	var id [1]byte
	_, _ = rand.Read(id[:])
	e.algorithm, e.identifier = alg, id[0]
	e.challenge = e.auth.challenge(max(minChallengeLen, alg.hash().Size()))
	return Challenge{Algorithm: spelled, Identifier: strconv.Itoa(int(e.identifier)),
		Challenge: FormatBinary(e.challenge)}, nil
}

// Verify checks the initiator's reply to the challenge. If the reply is right, the initiator is
// authenticated; if it also asks the target to authenticate itself, Verify returns the target's
// proof, otherwise nil. Errors are *Error.
//
// An unknown user, a wrong password and a name that the credential is not bound to look the same to
// an initiator: same status, same work, same time. Reason and text are for the log only.
func (e *Exchange) Verify(r Reply) (*Proof, error) {
	if e.challenge == nil {
		return nil, fail(FailureProtocol, "chap_out_of_order", "a response without a challenge")
	}
	switch {
	case r.Name == nil:
		return nil, fail(FailureMissing, "missing_chap_n", "CHAP_N is missing")
	case r.Response == nil:
		return nil, fail(FailureMissing, "missing_chap_r", "CHAP_R is missing")
	case r.Identifier == nil && r.Challenge != nil:
		return nil, fail(FailureMissing, "missing_chap_i", "CHAP_C is there but CHAP_I is missing")
	case r.Challenge == nil && r.Identifier != nil:
		return nil, fail(FailureMissing, "missing_chap_c", "CHAP_I is there but CHAP_C is missing")
	}
	response, err := ParseBinary(*r.Response)
	if err != nil {
		return nil, fail(FailureProtocol, "bad_chap_r", "CHAP_R %v", err)
	}
	var back *backChallenge
	if r.Challenge != nil {
		if back, err = e.parseBackChallenge(r); err != nil {
			return nil, err
		}
	}
	cfg := e.auth.inForce.Load()
	if err := e.check(cfg, *r.Name, response); err != nil {
		return nil, err
	}
	if back == nil {
		e.user = *r.Name
		return nil, nil
	}
	if !cfg.Mutual() {
		return nil, fail(FailureAuthentication, "mutual_not_configured", "user %s wants the "+
			"target to authenticate itself, but the target has no credential", quote(*r.Name))
	}
	e.user = *r.Name
	// Answer only now: a target that answers initiators before they have authenticated gives
	// anybody material for guessing its secret.
	answer := e.algorithm.Response(back.identifier, cfg.Target.Secret.bytes(), back.challenge)
	return &Proof{Name: cfg.Target.Username, Response: FormatBinary(answer)}, nil
}

// backChallenge is the initiator's challenge to the target.
type backChallenge struct {
	identifier byte
	challenge  []byte
}

func (e *Exchange) parseBackChallenge(r Reply) (*backChallenge, error) {
	id, err := ParseNumber(*r.Identifier)
	if err == nil && id > 255 {
		err = fmt.Errorf("is over 255")
	}
	if err != nil {
		return nil, fail(FailureProtocol, "bad_chap_i", "CHAP_I %v", err)
	}
	challenge, err := ParseBinary(*r.Challenge)
	if err != nil {
		return nil, fail(FailureProtocol, "bad_chap_c", "CHAP_C %v", err)
	}
	if e.auth.isOutstanding(challenge) {
		// The peer returned a challenge of this target, from this login or another one, for it to
		// answer (RFC 7143 9.2.1).
		return nil, fail(FailureAuthentication, "reflected_challenge",
			"the initiator sent back one of this target's challenges as its own")
	}
	return &backChallenge{identifier: byte(id), challenge: challenge}, nil
}

// check compares name, response and initiator name with the configuration. It always compares all
// three, so that its duration gives nothing away.
func (e *Exchange) check(cfg *Config, name string, response []byte) error {
	expected := e.algorithm.Response(e.identifier, cfg.Initiator.Secret.bytes(), e.challenge)
	rightSecret := subtle.ConstantTimeCompare(response, expected)

	sameSecret := 0
	if cfg.Mutual() {
		own := e.algorithm.Response(e.identifier, cfg.Target.Secret.bytes(), e.challenge)
		sameSecret = subtle.ConstantTimeCompare(response, own)
	}

	// Compare digests of the names, so that the duration does not depend on their lengths either.
	rightUser := equalText(name, cfg.Initiator.Username)
	rightName := 1
	if cfg.InitiatorName != "" {
		rightName = equalText(strings.ToLower(e.initiatorName), strings.ToLower(cfg.InitiatorName))
	}
	switch {
	case rightSecret&rightUser&rightName&^sameSecret == 1:
		return nil
	case sameSecret == 1:
		return fail(FailureAuthentication, "same_secret", "user %s answered with the target's "+
			"own secret; the two directions need different ones", quote(name))
	case rightUser == 0:
		return fail(FailureAuthentication, "unknown_user", "there is no user %s", quote(name))
	case rightSecret == 0:
		return fail(FailureAuthentication, "bad_password", "wrong password for user %s",
			quote(name))
	}
	return fail(FailureAuthentication, "wrong_initiator_name",
		"user %s may not log in as initiator %s", quote(name), quote(e.initiatorName))
}

// User is the name that the initiator has authenticated as, or "".
func (e *Exchange) User() string { return e.user }

// Close ends the exchange and frees its challenge. It may be called more than once.
func (e *Exchange) Close() {
	if e.challenge != nil {
		e.auth.forget(e.challenge)
		e.challenge = nil
	}
}

func equalText(a, b string) int {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:])
}

// maxQuoted is how many bytes of a peer's string a message may show.
const maxQuoted = 64

// quote makes an untrusted string short and harmless in a log.
func quote(s string) string {
	if len(s) > maxQuoted {
		return strconv.QuoteToASCII(s[:maxQuoted]) + "..."
	}
	return strconv.QuoteToASCII(s)
}
