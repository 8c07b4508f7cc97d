package nbd

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/serving"
)

// RemoteOptions say where a disk of another server is.
type RemoteOptions struct {
	Address string // HOST:PORT, or serving.SocketPrefix and the path of a socket
	Export  string // "": the server's only disk
	// TLS returns the configuration for a connection; nil: no TLS. It is called for each
	// connection, because the certificates may have changed.
	TLS func() (*tls.Config, error)
	Log *zap.Logger // nil: no log
	// Once says that the disk fails when its connection breaks, because another client may then own
	// the disk and change it.
	Once bool
	// ReconnectDelay is the longest delay before a new connection, if several connections have
	// broken at once within the last minute. Default 2 s; less than 0: there is none.
	ReconnectDelay time.Duration
	// Keep is how many bytes of memory are for changes that the server has not made durable; 0: 16
	// MiB.
	Keep int
}

// Remote is a disk that another server of kubevirt-disk has, as a disk of this process. While the
// server cannot be reached, calls wait: it is far (disk.Far). After a broken connection Remote
// connects again and repeats the requests without an answer. It also repeats answered changes that
// are not durable, but only if the server was restarted, which may have lost them, and if nobody
// else has used the disk since they were made. Otherwise it would undo the writes of others.
//
// On a disk that others may write at the same time, nothing is repeated. Each change is durable
// there before it is answered.
//
// A request may still be under way at the server when its connection breaks. So the server is asked
// to end the former connection of the session, with all its requests, before a new one may do
// anything.
type Remote struct {
	dialer
	first    greeting
	log      *zap.Logger
	ctx      context.Context // ends with Close
	stop     context.CancelFunc
	inherit  chan inheritance
	kept     *unflushed
	free     freeCalls
	extents  extents
	flushing atomic.Bool             // a flush in the background is under way
	breaks   *serving.Penalties      // of connections that break at once
	told     *serving.Seldom[string] // limits the log lines about these breaks
	wg       sync.WaitGroup          // counts the background goroutines
	boot     string                  // diskInfo.boot of the server that has all of kept; of connect
	// repeatFrom is the number of the first change in kept that may be repeated: since the ones
	// before it, others have used the disk. Only connect uses it.
	repeatFrom uint64

	readOnly, shared atomic.Bool // as the server has said last
	why              atomic.Pointer[lastError]

	mu      sync.Mutex
	link    *link         // guarded by mu; nil: no connection now
	changed chan struct{} // guarded by mu; closed when link or failed changes
	failed  error         // guarded by mu; for good
}

var (
	_ disk.Disk      = (*Remote)(nil)
	_ disk.Discarder = (*Remote)(nil)
	_ disk.Zeroer    = (*Remote)(nil)
	_ disk.Remote    = (*Remote)(nil)
)

const (
	firstRedial = 100 * time.Millisecond
	lastRedial  = 5 * time.Second
	// replayed is how many changes are repeated at once.
	replayed = 64
	// longest is the longest discard or zeroing in one request, in bytes.
	longest = 1 << 30
)

// OpenRemote connects to a disk of another server. It is an error if that is not possible now.
// Later the log says when the connection is lost, and when it is back.
func OpenRemote(ctx context.Context, opt RemoteOptions) (*Remote, error) {
	r := &Remote{dialer: dialer{RemoteOptions: opt, session: rand.Text()}, log: opt.Log,
		changed: make(chan struct{}), inherit: make(chan inheritance),
		breaks: serving.NewPenalties(cmp.Or(opt.ReconnectDelay, 2*time.Second)),
		told:   serving.NewSeldom[string](time.Minute)}
	r.kept = newUnflushed(cmp.Or(opt.Keep, maxUnflushed), r.flushSoon)
	r.log = cmp.Or(r.log, zap.NewNop())
	l, err := r.dial(ctx)
	if err != nil {
		return nil, r.explain(err)
	}
	r.ctx, r.stop = context.WithCancel(context.Background())
	r.first, r.boot = l.greeting, l.boot
	r.begin(l)
	r.set(l, nil)
	r.wg.Add(1)
	go r.connect(l)
	return r, nil
}

