package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/target"
)

// handoverRequest is what the command handover asks of the daemon.
type handoverRequest struct {
	Action  string  `json:"action"` // "open", "finish" or "cancel"
	LUN     uint16  `json:"lun"`
	To      string  `json:"to,omitempty"`      // initiator name
	Seconds float64 `json:"seconds,omitempty"` // that it stays open; 0: until finish or cancel
}

// handoverAnswer is how that went.
type handoverAnswer struct {
	Done string `json:"done"`
}

// control carries out what is asked through the control socket: by the daemon's own user or root, whom the kernel names.
type control struct {
	srv handovers
	log *zap.Logger

	mu       sync.Mutex
	turns    map[uint16]chan struct{} // guarded by mu; room for the one who acts on a LUN
	openings map[uint16]*opening      // guarded by mu; of LUNs that are open for a time; changed by who has the turn
	closed   bool                     // guarded by mu; no time runs out any more
}

// handovers is what of the server the control socket is for.
type handovers interface {
	Admit(lun uint16, initiator string, until time.Time) error
	HandOver(lun uint16) (former string, err error)
	Withdraw(lun uint16) (guest string, err error)
	Openings() []target.Opening
}

// opening is the time that a LUN is open.
type opening struct{ timer *time.Timer }

func newControl(srv handovers, log *zap.Logger) *control {
	return &control{srv: srv, log: log, turns: map[uint16]chan struct{}{}, openings: map[uint16]*opening{}}
}

// serveControl listens on the control socket, and takes up the handovers that were open at the last stop.
func (d *daemon) serveControl(srv *target.Server) (closeControl func()) {
	c := newControl(srv, d.log.Named("control"))
	c.resume()
	path := d.cfg.controlSocket
	if path == "" {
		return c.stopTimers
	}
	l, err := listenUnix(path)
	if err != nil {
		// The disks can be served all the same.
		d.log.Warn("there is no control socket, so handover, sessions and kick find no daemon",
			zap.String("socket", path), zap.Error(err),
			zap.String("try", "another --"+keyControlSocket+", or \"\" to do without"))
		return c.stopTimers
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /handover", authorized(c.handle))
	sessions := &sessionControl{srv: srv, log: c.log}
	mux.HandleFunc("GET "+pathSessions, authorized(sessions.list))
	mux.HandleFunc("POST "+pathKick, authorized(sessions.kick))
	server := &http.Server{Handler: mux, ConnContext: withPeer, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 5 * time.Second, MaxHeaderBytes: 4 << 10}
	go func() {
		// It returns when it is closed; a daemon that cannot be controlled any more goes on serving.
		_ = server.Serve(l)
	}()
	return func() {
		_ = server.Close()
		c.stopTimers()
	}
}

// listenUnix makes a socket that only the own user can connect to. One that a killed daemon left is replaced.
func listenUnix(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	dir, short, err := shortPath(path)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	lockDir(dir)
	c, dialErr := net.Dial("unix", short)
	if dialErr == nil {
		_ = c.Close()
		return nil, fmt.Errorf("another daemon uses it: %w", unix.EADDRINUSE)
	}
	switch info, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case info.Mode()&fs.ModeSocket == 0:
		return nil, fmt.Errorf("%q is there already, and no socket", path)
	case !errors.Is(dialErr, unix.ECONNREFUSED):
		// It is too busy to accept, or of another user, of whom the kernel does not tell whether he listens.
		return nil, fmt.Errorf("another daemon uses it, or has left it: %w", dialErr)
	default:
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	l, err := net.Listen("unix", short)
	if err != nil {
		return nil, err
	}
	// Whoever connects before this is asked for his credentials all the same.
	made, err := restrict(dir, filepath.Base(path))
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return &unixListener{Listener: l, path: path, made: made}, nil
}

// restrict lets only the own user connect to a socket, unless something else has its name by now, as a link to another file.
func restrict(dir *os.File, name string) (fs.FileInfo, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: filepath.Join(dir.Name(), name), Err: err}
	}
	socket := os.NewFile(uintptr(fd), filepath.Join(dir.Name(), name))
	defer socket.Close()
	info, err := socket.Stat()
	if err == nil && info.Mode()&fs.ModeSocket == 0 {
		err = fmt.Errorf("%s was replaced by something that is no socket", socket.Name())
	}
	if err != nil {
		return nil, err
	}
	return info, os.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), 0o600) // a path descriptor has no other way
}

// lockDir keeps other daemons from making a socket in the directory until it is closed: one that listens in a moment looks as if it had been left.
// Where there are no locks, or somebody keeps one, that is no reason to do without the socket.
func lockDir(dir *os.File) {
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
			return
		}
	}
}

