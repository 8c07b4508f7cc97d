package server

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/loopback"
	"kubevirt.io/disk/volume"
	"kubevirt.io/disk/volume/api"
)

// Options are the options of a Server. Volumes and Portal are required.
type Options struct {
	Volumes    *volume.Manager
	TargetName string
	// Portal returns the address at which initiators find the LUNs. local is this machine's address
	// that the client has connected to. port "": there is no iSCSI.
	Portal func(local net.Addr) (host, port string)
	// Uploads receives data, at /volume/{name}/data and below. nil: the server takes no uploads.
	Uploads http.Handler
	Access  Access
	Log     *zap.Logger // nil: no log
}

// Server answers requests for volumes.
type Server struct {
	opt    Options
	access *access
	http   http.Server
	// timeout is how long the server reads from a client that it refuses.
	timeout time.Duration
	most    int // connections
	// refusals has one element for each stranger that gets an answer now.
	refusals chan struct{}
	// grace is how long a client always has to authenticate.
	grace time.Duration
	// arrival is how long a request without an upload may take to arrive.
	arrival time.Duration
}

const (
	// maxConnections limits the memory and descriptors that clients can use.
	maxConnections = 256
	// strangerTime is Server.grace: it is enough for a handshake.
	strangerTime = time.Second
	// After it has refused a client, the server still reads up to refusedBody bytes, for
	// refusedTimeout. Reading that much costs less than a TLS handshake.
	refusedBody    = 1 << 20
	refusedTimeout = 5 * time.Second
	// bodyTimeout is Server.arrival.
	bodyTimeout = 30 * time.Second
	// workTimeout is how long a request may take. An image in a registry without an index is
	// fetched first.
	workTimeout = 10 * time.Minute
	// maxStreams is how many requests a connection of HTTP/2 may have at once. Until they have got
	// the server's limit, Go and curl assume as many (RFC 9113 6.5.2). With a lower limit, those
	// beyond it would fail if their bodies were sent already.
	maxStreams = 100
	// maxRefusals is how many strangers get an answer at the same time. Each takes some 20 KiB.
	maxRefusals = maxConnections
)

// New makes a server. It reads the files of opt.Access, and returns an error if they cannot be
// used.
func New(opt Options) (*Server, error) {
	opt.Log = cmp.Or(opt.Log, zap.NewNop())
	a, err := newAccess(opt.Access, opt.Log)
	if err != nil {
		return nil, err
	}
	s := &Server{opt: opt, access: a, timeout: refusedTimeout, most: maxConnections,
		grace: strangerTime, arrival: bodyTimeout, refusals: make(chan struct{}, maxRefusals)}
	s.http = http.Server{
		Handler:           s.handler(),
		TLSConfig:         a.tls,
		ConnState:         changed,
		ConnContext:       withGuest,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxStreams},
		ErrorLog:          log.New(&errorLog{log: opt.Log}, "", 0),
	}
	return s, nil
}

// errorTold is the time between two lines of the log about connections.
const errorTold = time.Minute

// errorLog gets net/http's messages about connections. Anybody can cause any number of them.
type errorLog struct {
	log *zap.Logger

	mu     sync.Mutex
	told   time.Time // guarded by mu
	missed int       // guarded by mu; lines that were left out since
}

func (l *errorLog) Write(p []byte) (int, error) {
	text := strings.TrimSpace(string(p))
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case strings.Contains(text, "panic serving"):
		l.log.Error(text)
	case time.Since(l.told) < errorTold:
		l.missed++
	default:
		l.log.Info(text, zap.Int("not_logged_since", l.missed))
		l.told, l.missed = time.Now(), 0
	}
	return len(p), nil
}

// Serve answers requests until Shutdown. Then it returns http.ErrServerClosed.
func (s *Server) Serve(l net.Listener) error {
	l = newDoor(l, s.most, s.grace)
	if s.http.TLSConfig != nil {
		return s.http.ServeTLS(l, "", "")
	}
	return s.http.Serve(l)
}