// Unreachable reports whether an error of OpenRemote says that no server has answered to the end.
// Then another attempt may succeed.
func Unreachable(err error) bool {
	var network *net.OpError
	return errors.As(err, &network) && network.Op == "dial" ||
		slices.ContainsFunc([]error{errSilent, io.EOF, io.ErrUnexpectedEOF, unix.ECONNRESET,
			unix.EPIPE}, func(broken error) bool { return errors.Is(err, broken) })
}

// lastError is why the server could not be used.
type lastError struct {
	text string
	at   time.Time
}

// Why returns why the server could not be used last, and when; "": it always could.
func (r *Remote) Why() (text string, at time.Time) {
	if last := r.why.Load(); last != nil {
		return last.text, last.at
	}
	return "", time.Time{}
}

func (r *Remote) noteWhy(err error) { r.why.Store(&lastError{err.Error(), time.Now()}) }

func (r *Remote) explain(err error) error {
	return fmt.Errorf("export %q of the NBD server %s: %w", r.Export, r.Address, err)
}

// begin lets a connection receive replies.
func (r *Remote) begin(l *link) {
	l.acked = r.acknowledged
	go l.receive()
}

// set sets the connection of the disk; nil: there is none now. failed is for good.
func (r *Remote) set(l *link, failed error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.link = l
	if l != nil {
		r.readOnly.Store(l.readOnly())
		r.shared.Store(l.shared)
	}
	r.changeLocked(failed)
}

// fail ends the use of the disk for good.
func (r *Remote) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.changeLocked(err)
}

func (r *Remote) changeLocked(failed error) {
	if r.failed == nil {
		r.failed = failed
	}
	if r.failed != nil {
		r.kept.fail()
	}
	close(r.changed)
	r.changed = make(chan struct{})
}

// connect keeps the disk connected. wg counts it.
func (r *Remote) connect(l *link) {
	defer r.wg.Done()
	for {
		select {
		case <-r.ctx.Done():
			return
		case asked := <-r.inherit:
			if next := r.asTarget(asked); next != nil {
				l = next
			}
			continue
		case <-l.ended:
		}
		if r.Once {
			r.set(nil, fmt.Errorf("%w: %w", disk.ErrFailed, r.explain(l.cause)))
			return
		}
		r.set(nil, nil)
		r.noteWhy(l.cause)
		began := time.Now()
		pause, level := r.logBreak(l, began)
		next, err := r.redial(pause)
		if err != nil {
			switch {
			case errors.Is(err, errSuperseded) && r.kept.empty():
				r.log.Info("the disk belongs to another client now", zap.Error(err))
			case r.ctx.Err() == nil:
				r.log.Error("the disk has failed", zap.Error(err))
			}
			r.set(nil, err)
			return
		}
		r.log.Log(level, "the disk's server is connected again", zap.String("server", r.Address),
			zap.String("export", r.Export), zap.Duration("after", time.Since(began)))
		r.set(next, nil)
		l = next
	}
}

// logBreak logs that a connection is lost, and returns how long to wait before the next one: not at
// all, unless connections break at once again and again, for example because of a request that is
// repeated on each. The log mentions that once a minute. level is for the line about the next
// connection.
func (r *Remote) logBreak(l *link, now time.Time) (pause time.Duration, level zapcore.Level) {
	fields := []zap.Field{zap.String("server", r.Address), zap.String("export", r.Export),
		zap.Error(l.cause)}
	level = zap.InfoLevel
	say := true
	if now.Sub(l.since) < time.Second && r.breaks.Failed("", now) {
		var suppressed int64
		suppressed, say = r.told.Admit(l.cause.Error(), now)
		pause, _ = r.breaks.Delay("", now)
		fields, level = append(fields, serving.Unsaid(suppressed)...), zap.DebugLevel
	}
	if say {
		r.log.Warn("the connection to the disk's server is lost: connecting again", fields...)
	}
	return pause, level
}

