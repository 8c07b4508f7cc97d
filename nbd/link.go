package nbd

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"sync"
	"time"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/socket"
)

const (
	// linkBuffer is the size of the receive buffer, in bytes.
	linkBuffer = 64 << 10
	// fillTime is how long an abandoned read waits for the rest of its data. Then the connection is
	// ended.
	fillTime = time.Second
)

var (
	// errLinkLost ends calls whose connection has broken. They may or may not have been executed.
	errLinkLost = errors.New("the connection to the server is lost")
	// errAbandoned ends a read that was abandoned.
	errAbandoned = errors.New("the request was abandoned")
)

// replyError is a server's error for a request.
type replyError struct {
	code uint32
	text string
}

func (e *replyError) Error() string {
	if e.text != "" {
		return fmt.Sprintf("the server answers: %s (error %d)", e.text, e.code)
	}
	return fmt.Sprintf("the server answers with error %d", e.code)
}

// call is one request of a client.
type call struct {
	request
	data      []byte     // the data of a write, or the buffer of a read
	done      chan error // receives the result
	forwarded *forwarded // gets the result instead, unless it is nil
	head      [requestLen]byte
	// logged says that room for the change is reserved in Remote.kept; replay, that the change is
	// in kept already.
	logged, replay bool

	filled int // for a read: bytes that have come, from the beginning; only the receiver uses it
	err    *replyError
	// extents are the answer to a BLOCK_STATUS; only the receiver uses it
	extents []extent

	// filling and abandoned are guarded by link.mu.
	filling   bool // the receiver is writing to data
	abandoned bool // no caller waits for the result, and data must not be used
}

// newCall makes a request. data may be nil.
func newCall(command, flags uint16, off, length uint64, data []byte) *call {
	c := &call{done: make(chan error, 1)}
	c.set(command, flags, off, length, data)
	return c
}

func (c *call) set(command, flags uint16, off, length uint64, data []byte) {
	c.request = request{command: command, flags: flags, off: off, length: length}
	c.data, c.logged, c.replay = data, false, false
}

// freeCalls are ended calls, for reuse.
type freeCalls struct {
	mu  sync.Mutex
	all []*call // guarded by mu
}

// maxFree is the most free calls. As many requests at once need no allocation.
const maxFree = 256

func (f *freeCalls) take(command uint16, off, length int64, data []byte) *call {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.all) - 1
	if n < 0 {
		return newCall(command, 0, uint64(off), uint64(length), data)
	}
	c := f.all[n]
	f.all = f.all[:n]
	c.set(command, 0, uint64(off), uint64(length), data)
	return c
}

// putBack takes a call back, unless the receiver may still use it.
func (f *freeCalls) putBack(c *call) {
	if c.abandoned {
		return
	}
	c.data = nil
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.all) < maxFree {
		f.all = append(f.all, c)
	}
}

// link is a connection of a client after the handshake. Any number of goroutines may make calls.
// One goroutine, receive, receives the replies, and only it ends calls.
//
//	do: queue ──► a caller that finds no other sender sends all of it ──► server
//	calls ◄── receive ◄── server
type link struct {
	greeting
	nc   net.Conn
	in   *bufio.Reader
	wire socket.Wire
	// acked is called by receive when the server has acknowledged a write, before the caller knows.
	acked func(*call)
	ended chan struct{} // closed when all calls have ended, and there will be no more
	since time.Time

	out [][]byte // parts being sent; only the sending goroutine uses it
	b   [20]byte // only the receiver uses it; a field, so that a reply allocates nothing
	// unsent are clients' connections with replies to send. urgent says that there are many
	// replies. Only the receiver uses both.
	unsent []*conn
	urgent bool
	passOn func() // starts another receiver, because this one is about to wait for a client

	mu      sync.Mutex
	calls   map[uint64]*call // guarded by mu; without a reply yet
	cookie  uint64           // guarded by mu; of the last call
	queue   []*call          // guarded by mu; to be sent
	spare   []*call          // guarded by mu; a former queue, for reuse
	sending bool             // guarded by mu
	sent    sync.Cond        // sending has become false
	cause   error            // guarded by mu; why the connection has ended; nil: it has not
}

// linkMemory is for the data that links send. There is one link for each disk.
var linkMemory = memory.New(math.MaxInt64)

