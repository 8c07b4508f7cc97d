package control

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/status"
)

// Server carries out the requests of the control socket.
type Server struct {
	log       *zap.Logger
	handovers *handovers // nil before Begin
	sessions  *sessionControl
	snapshots *snapshotControl
	begun     atomic.Pointer[http.ServeMux] // nil before Begin
	http      http.Server
}

// New makes a server that answers the state of a daemon, and refuses other requests until Begin.
// The caller closes the server.
func New(state func() status.Status, log *zap.Logger) *Server {
	s := &Server{log: log}
	early := http.NewServeMux()
	early.HandleFunc("GET "+status.PathStatus, authorized(func(w http.ResponseWriter,
		_ *http.Request, _ uint32) {
		answer(w, http.StatusOK, state())
	}))
	early.HandleFunc("/", authorized(func(w http.ResponseWriter, r *http.Request, _ uint32) {
		if mux := s.begun.Load(); mux != nil {
			mux.ServeHTTP(w, r)
			return
		}
		answer(w, http.StatusConflict, status.Refusal{Error: "the daemon is still starting, and " +
			"has no disk that can be used: ask again when ps shows it as ready"})
	}))
	s.http = http.Server{
		Handler:           http.NewCrossOriginProtection().Handler(early),
		ConnContext:       withPeer,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       5 * time.Second,
		MaxHeaderBytes:    4 << 10,
	}
	return s
}

// Begin makes the server answer for disks in use, the sessions of a target, and snapshots. It
// resumes the handovers that were open when the daemon stopped, so their time goes on even if no
// client can connect. It is called once.
func (s *Server) Begin(disks Disks, sessions Sessions, snapshots Snapshots) {
	s.handovers = newHandovers(disks, s.log)
	s.sessions = &sessionControl{sessions, s.log}
	s.snapshots = &snapshotControl{snapshots, s.log}
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
	s.begun.Store(mux)
}

// Listen begins to answer at a path. It makes the directory if it is missing, and replaces the
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

// Added says that a LUN was added since Begin. If its disk was open to a second initiator when it
// was last served, that handover goes on.
func (s *Server) Added(lun uint16) {
	s.handovers.resume(func(added uint16) bool { return added == lun })
}

// Removed says that a LUN was removed. Its timer stops, because another disk may get its number.
func (s *Server) Removed(lun uint16) { s.handovers.arm(lun, 0) }

// Close ends every connection and removes the socket. Open handovers do not expire any more; they
// go on after the next start.
func (s *Server) Close() {
	_ = s.http.Close() // it can only fail to close the listener
	if s.handovers != nil {
		s.handovers.stopTimers()
	}
}

// maxRequest is the size of the longest request: a snapshot of all disks names each of them.
const maxRequest = 1 << 20

// understand decodes a request. If it cannot, it answers with the reason.
func understand(w http.ResponseWriter, r *http.Request, req any) bool {
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest))
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
	_ = json.NewEncoder(w).Encode(a) // if this fails, the client is gone
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
func authorized(handle func(w http.ResponseWriter, r *http.Request,
	user uint32)) http.HandlerFunc {
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
