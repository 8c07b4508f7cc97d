package nbd

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/serving"
)

var errRefused = errors.New("the disks are refused")

// Refuse refuses every export from now on: clients are cut off, and whoever asks for an export is
// told the reason. It is for disks that must not be used, whatever clients believe. A later reason
// takes the place of this one; nil ends it.
func (s *Server) Refuse(reason error) {
	s.mu.Lock()
	s.refusing = reason
	var all []*conn
	if reason != nil {
		// Also those that have chosen no export yet. They may be about to; and they can ask again.
		all = s.conns.All(func(*conn) bool { return true })
	}
	s.mu.Unlock()
	for _, c := range all {
		c.fail(fmt.Errorf("%w: %w", errRefused, reason))
	}
}

// refusal is why every export is refused; nil: none is. It is asked for a client that wants one.
func (s *Server) refusal(c *conn) error {
	s.mu.Lock()
	err := s.refusing
	s.mu.Unlock()
	if err == nil {
		return nil
	}
	if n, told := s.refusals.Admit(c.name, time.Now()); told {
		c.log().Warn("a client is refused", append(serving.Unsaid(n), zap.Error(err))...)
	}
	return err
}
