package chap

import (
	"crypto/rand"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
)

// Authenticator holds a target's credentials and the outstanding challenges of its logins. It is
// safe for concurrent use.
type Authenticator struct {
	inForce atomic.Pointer[Config] // never changed after it is stored

	mu          sync.Mutex
	outstanding map[string]struct{} // guarded by mu; challenges of exchanges that are not closed
}

// NewAuthenticator makes an Authenticator. The configuration must have CHAP enabled: a target
// without authentication has no Authenticator.
func NewAuthenticator(cfg Config) (*Authenticator, error) {
	a := &Authenticator{outstanding: make(map[string]struct{})}
	if err := a.Replace(cfg); err != nil {
		return nil, err
	}
	return a, nil
}

// Replace puts another configuration into force. It must have CHAP enabled. The new one also
// applies to logins that have begun, even after their challenge. After an error the old
// configuration stays.
func (a *Authenticator) Replace(cfg Config) error {
	if !cfg.Enabled() {
		return errors.New("chap: no credential for initiators")
	}
	a.inForce.Store(&cfg)
	return nil
}

// Knows reports whether user could log in now. A user whose credential was replaced could not.
func (a *Authenticator) Knows(user string) bool {
	return a.inForce.Load().Initiator.Username == user
}

// Begin starts the exchange of one login. initiatorName is the name that the initiator uses. The
// caller closes the exchange at the end of the login in any case.
func (a *Authenticator) Begin(initiatorName string) *Exchange {
	return &Exchange{auth: a, initiatorName: initiatorName}
}

// challenge makes and registers a challenge of n bytes that no other exchange has outstanding.
func (a *Authenticator) challenge(n int) []byte {
	c := make([]byte, n)
	a.mu.Lock()
	defer a.mu.Unlock()
	for {
		_, _ = rand.Read(c) // it never fails (crypto/rand)
		if _, taken := a.outstanding[string(c)]; !taken {
			a.outstanding[string(c)] = struct{}{}
			return c
		}
	}
}

func (a *Authenticator) isOutstanding(challenge []byte) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, ok := a.outstanding[string(challenge)]
	return ok
}

func (a *Authenticator) forget(challenge []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.outstanding, string(challenge))
}

// selectAlgorithm returns the first supported algorithm in the initiator's list, and its spelling
// in the list (RFC 7143 6.2.1).
func selectAlgorithm(offer string) (alg Algorithm, spelled string, ok bool) {
	for item := range strings.SplitSeq(offer, ",") {
		n, err := ParseNumber(item)
		if err != nil || n > 255 {
			continue // RFC 7143 6.2.1: ignore unknown values
		}
		if alg := Algorithm(n); alg.hash() != nil {
			return alg, item, true
		}
	}
	return 0, "", false
}