// Shutdown stops answering. Running requests may finish until ctx ends; then their connections are
// closed.
func (s *Server) Shutdown(ctx context.Context) error {
	if err := s.http.Shutdown(ctx); err != nil {
		return errors.Join(err, s.http.Close())
	}
	return nil
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	for _, path := range []string{"/volume", "/volume/{name}"} {
		mux.HandleFunc("PUT "+path, s.limited(s.put))
		mux.HandleFunc("GET "+path, s.limited(s.get))
		mux.HandleFunc("DELETE "+path, s.limited(s.delete))
	}
	const snapshots = "/volume/{name}/snapshots"
	mux.HandleFunc("GET "+snapshots, s.limited(s.listSnapshots))
	mux.HandleFunc("PUT "+snapshots+"/{snapshot}", s.limited(s.takeSnapshot))
	mux.HandleFunc("GET "+snapshots+"/{snapshot}", s.limited(s.getSnapshot))
	mux.HandleFunc("DELETE "+snapshots+"/{snapshot}", s.limited(s.deleteSnapshot))
	mux.HandleFunc("GET "+snapshots+"/{snapshot}/changes", s.limited(s.changes))
	mux.HandleFunc("POST "+snapshots+"/{snapshot}/revert", s.limited(s.revert))
	mux.HandleFunc("GET /volumes", s.limited(s.list))
	mux.HandleFunc("GET /openapi.yaml", s.limited(document))
	if s.opt.Uploads != nil {
		mux.Handle("/volume/{name}/data", s.opt.Uploads)
		mux.Handle("/volume/{name}/data/{upload}", s.opt.Uploads)
	}
	var origins http.CrossOriginProtection
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		// A browser sends requests for every page, with its client certificate, and from a machine
		// that is admitted.
		if origins.Check(r) != nil {
			s.turnAway(w, r, api.Errorf(api.CodeForbidden, "a page of another web site asks for "+
				"this through a browser: nothing was changed"))
			return
		}
		if err := s.access.admit(r); err != nil {
			s.turnAway(w, r, err)
			return
		}
		admitted(r)
		mux.ServeHTTP(w, r)
	})
}

// turnAway answers a client that is not allowed. A client that is busy sending sees the answer only
// if the connection is not reset meanwhile, so a small request is read. A client with a large
// request has to look for the answer while it sends, or to ask first (Expect: 100-continue); curl
// does both. Strangers must not keep the server reading, nor use up its memory by HTTP/2
// connections with many requests whose answers they do not read.
func (s *Server) turnAway(w http.ResponseWriter, r *http.Request, err *api.Error) {
	select {
	case s.refusals <- struct{}{}:
		defer func() { <-s.refusals }()
	default:
		panic(http.ErrAbortHandler) // ends the request without an answer
	}
	control := http.NewResponseController(w)
	// An error means that the connection has no deadlines, as in tests.
	_ = control.SetReadDeadline(time.Now().Add(s.timeout))
	_ = control.SetWriteDeadline(time.Now().Add(s.timeout))
	w.Header().Set("Connection", "close") // the client must not keep the connection, either
	if err.Code == api.CodeUnauthorized {
		w.Header().Set("WWW-Authenticate", `Bearer realm="volumes"`)
	}
	Refuse(w, r, err)
	// Send the answer first: reading would ask a waiting client for its data.
	if control.Flush() == nil {
		_, _ = io.CopyN(io.Discard, r.Body, refusedBody)
	}
}

// limited limits the time of a request that is no upload.
func (s *Server) limited(h func(http.ResponseWriter, *http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), workTimeout)
		defer cancel()
		control := http.NewResponseController(w)
		// An error means that the connection has no deadlines, as in tests.
		if r.ContentLength != 0 { // else all has come, and a deadline would end the work
			_ = control.SetReadDeadline(time.Now().Add(s.arrival))
		}
		_ = control.SetWriteDeadline(time.Now().Add(workTimeout + bodyTimeout))
		if err := h(w, r.WithContext(ctx)); err != nil {
			s.logRefusal(r, err)
			Refuse(w, r, err)
		}
	}
}

// logRefusal logs failures of the server. Errors in a request concern only the client.
func (s *Server) logRefusal(r *http.Request, err error) {
	if refusalOf(err).HTTPStatus() < http.StatusInternalServerError || r.Context().Err() != nil {
		return
	}
	s.opt.Log.Warn("a request for a volume could not be carried out",
		zap.String("method", r.Method), zap.String("path", r.URL.Path),
		zap.String("client", r.RemoteAddr), zap.Error(err))
}

// refusalOf returns what a client may learn of an error: the refusal that has caused it, with the
// texts that wrap it.
func refusalOf(err error) *api.Error {
	refused := api.Error{Code: api.CodeFailed}
	var cause *api.Error
	switch {
	case errors.As(err, &cause):
		refused = *cause
	case disk.IsNoSpace(err):
		refused.Code = api.CodeLimit
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return api.Errorf(api.CodeUnavailable, "it took too long, and was undone: try again (%v)",
			err)
	}
	refused.Message = err.Error()
	return &refused
}

// Refuse answers a request with an error.
func Refuse(w http.ResponseWriter, r *http.Request, err error) {
	refused := refusalOf(err)
	write(w, r, refused.HTTPStatus(), refused)
}

// loopbackHost reports whether a request names this machine as its host. In a browser on this
// machine, a page of another site can send requests here under that site's name.
func loopbackHost(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	return loopback.Is(strings.Trim(host, "[]"))
}
