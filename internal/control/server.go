package control

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/status"
)

// Server carries out the requests of the control socket.
type Server struct {
	log       *zap.Logger
	handovers *handovers
	sessions  *sessionControl
	snapshots *snapshotControl
	http      http.Server
}

// New makes a server for disks in use, the sessions of a target, and snapshots. It resumes the
// handovers that were open when the daemon stopped, so their time goes on even if nobody can
// connect. The caller closes the server.
func New(disks Disks, sessions Sessions, snapshots Snapshots, log *zap.Logger) *Server {
	s := &Server{log: log, handovers: newHandovers(disks, log),
		sessions: &sessionControl{sessions, log}, snapshots: &snapshotControl{snapshots, log}}
	s.handovers.resume(func(uint16) bool { return true })
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+status.PathHandover, authorized(s.handovers.handle))
	mux.HandleFunc("GET "+status.PathSessions, authorized(s.sessions.list))
	mux.HandleFunc("POST "+status.PathKick, authorized(s.sessions.kick))
	mux.HandleFunc("GET "+status.PathSnapshots, authorized(s.snapshots.list))
	mux.HandleFunc("POST "+status.PathSnapshots, authorized(s.snapshots.change))
	content := &contentControl{snapshots}
	mux.HandleFunc("GET "+status.PathContent, content.handle(describe))
	mux.HandleFunc("GET "+status.PathContentBytes, content.handle(readBytes))
	mux.HandleFunc("GET "+status.PathContentRanges, content.handle(listRanges))
	s.http = http.Server{
		Handler:           http.NewCrossOriginProtection().Handler(mux),
		ConnContext:       withPeer,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       5 * time.Second,
		MaxHeaderBytes:    4 << 10,
	}
	return s
}

// Listen starts to answer at a path. It makes the directory if it is missing, and replaces the
// socket of a killed daemon, but nothing else.
func (s *Server) Listen(path string) error {
	l, err := socket.ListenUnix(path)
	if err != nil {
		return err
	}
	go func() {
		// Serve returns when the listener is closed. If it fails, the daemon keeps serving disks
		// without the control socket.
		_ = s.http.Serve(l)
	}()
	return nil
}

// Added says that a LUN was added since New. If its disk was open to a second initiator when it was
// last served, that handover goes on.
func (s *Server) Added(lun uint16) {
	s.handovers.resume(func(added uint16) bool { return added == lun })
}

// Removed says that a LUN was removed. Its timer stops, because another disk may get its number.
func (s *Server) Removed(lun uint16) { s.handovers.arm(lun, 0) }

// Close ends every connection and removes the socket. Open handovers no longer run out; they go on
// after the next start.
func (s *Server) Close() {
	_ = s.http.Close() // it can only fail to close the listener
	s.handovers.stopTimers()
}

// understand reads a request. If it cannot, it answers with the reason.
func understand(w http.ResponseWriter, r *http.Request, req any) bool {
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4<<10))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(req)
	if err != nil {
		answer(w, http.StatusBadRequest,
			status.Refusal{Error: "cannot understand the request: " + err.Error()})
	}
	return err == nil
}

func answer(w http.ResponseWriter, status int, a any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(a) // if this fails, the client has gone
}

type peerKey struct{}

// withPeer stores the process at the other end of a connection in the context.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	if peer := socket.Peer(c); peer != nil {
		return context.WithValue(ctx, peerKey{}, peer)
	}
	return ctx
}

// authorized lets only the daemon's own user and root pass.
func authorized(
	handle func(w http.ResponseWriter, r *http.Request, user uint32),
) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		peer, ok := r.Context().Value(peerKey{}).(*unix.Ucred)
		if !ok || peer.Uid != 0 && int(peer.Uid) != os.Geteuid() {
			answer(w, http.StatusForbidden,
				status.Refusal{Error: "only the user of the daemon and root may do that"})
			return
		}
		handle(w, r, peer.Uid)
	}
}
