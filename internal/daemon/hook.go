package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/kubernetes/hook"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/nbd"
	"kubevirt.io/disk/serving"
)

const (
	// hookReconnect is how long QEMU holds requests while a connection that was lost, for example
	// by kick, is made again.
	hookReconnect = 30 * time.Second
	// hookQuiet is how long QEMU must have been away after SIGTERM. It may be about to connect.
	hookQuiet = 2 * time.Second
	// hookPatience is how long QEMU may stay after the launcher has said that it has ended.
	hookPatience = 30 * time.Second
	hookPoll     = 50 * time.Millisecond
	// hookInherit is how long the servers of the disks may take when a machine arrives.
	hookInherit = 30 * time.Second
	// hookClose is how long calls of the launcher may take at a stop.
	hookClose = 2 * time.Second
)

// launcher is what a daemon has to do with the launcher of its pod.
type launcher struct {
	hook     *options.Hook
	log      *zap.Logger
	machines func() int // connections that use disks; -1: none can be used yet
	server   *hook.Server
	over     chan struct{} // closed when the launcher says that the machine has ended
}

// newLauncher returns nil if the daemon is no hook.
func (d *Daemon) newLauncher() *launcher {
	if d.opt.Hook == nil {
		return nil
	}
	over := make(chan struct{})
	return &launcher{hook: d.opt.Hook, log: d.log, machines: d.machines, over: over,
		server: hook.NewServer(hook.Options{Define: d.define,
			Shutdown: sync.OnceFunc(func() { close(over) }), Log: d.log.Named("hook")})}
}

// attend returns a context that ends when the daemon shall stop. That of a hook ends when the
// machine has: the pod's end is announced to all containers at once, and the guest still shuts down
// then.
func (l *launcher) attend(ctx context.Context) (longer context.Context, stop context.CancelFunc) {
	if l == nil {
		return ctx, func() {}
	}
	longer, stop = context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer stop()
		select {
		case <-longer.Done():
			return
		case <-l.over:
		case <-ctx.Done():
			if l.machines() > 0 {
				l.log.Info("stopping when the machine has ended")
			}
		}
		l.waitForMachine(longer)
	}()
	return longer, stop
}

// waitForMachine returns when no QEMU uses the disks any more.
func (l *launcher) waitForMachine(ctx context.Context) {
	tick := time.NewTicker(hookPoll)
	defer tick.Stop()
	over := l.over
	var late <-chan time.Time
	for seen := time.Now(); ; {
		n := l.machines()
		if n < 0 || n == 0 && (isClosed(l.over) || time.Since(seen) > hookQuiet) {
			return
		}
		if n > 0 {
			seen = time.Now()
		}
		select {
		case <-ctx.Done():
			return
		case <-over:
			over, late = nil, time.After(hookPatience)
		case <-late:
			l.log.Warn("the machine has ended, but somebody still uses the disks: stopping",
				zap.Int("connections", n))
			return
		case <-tick.C:
		}
	}
}

