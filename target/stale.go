package target

import "io"

// endStale ends sessions of an initiator whose connections it has closed, even if their readers
// have not noticed yet. So an initiator that closes a connection and logs in again is not blocked
// by the claims of its old session.
func (s *Server) endStale(initiator string) {
	for _, sess := range s.normal() {
		if sess.key.initiator == initiator && sess.conn.rx.wire.Ended() {
			sess.end(io.EOF)
		}
	}
}
