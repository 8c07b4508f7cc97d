package target

import "io"

// endStale ends the sessions of an initiator that has closed their connections already, though
// their readers have not come to see it. An initiator that logs in again after it has closed a
// connection then finds the claims of that one gone.
func (s *Server) endStale(initiator string) {
	for _, sess := range s.normal() {
		if sess.key.initiator == initiator && sess.conn.rx.wire.ended() {
			sess.end(io.EOF)
		}
	}
}