// machines is the number of connections that use disks; -1: none can be used yet.
func (d *Daemon) machines() int {
	if d.running() != nil {
		return -1
	}
	return len(d.nbd.Sessions())
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// serve answers the launcher, which waits for the socket: the disks can be used now. end ends that.
func (l *launcher) serve() (served <-chan error, end func(), err error) {
	if l == nil {
		return nil, func() {}, nil
	}
	at, err := listenHook(l.hook)
	if err != nil {
		return nil, func() {}, err
	}
	done := make(chan error, 1)
	go func() { done <- l.server.Serve(at) }()
	l.log.Info("KubeVirt's launcher can use the disks", zap.String("socket", at.Addr().String()))
	return done, func() { closeHook(l.server) }, nil
}

func closeHook(s *hook.Server) {
	ctx, cancel := context.WithTimeout(context.Background(), hookClose)
	defer cancel()
	_ = s.Close(ctx) // it is closed in any case
}

// define puts the disks into a domain. If the machine arrives by a live migration, it makes them
// its own.
func (d *Daemon) define(ctx context.Context, c hook.Call) ([]byte, error) {
	var disks []hook.Disk
	now, far := d.Status(), d.farDisks()
	for _, l := range now.LUNs {
		if l.Failure != "" {
			return nil, fmt.Errorf("disk %q has failed: %s", l.Image, l.Failure)
		}
		_, elsewhere := far[l.LUN]
		disks = append(disks, hook.Disk{Number: l.LUN, Elsewhere: elsewhere, Export: libvirt.Export{
			Name:       d.nbd.Export(l.LUN),
			Socket:     d.opt.Hook.LauncherNBD(),
			Reconnect:  hookReconnect,
			AccessMode: hookAccess(l.AccessMode),
			ReadOnly:   l.ReadOnly,
			Serial:     l.Serial,
			BlockSize:  l.BlockSize,
		}})
	}
	domain, err := hook.Edit(c, disks, d.opt.Hook.Container)
	if err != nil || !c.Arrives() {
		return domain, err
	}
	ctx, cancel := context.WithTimeout(ctx, hookInherit)
	defer cancel()
	for _, l := range now.LUNs {
		if err := far[l.LUN].Inherit(ctx); err != nil {
			return nil, fmt.Errorf("disk %q cannot follow the machine: %w", l.Image, err)
		}
		d.log.Info("the machine arrives by a live migration: its first write takes the disk over",
			zap.Uint16("lun", l.LUN))
	}
	return domain, nil
}

// farDisks are the disks of other servers, by number.
func (d *Daemon) farDisks() map[uint16]*nbd.Remote {
	far := map[uint16]*nbd.Remote{}
	for _, s := range d.disks.Served() {
		if s.Elsewhere != nil {
			far[s.LUN] = s.Elsewhere.Disk.(*nbd.Remote)
		}
	}
	return far
}

// hookAccess is the access mode in the domain. A disk that is shared to be written is not: nobody
// else reaches it in the pod, and KubeVirt would take the machine for one that can migrate.
func hookAccess(mode string) libvirt.AccessMode {
	if mode == string(serving.AccessReadShared) {
		return libvirt.ReadShared
	}
	return libvirt.WriteExclusive
}

// RefuseHook tells the launcher why there are no disks: it does not start the machine, and its log
// has the reason. Without that it would wait for the hook. RefuseHook returns when ctx ends, or the
// launcher says that the machine has ended.
func RefuseHook(ctx context.Context, h *options.Hook, reason error, log *zap.Logger) error {
	over := make(chan struct{})
	server := hook.NewServer(hook.Options{Log: log.Named("hook"),
		Define:   func(context.Context, hook.Call) ([]byte, error) { return nil, reason },
		Shutdown: sync.OnceFunc(func() { close(over) })})
	l, err := listenHook(h)
	if err != nil {
		return fmt.Errorf("KubeVirt's launcher cannot be told: %w", err)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	defer closeHook(server)
	select {
	case <-ctx.Done():
		return nil
	case <-over:
		return nil
	case err := <-served:
		return err
	}
}

// hookListener removes the socket when it is closed, unless it is another daemon's by then.
type hookListener struct {
	net.Listener
	path string
	made fs.FileInfo
}

// Addr implements net.Listener.
func (l *hookListener) Addr() net.Addr { return &net.UnixAddr{Name: l.path, Net: "unix"} }

// Close implements net.Listener.
func (l *hookListener) Close() error {
	if there, err := os.Lstat(l.path); err == nil && os.SameFile(l.made, there) {
		_ = os.Remove(l.path)
	}
	return l.Listener.Close()
}

// listenHook makes the hook's socket. The launcher never sees one that does not answer, except that
// of a killed daemon, which is replaced.
func listenHook(h *options.Hook) (net.Listener, error) {
	path, aside := h.Sockets()
	failed := func(err error) error { return fmt.Errorf("the hook's socket %q: %w", path, err) }
	ctx, cancel := context.WithTimeout(context.Background(), hookClose)
	defer cancel()
	if c, err := socket.DialUnix(ctx, path); err == nil {
		_ = c.Close()
		return nil, failed(fmt.Errorf("another daemon uses it: %w", unix.EADDRINUSE))
	}
	l, err := socket.ListenUnix(aside)
	if err != nil {
		return nil, failed(err)
	}
	made, err := os.Lstat(aside)
	if err == nil {
		err = os.Rename(aside, path)
	}
	if err != nil {
		return nil, failed(errors.Join(err, l.Close()))
	}
	return &hookListener{Listener: l, path: path, made: made}, nil
}