// redial returns a new connection on which the guest finds all acknowledged changes. It waits
// before it begins. An error is for good.
func (r *Remote) redial(wait time.Duration) (*link, error) {
	select {
	case <-r.ctx.Done():
		return nil, r.ctx.Err()
	case <-time.After(wait):
	}
	told := ""
	for pause := firstRedial; ; pause = min(2*pause, lastRedial) {
		l, err := r.redialOnce(r.ctx)
		if err == nil || errors.Is(err, disk.ErrFailed) {
			return l, err
		}
		r.noteWhy(err)
		if text := err.Error(); text != told && r.ctx.Err() == nil {
			told = text
			r.log.Warn("the disk's server cannot be used: trying again", zap.Error(r.explain(err)))
		}
		select {
		case <-r.ctx.Done():
			return nil, r.ctx.Err()
		case <-time.After(pause):
		}
	}
}

// redialOnce makes one attempt at a new connection. An error that is disk.ErrFailed is for good.
func (r *Remote) redialOnce(ctx context.Context) (*link, error) {
	l, err := r.dial(ctx)
	switch {
	case errors.Is(err, errSuperseded):
		return nil, r.broken(err)
	case err != nil:
		return nil, err
	}
	if former := r.now(); former != nil { // when it has ended, kept has all that it acknowledged
		former.fail(serving.ErrTakenOver)
		r.lost(former)
	}
	if err := r.sameDisk(&l.greeting); err != nil {
		_ = l.nc.Close()
		return nil, r.broken(err)
	}
	if l.shared || !l.last {
		r.repeatFrom = r.kept.mark()
	}
	r.begin(l)
	if l.boot != r.boot {
		if err = r.replay(l); err != nil {
			l.fail(err)
			<-l.ended
			return nil, err
		}
		r.boot = l.boot
	}
	return l, nil
}

// broken is the error that says that the disk has failed, and why.
func (r *Remote) broken(err error) error {
	return fmt.Errorf("%w: %w", disk.ErrFailed, r.explain(err))
}

// sameDisk returns an error unless the export is in the state that the guest has left.
func (r *Remote) sameDisk(now *greeting) error {
	before := &r.first
	switch {
	case now.identity != before.identity || now.size < before.size:
		return errors.New("it is another disk than before")
	case now.generation != before.generation && before.generation != "":
		return errors.New("it has another content than before, such as that of a snapshot: start " +
			"the machine again")
	case now.boot == r.boot || r.kept.empty():
	case now.shared || !now.last || r.kept.before(r.repeatFrom):
		return errors.New("its server was started anew, and writes that were acknowledged may be " +
			"lost: they cannot be repeated, because others have used the disk since")
	case now.readOnly():
		return errors.New("its server was started anew, and writes that were acknowledged may be " +
			"lost: they cannot be repeated, because the disk is write-protected now")
	}
	return nil
}

// replay repeats the changes that may be not durable.
func (r *Remote) replay(l *link) error {
	told := false
	for from := uint64(0); ; {
		calls, next := r.kept.calls(from, replayed)
		if len(calls) == 0 {
			return nil
		}
		if !told {
			told = true
			r.log.Info("repeating acknowledged writes that may not be durable")
		}
		for _, c := range calls { // one after the other: they may overlap
			c.replay = true
			err := l.do(r.ctx, c)
			means := r.diskError(c, err)
			switch {
			case err == nil:
			case errors.Is(err, errLinkLost), errors.Is(means, disk.ErrNotNow),
				errors.Is(means, disk.ErrNoSpace):
				return err
			default:
				return r.broken(fmt.Errorf("writes that were acknowledged cannot be repeated: %w",
					err))
			}
		}
		from = next
	}
}

// acknowledged keeps a change that the server may lose.
func (r *Remote) acknowledged(c *call) {
	if c.logged && !c.replay {
		r.kept.add(c)
	}
}

