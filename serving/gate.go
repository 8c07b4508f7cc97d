package serving

import (
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"
)

// gate refuses all disks while there is a reason.
type gate struct {
	mu     sync.Mutex
	reason error         // guarded by mu; nil: the disks can be used
	ends   []func(error) // guarded by mu; end the connections of each gated front end
	told   *Seldom[string]
}

func (g *gate) add(end func(error)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ends = append(g.ends, end)
}

// Refuse refuses every disk to the clients of gated front ends from now on (see Rules): their
// connections end, and new requests for a disk get the reason. It is for disks that must not be
// used, although clients do not know. A later reason replaces this one; nil ends the refusal.
func (s *Disks) Refuse(reason error) {
	s.gate.mu.Lock()
	s.gate.reason = reason
	ends := s.gate.ends
	s.gate.mu.Unlock()
	if reason == nil {
		return
	}
	// Also connections that have chosen no disk yet: they may be about to. They can connect again.
	for _, end := range ends {
		end(fmt.Errorf("%w: %w", ErrRefused, reason))
	}
}

// Refusal is why every disk is refused; nil: they are not. name and log are of the client that
// wants a disk.
func (s *Disks) Refusal(name string, log *zap.Logger) error {
	s.gate.mu.Lock()
	err := s.gate.reason
	s.gate.mu.Unlock()
	if err == nil {
		return nil
	}
	if n, told := s.gate.told.Admit(name, time.Now()); told {
		log.Warn("a client is refused", append(Unsaid(n), zap.Error(err))...)
	}
	return err
}