// unixListener removes the socket by its own name when it is closed, unless that is another daemon's by then.
type unixListener struct {
	net.Listener
	path string
	made fs.FileInfo
}

func (l *unixListener) Close() error {
	err := l.Listener.Close()
	if inPlace(l.made, l.path) {
		_ = os.Remove(l.path)
	}
	return err
}

// shortPath names a socket by its open directory, as the address of a socket holds 107 bytes only.
func shortPath(path string) (dir *os.File, short string, err error) {
	dir, err = os.Open(filepath.Dir(path))
	if err != nil {
		return nil, "", err
	}
	return dir, fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)), nil
}

type peerKey struct{}

// withPeer notes who is at the other end of a connection.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	if peer := peerOf(c); peer != nil {
		return context.WithValue(ctx, peerKey{}, peer)
	}
	return ctx
}

// peerOf is the process at the other end of a Unix socket, as the kernel knows it; nil: it does not. A process that has no number in this
// container has 0.
func peerOf(c net.Conn) (peer *unix.Ucred) {
	socket, ok := c.(*net.UnixConn)
	if !ok {
		return nil
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return nil
	}
	_ = raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			peer = cred
		}
	})
	return peer
}

// controlError is the answer to what is not done.
type controlError struct {
	Error string `json:"error"`
}

// authorized answers the daemon's own user and root only.
func authorized(handle func(w http.ResponseWriter, r *http.Request, user uint32)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		peer, ok := r.Context().Value(peerKey{}).(*unix.Ucred)
		if !ok || peer.Uid != 0 && int(peer.Uid) != os.Geteuid() {
			answer(w, http.StatusForbidden, controlError{"only the user of the daemon and root may do that"})
			return
		}
		handle(w, r, peer.Uid)
	}
}

// understand reads a request, and answers it where that fails.
func understand(w http.ResponseWriter, r *http.Request, req any) bool {
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4<<10))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(req)
	if err != nil {
		answer(w, http.StatusBadRequest, controlError{"the request is not understood: " + err.Error()})
	}
	return err == nil
}

func (c *control) handle(w http.ResponseWriter, r *http.Request, user uint32) {
	var req handoverRequest
	if !understand(w, r, &req) {
		return
	}
	done, err := c.do(r.Context(), req)
	if err != nil {
		answer(w, http.StatusConflict, controlError{err.Error()})
		return
	}
	c.log.Info("handover", zap.String("action", req.Action), zap.Uint16("lun", req.LUN),
		zap.String("done", done), zap.Uint32("by_user", user))
	answer(w, http.StatusOK, handoverAnswer{Done: done})
}

func answer(w http.ResponseWriter, status int, a any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(a) // nobody listens any more
}

func (c *control) do(ctx context.Context, req handoverRequest) (done string, err error) {
	if req.Action == "open" {
		if err := chap.CheckInitiatorName(req.To); err != nil {
			return "", fmt.Errorf("the name of the initiator, %q, %w", req.To, err)
		}
		// What a Duration does not hold would leave the LUN open for ever.
		if req.Seconds < 0 || req.Seconds >= time.Duration(math.MaxInt64).Seconds() {
			return "", fmt.Errorf("a LUN cannot be open for %g seconds", req.Seconds)
		}
	}
	end, err := c.begin(ctx, req.LUN)
	if err != nil {
		return "", err
	}
	defer end()
	switch req.Action {
	case "open":
		said, open, until := "until it is finished or cancelled", time.Duration(req.Seconds*float64(time.Second)), time.Time{}
		if open > 0 {
			said, until = fmt.Sprintf("for %v", open), time.Now().Add(open)
		}
		if err := c.srv.Admit(req.LUN, req.To, until); err != nil {
			return "", err
		}
		c.arm(req.LUN, open)
		return fmt.Sprintf("LUN %d is open to %s too, %s", req.LUN, req.To, said), nil
	case "finish":
		err = c.end(req.LUN, func(lun uint16) error {
			former, err := c.srv.HandOver(lun)
			done = handedOver(lun, former)
			return err
		})
		return done, err
	case "cancel":
		err = c.end(req.LUN, func(lun uint16) error {
			fenced, err := c.srv.Withdraw(lun)
			done = fmt.Sprintf("LUN %d stays with its owner, and %s is fenced", lun, fenced)
			return err
		})
		return done, err
	}
	return "", fmt.Errorf("%q is no action: use open, finish or cancel", req.Action)
}

