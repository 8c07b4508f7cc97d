package control

import (
	"encoding/json"
	"net/http"
	"time"

	"go.uber.org/zap"
)

// Target is what of a target the socket is for; *target.Server is one.
type Target interface {
	luns
	sessions
}

// Server carries out what is asked through the control socket.
type Server struct {
	log       *zap.Logger
	handovers *handovers
	sessions  *sessionControl
	http      http.Server
}

// New makes a server for a target, and takes up the handovers that were open when the daemon ended:
// their time goes on also where nobody can connect. The caller closes it.
func New(t Target, log *zap.Logger) *Server {
	s := &Server{log: log, handovers: newHandovers(t, log), sessions: &sessionControl{t, log}}
	s.handovers.resume(func(uint16) bool { return true })
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+pathHandover, authorized(s.handovers.handle))
	mux.HandleFunc("GET "+pathSessions, authorized(s.sessions.list))
	mux.HandleFunc("POST "+pathKick, authorized(s.sessions.kick))
	s.http = http.Server{
		Handler:           mux,
		ConnContext:       withPeer,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       5 * time.Second,
		MaxHeaderBytes:    4 << 10,
	}
	return s
}

// Listen begins to answer at a path, the directory of which is made if it is missing. A socket that
// a killed daemon left there is replaced, and nothing else.
func (s *Server) Listen(path string) error {
	l, err := listen(path)
	if err != nil {
		return err
	}
	go func() {
		// It returns when it is closed; a daemon that cannot be controlled any more goes on
		// serving.
		_ = s.http.Serve(l)
	}()
	return nil
}

// Added says that a LUN was added since New: where it was open to a second initiator when its disk
// was last served, its time goes on.
func (s *Server) Added(lun uint16) {
	s.handovers.resume(func(added uint16) bool { return added == lun })
}

// Removed says that a LUN was removed: no time of it runs out any more, as another disk may have
// its number soon.
func (s *Server) Removed(lun uint16) { s.handovers.arm(lun, 0) }

// Close ends every connection and removes the socket. No handover runs out any more; those that are
// open go on after the next start.
func (s *Server) Close() {
	_ = s.http.Close() // it was only listening
	s.handovers.stopTimers()
}

// understand reads a request, and answers it where that fails.
func understand(w http.ResponseWriter, r *http.Request, req any) bool {
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4<<10))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(req)
	if err != nil {
		answer(w, http.StatusBadRequest, refusal{"the request is not understood: " + err.Error()})
	}
	return err == nil
}

func answer(w http.ResponseWriter, status int, a any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(a) // nobody listens any more
}
