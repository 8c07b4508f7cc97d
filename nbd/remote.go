package nbd

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
)

// RemoteOptions say where a disk of another server is.
type RemoteOptions struct {
	Address string // HOST:PORT, or serving.SocketPrefix and the path of a socket
	Export  string // "": the server's only disk
	// TLS returns what to connect with; nil: no TLS. It is asked for each connection, because the
	// certificates may have changed.
	TLS func() (*tls.Config, error)
	Log *zap.Logger // nil: no log
	// Once says that the disk fails when its connection breaks: another client may own the disk,
	// and change it, before there is a new one.
	Once bool
}

// Remote is a disk that another server of ours has, as a disk of this process. While the server
// cannot be reached, calls wait: it is a disk.Distant. After a broken connection it connects again
// and repeats what was not answered, and what was answered and is not durable yet.
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
	flushing atomic.Bool    // a flush in the background is under way
	wg       sync.WaitGroup // of the goroutines in the background

	mu      sync.Mutex
	link    *link         // guarded by mu; nil: there is no connection now
	changed chan struct{} // guarded by mu; closed when link or failed changes
	failed  error         // guarded by mu; for good
}

var (
	_ disk.Disk      = (*Remote)(nil)
	_ disk.Discarder = (*Remote)(nil)
	_ disk.Zeroer    = (*Remote)(nil)
	_ disk.Distant   = (*Remote)(nil)
)

const (
	firstRedial = 100 * time.Millisecond
	lastRedial  = 5 * time.Second
	// replayed is how many changes are made again at once.
	replayed = 64
	// longest is the longest discard or zeroing, in bytes.
	longest = 1 << 30
)

// OpenRemote connects to a disk of another server. It is an error if that is not possible now. The
// log says later when the connection is lost, and when it is back.
func OpenRemote(ctx context.Context, opt RemoteOptions) (*Remote, error) {
	r := &Remote{dialer: dialer{RemoteOptions: opt, session: rand.Text()}, log: opt.Log,
		changed: make(chan struct{}), inherit: make(chan inheritance)}
	r.kept = newUnflushed(r.flushSoon)
	if r.log == nil {
		r.log = zap.NewNop()
	}
	l, err := r.dial(ctx)
	if err != nil {
		return nil, r.explain(err)
	}
	r.ctx, r.stop = context.WithCancel(context.Background())
	r.first = l.greeting
	r.use(l)
	r.wg.Add(1)
	go r.connect(l)
	return r, nil
}

// Unreachable reports whether an error of OpenRemote says that no server has answered, so that one
// may do so later.
func Unreachable(err error) bool {
	var network *net.OpError
	return errors.As(err, &network) && network.Op == "dial"
}

func (r *Remote) explain(err error) error {
	return fmt.Errorf("export %q of the NBD server %s: %w", r.Export, r.Address, err)
}

// use makes a connection that of the disk.
func (r *Remote) use(l *link) {
	r.begin(l)
	r.set(l, nil)
}

// begin lets a connection take replies.
func (r *Remote) begin(l *link) {
	l.acked = r.acknowledged
	go l.receive()
}

func (r *Remote) set(l *link, failed error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.link = l
	if r.failed == nil {
		r.failed = failed
	}
	if r.failed != nil {
		r.kept.fail()
	}
	close(r.changed)
	r.changed = make(chan struct{})
}