// handedOver is what a person is told of a handover, with the former owner's name, if there was any.
func handedOver(lun uint16, former string) string {
	if former == "" {
		return fmt.Sprintf("LUN %d has a new owner, and nobody is fenced, as nobody is known to have used it before: "+
			"to fence a machine that may still have the guest, open the LUN to its name by --to and close it again by --cancel", lun)
	}
	return fmt.Sprintf("LUN %d has a new owner, and the former one, %s, is fenced", lun, former)
}

// turnWait is how long a request waits for the one before it: shorter than the client's patience, so that the client learns why, and than
// the server's ReadTimeout, with which net/http ends the context of a request.
const turnWait = 3 * time.Second

// begin waits for the turn at a LUN, which end gives back. A time that runs out and a request that extends it come one after the other, so
// that nobody is told that a LUN is open which is being handed over. Other LUNs, and the end of the daemon, wait for no slow disk.
func (c *control) begin(ctx context.Context, lun uint16) (end func(), err error) {
	ctx, stop := context.WithTimeout(ctx, turnWait)
	defer stop()
	turn := c.turn(lun)
	select {
	case turn <- struct{}{}:
		return func() { <-turn }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("the handover of LUN %d is ending, and its disk still works for the initiator that is fenced; try again when it answers", lun)
	}
}

func (c *control) turn(lun uint16) chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.turns[lun] == nil {
		c.turns[lun] = make(chan struct{}, 1)
	}
	return c.turns[lun]
}

// end ends a handover before its time. Where that is refused nothing changes, the time that it has left included.
func (c *control) end(lun uint16, how func(lun uint16) error) error {
	err := how(lun)
	if err == nil {
		c.arm(lun, 0)
	}
	return err
}

// arm ends the time that a LUN is open when it is over; 0: not by itself.
func (c *control) arm(lun uint16, after time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if o := c.openings[lun]; o != nil {
		o.timer.Stop()
		delete(c.openings, lun)
	}
	if after > 0 && !c.closed {
		o := new(opening)
		o.timer = time.AfterFunc(after, func() { c.expire(lun, o) })
		c.openings[lun] = o
	}
}

// resumeGrace is the least time that a LUN is open after a restart: the machine that the guest runs on has to log in again before it can be
// told who is to be fenced. Initiators try at least every 30 seconds.
const resumeGrace = time.Minute

// resume takes up the time of what was open when the daemon ended.
func (c *control) resume() {
	for _, o := range c.srv.Openings() {
		log := c.log.With(zap.Uint16("lun", o.LUN), zap.String("to", o.To))
		if o.Until.IsZero() {
			log.Info("the LUN is still open for a handover, until it is finished or cancelled")
			continue
		}
		left := max(time.Until(o.Until), resumeGrace)
		c.arm(o.LUN, left)
		log.Info("the LUN is still open for a handover", zap.Duration("for", left))
	}
}

// expireAgain is when a time that is over is ended again, after storage has failed that has to note it.
const expireAgain = 10 * time.Second

// expire fences the former owner, unless the new one is not there: then the guest is still where it was. Nobody can tell that where the
// handover fails for another reason, as storage does, and it is tried again. It does nothing where the time was extended, or the handover
// ended, before it has the turn.
func (c *control) expire(lun uint16, o *opening) {
	turn := c.turn(lun)
	turn <- struct{}{}
	defer func() { <-turn }()
	if !c.over(lun, o) {
		return
	}
	former, err := c.srv.HandOver(lun)
	if err == nil {
		said := "the time of the handover is over: the former owner is fenced"
		if former == "" {
			said = "the time of the handover is over, and nobody is fenced, as nobody is known to have used the LUN before"
		}
		c.log.Info(said, zap.Uint16("lun", lun), zap.String("fenced", former))
		return
	}
	failed, fenced := err, ""
	if errors.Is(err, target.ErrNotLoggedIn) {
		fenced, failed = c.srv.Withdraw(lun)
	}
	if failed != nil {
		c.arm(lun, expireAgain)
		c.log.Error("the time of the handover is over, but the LUN is open to both initiators still", zap.Uint16("lun", lun), zap.Error(failed),
			zap.Duration("tried_again_after", expireAgain))
		return
	}
	c.log.Warn("the time of the handover is over, and the LUN stays with its owner", zap.Uint16("lun", lun), zap.String("fenced", fenced), zap.Error(err))
}

// over takes the time of a LUN away, if it still is the one that has run out.
func (c *control) over(lun uint16, o *opening) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.openings[lun] != o {
		return false
	}
	delete(c.openings, lun)
	return true
}

func (c *control) stopTimers() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, o := range c.openings {
		o.timer.Stop()
	}
}
