package daemon

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/kubevirt"
)

const (
	// hookQuiet is how long QEMU must have been away after SIGTERM. It may be about to connect.
	hookQuiet = 2 * time.Second
	// hookTimeout is how long QEMU may stay after the launcher has said that it has ended.
	hookTimeout = 30 * time.Second
	// hookRefused is how long a hook goes on after it has refused a machine that arrives by a live
	// migration. KubeVirt (1.7) starts QEMU anyway within a second, and QEMU gets the reason.
	hookRefused = time.Minute
	hookPoll    = 50 * time.Millisecond
	// hookLook is how often a hook looks for the launcher. It must be missing hookMissed times in a
	// row, because the kernel's list of sockets can change while it is read in pieces.
	hookLook   = time.Second
	hookMissed = 3
	// hookClose is how long calls of the launcher may take at a stop.
	hookClose = 2 * time.Second
)

// launcherSockets is the directory of the launcher's socket for virt-handler. The socket exists
// from before the launcher asks for a domain until its end.
const launcherSockets = "/var/run/kubevirt/sockets/"

// Launcher answers KubeVirt's launcher of the pod, at the hook's socket. Any number of goroutines
// may call its methods.
type Launcher struct {
	hook    *options.Hook
	log     *zap.Logger
	server  *kubevirt.Server
	sockets string             // launcherSockets, except in tests
	ended   chan struct{}      // closed by end
	end     func()             // the machine has ended, or does not come
	refused chan struct{}      // closed when a machine that arrives was refused for good
	gone    chan struct{}      // closed when calls are not answered any more
	asked   chan kubevirt.Call // has the first call
	can     chan struct{}      // closed when define is set

	closed sync.Once
	mu     sync.Mutex
	served chan error // guarded by mu; nil: there is no socket yet
	// machines is the number of connections that use disks; -1: none can use one yet. Guarded by mu
	machines func() int
	define   func(context.Context, kubevirt.Call) ([]byte, error)
}

// NewLauncher makes a Launcher that does not answer yet. Without a hook it returns nil.
func NewLauncher(h *options.Hook, log *zap.Logger) *Launcher {
	if h == nil {
		return nil
	}
	log = cmp.Or(log, zap.NewNop())
	l := &Launcher{hook: h, log: log, machines: func() int { return -1 },
		sockets: launcherSockets, ended: make(chan struct{}), refused: make(chan struct{}),
		gone: make(chan struct{}), asked: make(chan kubevirt.Call, 1),
		can: make(chan struct{})}
	l.end = sync.OnceFunc(func() { close(l.ended) })
	l.server = kubevirt.NewServer(kubevirt.Options{Define: l.answer, Shutdown: l.end,
		Log: log.Named("hook")})
	return l
}

// answer answers a call, once define is set. It does not end earlier with ctx: define has to know
// that the launcher has given up.
func (l *Launcher) answer(ctx context.Context, c kubevirt.Call) ([]byte, error) {
	select {
	case l.asked <- c:
	default:
	}
	select {
	case <-l.can:
		return l.define(ctx, c)
	case <-l.gone:
		return nil, errNotReady
	}
}

// Claim accepts the launcher's first call before there are disks, and returns the place of this
// container's claim in the machine: see kubevirt.Call. The answer comes later, from the daemon that
// attends to the launcher or from Refuse.
func (l *Launcher) Claim(ctx context.Context) (dir string, said bool, err error) {
	if err := l.listen(); err != nil {
		return "", false, err
	}
	select {
	case c := <-l.asked:
		return c.Claim(l.hook.Container)
	case <-ctx.Done():
	case <-l.ended:
		err = errors.New("the machine has ended before its disks were asked for")
	case err = <-l.served:
	}
	return "", false, errors.Join(err, ctx.Err())
}

// Ended reports whether the machine has ended, or does not come. The launcher may be nil.
func (l *Launcher) Ended() bool { return l != nil && isClosed(l.ended) }

// listen makes the hook's socket, unless it exists.
func (l *Launcher) listen() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.served != nil {
		return nil
	}
	path, aside := l.hook.Sockets()
	at, err := socket.ListenUnixAside(path, aside)
	if err != nil {
		return fmt.Errorf("the hook's socket %q: %w", path, err)
	}
	l.served = make(chan error, 1)
	go func() { l.served <- l.server.Serve(at) }()
	go l.watch()
	return nil
}