// connect keeps the disk connected, and counts in wg.
func (r *Remote) connect(l *link) {
	defer r.wg.Done()
	for {
		select {
		case <-r.ctx.Done():
			return
		case asked := <-r.inherit:
			if next := r.asHeir(asked); next != nil {
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
		began := time.Now()
		r.log.Warn("the connection to the disk's server is lost: connecting again",
			zap.String("server", r.Address), zap.String("export", r.Export), zap.Error(l.cause))
		next, err := r.redial()
		if err != nil {
			switch {
			case errors.Is(err, errOver) && r.kept.empty():
				r.log.Info("the disk belongs to another client now", zap.Error(err))
			case r.ctx.Err() == nil:
				r.log.Error("the disk has failed", zap.Error(err))
			}
			r.set(nil, err)
			return
		}
		r.log.Info("the disk's server is connected again", zap.String("server", r.Address),
			zap.String("export", r.Export), zap.Duration("after", time.Since(began)))
		r.set(next, nil)
		l = next
	}
}

// redial returns a new connection, on which everything is as the guest has to see it. An error is
// for good.
func (r *Remote) redial() (*link, error) {
	told := ""
	for pause := firstRedial; ; pause = min(2*pause, lastRedial) {
		l, err := r.again(r.ctx)
		if err == nil || errors.Is(err, disk.ErrFailed) {
			return l, err
		}
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

// again makes one try at a new connection. An error that is disk.ErrFailed is for good.
func (r *Remote) again(ctx context.Context) (*link, error) {
	l, err := r.dial(ctx)
	switch {
	case errors.Is(err, errOver):
		return nil, fmt.Errorf("%w: %w", disk.ErrFailed, r.explain(err))
	case err != nil:
		return nil, err
	case l.identity != r.first.identity || l.size < r.first.size:
		_ = l.nc.Close()
		return nil, fmt.Errorf("%w: %w", disk.ErrFailed, r.explain(errors.New(
			"it is another disk than before")))
	}
	r.begin(l)
	if err = r.replay(l); err == nil {
		return l, nil
	}
	l.fail(err)
	<-l.ended
	var refused *replyError
	if errors.As(err, &refused) {
		err = fmt.Errorf("%w: writes that were acknowledged cannot be repeated: %w",
			disk.ErrFailed, r.explain(err))
	}
	return nil, err
}

// replay makes the changes again that are not known to be durable.
func (r *Remote) replay(l *link) error {
	r.kept.mu.Lock()
	from, end := r.kept.first, r.kept.first+uint64(len(r.kept.records))
	r.kept.mu.Unlock()
	if from == end {
		return nil
	}
	r.log.Info("repeating acknowledged writes that may not be durable",
		zap.Uint64("requests", end-from))
	for from < end {
		// One after the other: they may overlap.
		for _, c := range r.kept.calls(from, replayed) {
			c.replay = true
			if err := l.do(r.ctx, c); err != nil {
				return err
			}
			from++
		}
	}
	return nil
}

// acknowledged keeps what the server may lose.
func (r *Remote) acknowledged(c *call) {
	if c.logged && !c.replay {
		r.kept.add(c)
	}
}

// current returns the connection. It waits for one until ctx ends, and then returns
// disk.ErrNotNow.
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

// call makes a request, on as many connections as it takes.
func (r *Remote) call(ctx context.Context, c *call) error {
	for {
		l, err := r.current(ctx)
		if err != nil {
			return err
		}
		err = l.do(ctx, c)
		if !errors.Is(err, errLinkLost) {
			return r.meaning(c, err)
		}
		r.lost(l)
	}
}

// lost notes that a connection is not to be used any more.
func (r *Remote) lost(l *link) {
	<-l.ended
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.link == l {
		r.link = nil
	}
}

// meaning makes an error of a disk from one of the protocol.
func (r *Remote) meaning(c *call, err error) error {
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
		// Another client owns the disk, and may hand it over; the server may have memory later, or
		// be back.
		return fmt.Errorf("%w: %w", disk.ErrNotNow, r.explain(err))
	case eNoSpace:
		return fmt.Errorf("%w: %w", disk.ErrNoSpace, r.explain(err))
	case eIO:
		op := "write"
		if c.command == cmdRead {
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
	defer r.free.give(c)
	if len(data) > maxLogged {
		return r.changeDurably(ctx, c)
	}
	if err := r.kept.reserve(ctx, len(data)); errors.Is(err, disk.ErrFailed) {
		_, err = r.current(ctx) // why it has failed
		return err
	} else if err != nil {
		return disk.ErrNotNow
	}
	c.logged = true
	err := r.call(ctx, c)
	if err != nil {
		r.kept.giveBack(len(data))
	}
	return err
}

// changeDurably makes a change that is too large to be kept. The changes before it would undo it
// when they are repeated, so they must be durable, too, on the same connection.
func (r *Remote) changeDurably(ctx context.Context, c *call) error {
	for {
		l, err := r.current(ctx)
		if err != nil {
			return err
		}
		if err = l.do(ctx, c); err == nil {
			err = r.flushOn(ctx, l)
		}
		if !errors.Is(err, errLinkLost) {
			return r.meaning(c, err)
		}
		r.lost(l)
	}
}

func (r *Remote) flush(ctx context.Context) error {
	if r.kept.empty() { // so a stop does not wait for a server that is away
		r.mu.Lock()
		defer r.mu.Unlock()
		if errors.Is(r.failed, errOver) { // nothing is lost
			return nil
		}
		return r.failed
	}
	for {
		l, err := r.current(ctx)
		if err != nil {
			return err
		}
		err = r.flushOn(ctx, l)
		var refused *replyError
		switch {
		case errors.Is(err, errLinkLost):
			r.lost(l)
			continue
		case errors.As(err, &refused):
			err = fmt.Errorf("%w: %w", disk.ErrFailed, r.explain(err))
			r.set(l, err)
		}
		return err
	}
}

func (r *Remote) flushOn(ctx context.Context, l *link) error {
	mark := r.kept.mark()
	c := r.free.take(cmdFlush, 0, 0, nil)
	defer r.free.give(c)
	err := l.do(ctx, c)
	if err == nil {
		r.kept.drop(mark)
	}
	return err
}