func newLink(n *negotiation) *link {
	l := &link{greeting: n.greeting, nc: n.nc, in: n.in, calls: make(map[uint64]*call),
		ended: make(chan struct{}), since: time.Now()}
	l.sent.L = &l.mu
	l.passOn = func() { go l.receive() }
	if t, ok := n.nc.(*tls.Conn); ok {
		w := newTLSWire(t, linkMemory)
		l.wire, l.nc = w, w
	} else {
		l.wire = &socket.Plain{Conn: n.nc}
	}
	return l
}

// do sends a request and waits for the reply. If the request changes nothing, the end of ctx ends
// the wait. Otherwise do waits for the reply or the end of the connection: the caller must know
// when the request can no longer change the disk.
func (l *link) do(ctx context.Context, c *call) error {
	if err := l.send(c); err != nil {
		return err
	}
	if c.command != cmdRead && c.command != cmdBlockStatus {
		return <-c.done
	}
	select {
	case err := <-c.done:
		return err
	case <-ctx.Done():
		return l.abandon(c)
	}
}

// send queues a call, and sends the queue unless another goroutine is doing so. After an error the
// call was not queued. Otherwise receive ends it in any case.
func (l *link) send(c *call) error {
	if err := l.post(c); err != nil {
		return err
	}
	l.flush()
	return nil
}

// post queues a call. Flush must follow.
func (l *link) post(c *call) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != nil {
		return errLinkLost
	}
	l.cookie++
	c.cookie, c.filled, c.err, c.extents = l.cookie, 0, nil, nil
	l.calls[c.cookie] = c
	l.queue = append(l.queue, c)
	return nil
}

// flush sends the queue unless another goroutine is doing so.
func (l *link) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sending {
		return
	}
	l.sending = true
	for len(l.queue) > 0 && l.cause == nil {
		batch := l.queue
		l.queue, l.spare = l.spare[:0], nil
		l.mu.Unlock()
		err := l.sendAll(batch)
		clear(batch)
		l.mu.Lock()
		l.spare = batch[:0]
		if err != nil {
			l.failLocked(err)
		}
	}
	l.sending = false
	l.sent.Broadcast()
}

func (l *link) sendAll(batch []*call) error {
	out := l.out[:0]
	for _, c := range batch {
		b := c.head[:]
		binary.BigEndian.PutUint32(b, magicRequest)
		binary.BigEndian.PutUint16(b[4:], c.flags)
		binary.BigEndian.PutUint16(b[6:], c.command)
		binary.BigEndian.PutUint64(b[8:], c.cookie)
		binary.BigEndian.PutUint64(b[16:], c.off)
		binary.BigEndian.PutUint32(b[24:], uint32(c.length))
		out = append(out, b)
		if c.command == cmdWrite {
			out = append(out, c.data)
		}
	}
	l.out = out
	err := l.wire.Writev(out)
	clear(l.out)
	return err
}

// abandon ends the wait for a read. Afterwards nobody writes to its data. It looks for a result
// before it tells the receiver to leave the data out, because a later result may have no data.
func (l *link) abandon(c *call) error {
	l.mu.Lock()
	if !c.filling {
		defer l.mu.Unlock()
		select {
		case err := <-c.done: // it had ended already
			return err
		default:
			c.abandoned = true
			return errAbandoned
		}
	}
	l.mu.Unlock()
	select {
	case err := <-c.done:
		return err
	case <-time.After(fillTime):
		l.fail(errors.New("the server has stopped in the middle of a reply"))
		return <-c.done
	}
}

// fail ends the connection. The calls end soon after.
func (l *link) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failLocked(err)
}

func (l *link) failLocked(err error) {
	if l.cause == nil {
		l.cause = err
		_ = l.nc.Close()
	}
}

// close ends the connection by NBD_CMD_DISC.
func (l *link) close() {
	l.mu.Lock()
	idle := !l.sending && l.cause == nil
	if idle {
		l.sending = true
	}
	l.mu.Unlock()
	if idle {
		c := newCall(cmdDisconnect, 0, 0, 0, nil)
		_ = l.nc.SetWriteDeadline(time.Now().Add(fillTime))
		_ = l.sendAll([]*call{c})
		l.mu.Lock()
		l.sending = false
		l.sent.Broadcast()
		l.mu.Unlock()
	}
	l.fail(errDisconnected)
	<-l.ended
}

// receive takes replies until the connection ends, or another goroutine receives.
func (l *link) receive() {
	var err error
	for err == nil {
		if l.sendUnsent() {
			return
		}
		err = l.next()
	}
	defer close(l.ended)
	l.sendAllUnsent()
	l.mu.Lock()
	l.failLocked(err)
	for l.sending { // the sending goroutine still uses the data of calls
		l.sent.Wait()
	}
	calls := l.calls
	l.calls = nil
	l.mu.Unlock()
	for _, c := range calls {
		c.end(errLinkLost)
	}
}