// watch waits for the end of the launcher, which does not always say that its machine has ended:
// older launchers never do, and others not if they gave up before they had one, for example because
// another hook sidecar has failed. As long as a container of the pod runs, the pod stays and, where
// a machine should arrive, delays the next migration.
//
// The containers of a pod share a network, and with it the kernel's list of Unix sockets, wherever
// their files are. Only a launcher that was seen can be missed. QEMU ends with it, so a disk in use
// proves that the launcher is there.
func (l *Launcher) watch() {
	tick := time.NewTicker(hookLook)
	defer tick.Stop()
	warned := false
	for seen, missed := false, 0; ; {
		select {
		case <-tick.C:
		case <-l.ended:
			return
		case <-l.gone:
			return
		}
		sockets, err := os.ReadFile("/proc/self/net/unix")
		if err != nil {
			if !warned {
				l.log.Warn("whether KubeVirt's launcher has ended cannot be seen: delete the pod "+
					"if its machine has not come", zap.Error(err))
			}
			warned = true // one message is enough, and the list may be back
			continue
		}
		missed++
		switch there := l.listens(sockets); {
		case there && !seen:
			l.log.Info("KubeVirt's launcher is there: this hook ends when that does")
			seen, missed = true, 0
		case there || l.using() > 0:
			missed = 0
		case seen && missed >= hookMissed:
			l.log.Info("KubeVirt's launcher has ended")
			l.end()
			return
		}
	}
}

// listens reports whether the list has a socket at which the launcher listens. The launcher's end
// of a connection has the same path (proc(5)).
func (l *Launcher) listens(sockets []byte) bool {
	for line := range bytes.Lines(sockets) {
		const flags, path, listening = 3, 7, "00010000"
		f := bytes.Fields(line)
		if len(f) > path && string(f[flags]) == listening &&
			bytes.HasPrefix(f[path], []byte(l.sockets)) {
			return true
		}
	}
	return false
}

// using is the number of connections that use disks; -1: none can use one yet.
func (l *Launcher) using() int {
	l.mu.Lock()
	machines := l.machines
	l.mu.Unlock()
	return machines()
}

// answerBy makes define answer the launcher from now on.
func (l *Launcher) answerBy(define func(context.Context, kubevirt.Call) ([]byte, error)) error {
	if err := l.listen(); err != nil {
		return err
	}
	l.define = define
	close(l.can)
	return nil
}

// serve answers the launcher, which waits for the disks. end ends it.
func (l *Launcher) serve(define func(context.Context, kubevirt.Call) ([]byte, error)) (
	served <-chan error, end func(), err error) {
	if l == nil {
		return nil, func() {}, nil
	}
	if err := l.answerBy(define); err != nil {
		return nil, func() {}, err
	}
	path, _ := l.hook.Sockets()
	l.log.Info("KubeVirt's launcher can use the disks", zap.String("socket", path))
	return l.served, l.Close, nil
}

// Close ends the answers. Later calls do nothing.
func (l *Launcher) Close() {
	l.closed.Do(func() { close(l.gone) })
	ctx, cancel := context.WithTimeout(context.Background(), hookClose)
	defer cancel()
	_ = l.server.Close(ctx) // it is closed in any case
}

// Refuse answers the launcher with the reason why there are no disks. Then the launcher does not
// start the machine, and logs the reason. Without an answer it would wait for the hook. Refuse
// returns when ctx or the launcher ends.
func (l *Launcher) Refuse(ctx context.Context, reason error) error {
	err := l.answerBy(func(context.Context, kubevirt.Call) ([]byte, error) { return nil, reason })
	if err != nil {
		return fmt.Errorf("KubeVirt's launcher cannot be told: %w", err)
	}
	defer l.Close()
	select {
	case <-ctx.Done():
		return nil
	case <-l.ended:
		return nil
	case err := <-l.served:
		return err
	}
}

// attend returns a context that ends when the daemon shall stop. For a hook, that is when the
// machine has ended: all containers get the signal for the pod's end at once, while the guest still
// shuts down. It also ends when a machine was refused: KubeVirt makes no pod for the next migration
// while a container of this one runs.
func (l *Launcher) attend(ctx context.Context) (longer context.Context, stop context.CancelFunc) {
	if l == nil {
		return ctx, func() {}
	}
	longer, stop = context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer stop()
		select {
		case <-longer.Done():
			return
		case <-l.ended:
		case <-l.refused:
			select {
			case <-longer.Done():
				return
			case <-l.ended:
			case <-ctx.Done():
			case <-time.After(hookRefused):
				l.log.Info("stopping: the machine does not arrive here")
			}
		case <-ctx.Done():
			if l.using() > 0 {
				l.log.Info("stopping when the machine has ended")
			}
		}
		l.waitForMachine(longer)
	}()
	return longer, stop
}

// waitForMachine returns when no QEMU uses the disks any more.
func (l *Launcher) waitForMachine(ctx context.Context) {
	tick := time.NewTicker(hookPoll)
	defer tick.Stop()
	over := l.ended
	var late <-chan time.Time
	for seen := time.Now(); ; {
		n := l.using()
		if n < 0 || n == 0 && (isClosed(l.ended) || time.Since(seen) > hookQuiet) {
			return
		}
		if n > 0 {
			seen = time.Now()
		}
		select {
		case <-ctx.Done():
			return
		case <-over:
			over, late = nil, time.After(hookTimeout)
		case <-late:
			l.log.Warn("the machine has ended, but somebody still uses the disks: stopping",
				zap.Int("connections", n))
			return
		case <-tick.C:
		}
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
