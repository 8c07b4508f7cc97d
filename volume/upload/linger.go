package upload

import (
	"io"
	"net/http"
	"time"
)

const (
	// lingerTime is Handler.timeout.
	lingerTime = 5 * time.Second
	// lingerBytes is how much is read: the buffers of a fast connection, and the data that a busy
	// client sends before it looks for an answer.
	lingerBytes = 64 << 20
)

// linger sends the answer, and reads what the client still sends. Closing a connection with unread
// data resets it, and a busy client would never see the reason.
func (h *Handler) linger(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength == 0 || r.ProtoMajor > 1 || h.slots.ended() {
		return // HTTP/2 can end one request without the others
	}
	control := http.NewResponseController(w)
	if control.Flush() != nil || control.SetReadDeadline(time.Now().Add(h.timeout)) != nil {
		return
	}
	_, _ = io.CopyN(io.Discard, r.Body, lingerBytes) // the client has its answer by now
}
