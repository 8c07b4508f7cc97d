package target

import (
	"errors"
	"net"
	"net/netip"
	"time"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/target/internal/scsi"
)

// MemoryInUse returns how many bytes the buffers of all sessions take.
func (s *Server) MemoryInUse() int64 { return s.pool.Used() }

// DataInUse is MemoryInUse without the memory that sessions keep for their next commands and
// answers.
func (s *Server) DataInUse() int64 {
	data := s.MemoryInUse()
	for _, sess := range s.allSessions() {
		sess.mu.Lock()
		data -= int64(len(sess.free)) * memory.RequestCost
		sess.mu.Unlock()
		data -= sess.conn.tx.Kept()
	}
	return data
}

// Working returns the number of readers that do not wait for the network.
func (s *Server) Working() int64 { return s.working.Load() }

// Connections returns the number of all connections, and of those that have not logged in.
func (s *Server) Connections() (all, pending int) {
	return len(s.conns.All(func(*conn) bool { return true })), s.conns.Strangers()
}

// Stalls returns the number of current disk calls of a LUN in which the watchdog has found a reader
// stalled.
func (s *Server) Stalls(lun uint16) (calls int) {
	return s.opt.Disks.At(lun).Stalled()
}

// FailLogins counts that many failures of authentication for an address.
func (s *Server) FailLogins(from netip.Addr, times int) {
	for range times {
		s.conns.Failed(from.String(), "test")
	}
}

// Queued returns how many bytes the longest queue of a connection has, as senders count it.
func (s *Server) Queued() (most int) {
	for _, c := range s.conns.All(func(*conn) bool { return true }) {
		most = max(most, c.tx.Queued())
	}
	return most
}

// BeginReinstatement registers a session in the place of an initiator's only one, like its next
// login, and stops there.
func (s *Server) BeginReinstatement(initiator string) error {
	for _, old := range s.normalSessions() {
		if old.key.initiator != initiator {
			continue
		}
		_, far := net.Pipe()
		sess := &session{conn: s.newConn(far), key: old.key, login: old.login, params: old.params,
			since: time.Now(), tasks: make(map[uint32]*task),
			nexus: s.device.Attach(scsi.InitiatorPort{Name: initiator, ISID: old.key.isid})}
		_, err := s.register(sess)
		return err
	}
	return errors.New("it is not logged in")
}
