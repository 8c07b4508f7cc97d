package nbd

import (
	"errors"
	"fmt"

	"go.uber.org/zap"
)

var errRefused = errors.New("the disks are refused")

// Refuse refuses every export from now on, for good: clients are cut off, and whoever asks for an
// export is told the reason. It is for disks that must not be used any more, whatever clients
// believe. A second reason changes nothing.
func (s *Server) Refuse(reason error) {
	s.mu.Lock()
	if s.refusing != nil {
		s.mu.Unlock()
		return
	}
	s.refusing = reason
	// Also those that have chosen no export yet. They may be about to; and they can ask again.
	all := s.conns.All(func(*conn) bool { return true })
	s.mu.Unlock()
	s.log.Warn("the disks are refused to all clients from now on", zap.Error(reason))
	for _, c := range all {
		c.fail(fmt.Errorf("%w: %w", errRefused, reason))
	}
}

// refusal is why every export is refused; nil: none is.
func (s *Server) refusal() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refusing
}