// end gives the result to the caller.
func (c *call) end(err error) {
	switch {
	case c.forwarded == nil:
		c.done <- err
	case !c.abandoned:
		c.forwarded.completed(err)
	}
}

// next receives one reply, or one chunk of one.
func (l *link) next() error {
	b := l.b[:]
	if _, err := io.ReadFull(l.in, b[:16]); err != nil {
		return err
	}
	cookie := binary.BigEndian.Uint64(b[8:])
	l.mu.Lock()
	c := l.calls[cookie]
	l.mu.Unlock()
	if c == nil {
		return errors.New("the server answers a request that was not made")
	}
	switch magic := binary.BigEndian.Uint32(b); {
	case magic == magicSimple && c.command != cmdRead:
		if code := binary.BigEndian.Uint32(b[4:]); code != 0 {
			c.err = &replyError{code: code}
		}
		l.finish(c)
		return nil
	case magic != magicStructured:
		return errors.New("what the server sends does not begin like a reply")
	}
	if _, err := io.ReadFull(l.in, b[16:]); err != nil {
		return err
	}
	flags, kind := binary.BigEndian.Uint16(b[4:]), binary.BigEndian.Uint16(b[6:])
	if err := l.chunk(c, kind, int(binary.BigEndian.Uint32(b[16:]))); err != nil {
		return err
	}
	if flags&replyFlagDone == 0 {
		return nil
	}
	if c.err == nil && c.command == cmdRead && c.filled != int(c.length) {
		return fmt.Errorf("the server sends %d of %d bytes", c.filled, c.length)
	}
	l.finish(c)
	return nil
}

// chunk receives the payload of a chunk, of length bytes.
func (l *link) chunk(c *call, kind uint16, length int) error {
	switch {
	case kind == chunkNone && length == 0:
		return nil
	case kind == chunkData && length > 8 && c.command == cmdRead:
		return l.fill(c, length-8, true)
	case kind == chunkHole && length == 12 && c.command == cmdRead:
		return l.fill(c, 0, false)
	case kind == chunkStatus && length >= 12 && length%8 == 4 && length <= 4+8*maxExtents &&
		c.command == cmdBlockStatus:
		return l.describe(c, length)
	case kind&(1<<15) != 0 && length >= 6 && length <= 6+maxString+8:
		p := make([]byte, length)
		if _, err := io.ReadFull(l.in, p); err != nil {
			return err
		}
		f := fields{b: p}
		e := &replyError{code: f.u32()}
		e.text = printable(f.take(uint32(f.u16())))
		if f.bad || e.code == 0 {
			return errors.New("the server sends an error that cannot be understood")
		}
		if c.err == nil {
			c.err = e
		}
		return nil
	}
	return fmt.Errorf("the server sends a chunk of type %d with %d bytes", kind, length)
}

// fill receives n bytes of a read's data, or a hole. Parts must come in order, so that none can be
// missing.
func (l *link) fill(c *call, n int, data bool) error {
	b := l.b[:8]
	if !data {
		b = l.b[:12]
	}
	if _, err := io.ReadFull(l.in, b); err != nil {
		return err
	}
	if !data {
		n = int(binary.BigEndian.Uint32(b[8:]))
	}
	off := binary.BigEndian.Uint64(b)
	if off != c.off+uint64(c.filled) || n > int(c.length)-c.filled {
		return errors.New("the server sends data out of order, or that was not asked for")
	}
	l.mu.Lock()
	wanted := !c.abandoned
	c.filling = wanted
	l.mu.Unlock()
	to := c.data[c.filled : c.filled+n]
	c.filled += n
	var err error
	switch {
	case data && wanted:
		_, err = io.ReadFull(l.in, to)
	case data:
		_, err = l.in.Discard(n)
	case wanted:
		clear(to)
	}
	l.mu.Lock()
	c.filling = false
	l.mu.Unlock()
	return err
}

// finish ends a call with the server's result.
func (l *link) finish(c *call) {
	if c.err == nil && l.acked != nil {
		l.acked(c)
	}
	l.mu.Lock()
	delete(l.calls, c.cookie)
	l.mu.Unlock()
	if c.err != nil {
		c.end(c.err)
		return
	}
	c.end(nil)
}