// current returns the connection. It waits for one until ctx ends, and then returns disk.ErrNotNow.
func (r *Remote) current(ctx context.Context) (*link, error) {
	for {
		r.mu.Lock()
		l, changed, failed := r.link, r.changed, r.failed
		r.mu.Unlock()
		switch {
		case failed != nil:
			return nil, failed
		case ctx.Err() != nil:
			return nil, disk.ErrNotNow
		case l != nil:
			return l, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// call makes a request. When the connection breaks, call repeats the request on the next one.
func (r *Remote) call(ctx context.Context, c *call) error {
	for {
		l, err := r.current(ctx)
		if err != nil {
			return err
		}
		err = l.do(ctx, c)
		if !errors.Is(err, errLinkLost) {
			return r.diskError(c, err)
		}
		r.lost(l)
	}
}

// lost notes that a connection must not be used any more.
func (r *Remote) lost(l *link) {
	<-l.ended
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.link == l {
		r.link = nil
	}
}

// diskError turns an error of the protocol into one of a disk. No other function knows the meaning
// of the server's errors. disk.ErrNotNow says that the error will pass.
func (r *Remote) diskError(c *call, err error) error {
	if err == nil {
		return nil
	}
	var reply *replyError
	switch {
	case errors.Is(err, errAbandoned):
		return disk.ErrNotNow
	case !errors.As(err, &reply):
		return err
	}
	switch reply.code {
	case ePerm, eNoMem, eShutdown:
		// Another client owns the disk, or has reserved it, and may give it up; the server may have
		// memory later, or be back. If the disk is write-protected, this connection ends, and the
		// next handshake says so.
		r.noteWhy(err)
		return fmt.Errorf("%w: %w", disk.ErrNotNow, r.explain(err))
	}
	if c.command == cmdFlush && reply.code != eNoSpace { // it is unknown what was lost
		return r.broken(err)
	}
	switch reply.code {
	case eNoSpace:
		return fmt.Errorf("%w: %w", disk.ErrNoSpace, r.explain(err))
	case eIO:
		op := "write"
		if c.command == cmdRead || c.command == cmdBlockStatus {
			op = "read"
		}
		return &disk.MediumError{Op: op, Off: int64(c.off), Length: int64(c.length),
			Err: r.explain(err)}
	}
	return r.explain(err)
}

// change makes a request that changes the disk.
func (r *Remote) change(ctx context.Context, command uint16, off, length int64, data []byte) error {
	c := r.free.take(command, off, length, data)
	defer r.free.putBack(c)
	for {
		l, err := r.current(ctx)
		if err != nil {
			return err
		}
		if err = r.changeBy(ctx, l, c); !errors.Is(err, errLinkLost) {
			return err
		}
		r.lost(l)
	}
}

// changeBy makes the request on one connection. A change that cannot be repeated is durable before
// it is acknowledged: one that is too large to be kept, and one of a disk that others write. If the
// changes before a large one were repeated, they would undo it, so they become durable, too.
func (r *Remote) changeBy(ctx context.Context, l *link, c *call) error {
	c.flags, c.logged = 0, false
	switch {
	case l.readOnly():
		return disk.ErrReadOnly
	case l.shared:
		c.flags = cmdFlagFUA
		return r.diskError(c, l.do(ctx, c))
	case len(c.data) > r.kept.largest():
		if err := l.do(ctx, c); err != nil {
			return r.diskError(c, err)
		}
		return r.flushOn(ctx, l)
	}
	switch err := r.kept.reserve(ctx, len(c.data)); {
	case errors.Is(err, disk.ErrFailed):
		_, err = r.current(ctx) // its error says why the disk has failed
		return err
	case err != nil:
		return disk.ErrNotNow
	}
	c.logged = true
	err := l.do(ctx, c)
	if err != nil {
		r.kept.giveBack(len(c.data))
	}
	return r.diskError(c, err)
}
