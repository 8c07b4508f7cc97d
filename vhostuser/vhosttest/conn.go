package vhosttest

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

var (
	// ErrClosed says that the back end has closed the connection.
	ErrClosed = errors.New("the back end has closed the connection")
	// ErrTimeout says that the back end did not answer a message or end a request in time.
	ErrTimeout = errors.New("the back end does not answer")
	// ErrViolation says that the back end broke the protocol.
	ErrViolation = errors.New("the back end breaks the protocol")
	// ErrUnsupported says that what a call needs was not negotiated.
	ErrUnsupported = errors.New("not negotiated")
)

// RefusedError says that the back end answered a message with a number other than zero (REPLY_ACK).
type RefusedError struct {
	Request Request
	Answer  uint64
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("the back end refuses %v with %d", e.Request, int64(e.Answer))
}

const (
	// DefaultTimeout is how long a Driver waits for an answer.
	DefaultTimeout = time.Minute

	maxPayload = 4096 // of a reply, bytes
	maxFDs     = 16   // in one message
)

// Conn is the connection to a back end: messages there and back. It may be used by several
// goroutines, one exchange at a time.
type Conn struct {
	nc      *net.UnixConn
	timeout time.Duration
	mu      sync.Mutex // one exchange
	ack     bool       // REPLY_ACK is negotiated
}

// DialConn connects and sends nothing. The timeout is that of each message; 0: DefaultTimeout.
func DialConn(path string, timeout time.Duration) (*Conn, error) {
	timeout = cmp.Or(timeout, DefaultTimeout)
	nc, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	return &Conn{nc: nc, timeout: timeout}, nil
}

// Close closes the connection, as a QEMU that ends does.
func (c *Conn) Close() error { return c.nc.Close() }

// Send sends a message, however wrong.
func (c *Conn) Send(m Message) error {
	return c.SendBytes(append(Header(m.Request, m.Flags, uint32(len(m.Payload))), m.Payload...),
		m.FDs...)
}

// SendBytes sends bytes, and files with the first of them.
func (c *Conn) SendBytes(b []byte, fds ...int) error {
	if err := c.nc.SetWriteDeadline(time.Now().Add(c.timeout)); err != nil {
		return err
	}
	var control []byte
	if len(fds) > 0 {
		control = unix.UnixRights(fds...)
	}
	n, _, err := c.nc.WriteMsgUnix(b, control, nil)
	if err == nil && n < len(b) {
		_, err = c.nc.Write(b[n:])
	}
	return connError(err)
}

// connError tells how a connection has ended.
func connError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%w: %w", ErrTimeout, err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, unix.EPIPE),
		errors.Is(err, unix.ECONNRESET):
		return fmt.Errorf("%w: %w", ErrClosed, err)
	}
	return err
}

// Receive waits for the next message of the back end. The caller closes its files.
func (c *Conn) Receive() (Message, error) { return c.receive(time.Now().Add(c.timeout)) }

// receive is Receive until a time; zero: without an end.
func (c *Conn) receive(deadline time.Time) (m Message, err error) {
	if err := c.nc.SetReadDeadline(deadline); err != nil {
		return m, err
	}
	defer func() {
		if err != nil {
			closeAll(m.FDs)
			m, err = Message{}, connError(err)
		}
	}()
	header, control := make([]byte, headerLen), make([]byte, unix.CmsgSpace(4*maxFDs))
	n, nControl, flags, _, err := c.nc.ReadMsgUnix(header, control)
	if err != nil {
		return m, err
	}
	if n == 0 {
		return m, io.EOF
	}
	if m.FDs, err = files(control[:nControl]); err != nil {
		return m, err
	}
	if flags&unix.MSG_CTRUNC != 0 {
		return m, fmt.Errorf("%w: more than %d files in a message", ErrViolation, maxFDs)
	}
	if _, err := io.ReadFull(c.nc, header[n:]); err != nil {
		return m, err
	}
	m.Request = Request(binary.NativeEndian.Uint32(header))
	m.Flags = binary.NativeEndian.Uint32(header[4:])
	size := binary.NativeEndian.Uint32(header[8:])
	if size > maxPayload {
		return m, fmt.Errorf("%w: a message %v of %d bytes", ErrViolation, m.Request, size)
	}
	m.Payload = make([]byte, size)
	_, err = io.ReadFull(c.nc, m.Payload)
	return m, err
}

// files returns the files of a control message.
func files(control []byte) (fds []int, err error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, err
	}
	for _, m := range messages {
		some, err := unix.ParseUnixRights(&m)
		if err != nil {
			return fds, err
		}
		fds = append(fds, some...)
	}
	for _, fd := range fds {
		unix.CloseOnExec(fd)
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// WaitClosed waits until the back end closes the connection. Messages before that are thrown away.
func (c *Conn) WaitClosed() error {
	for {
		m, err := c.Receive()
		closeAll(m.FDs)
		switch {
		case errors.Is(err, ErrClosed):
			return nil
		case err != nil:
			return err
		}
	}
}

// Ask sends a message that has a reply, and returns that. The caller closes its files.
func (c *Conn) Ask(r Request, payload []byte, fds ...int) (Message, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.exchange(r, FlagVersion, payload, fds)
}

// Tell sends a message that has no reply of its own. If REPLY_ACK is negotiated, it asks for an
// acknowledgement, and a refusal is a *RefusedError. Otherwise nobody knows whether the back end
// did it.
func (c *Conn) Tell(r Request, payload []byte, fds ...int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ack {
		err := c.Send(Message{Request: r, Flags: FlagVersion, Payload: payload, FDs: fds})
		if err != nil {
			return fmt.Errorf("%v: %w", r, err)
		}
		return nil
	}
	reply, err := c.exchange(r, FlagVersion|FlagNeedReply, payload, fds)
	if err != nil {
		return err
	}
	defer closeAll(reply.FDs)
	answer, err := reply.u64()
	if err == nil && answer != 0 {
		err = &RefusedError{r, answer}
	}
	return err
}

func (c *Conn) exchange(r Request, flags uint32, payload []byte, fds []int) (Message, error) {
	err := c.Send(Message{Request: r, Flags: flags, Payload: payload, FDs: fds})
	if err != nil {
		return Message{}, fmt.Errorf("%v: %w", r, err)
	}
	reply, err := c.Receive()
	switch {
	case err != nil:
		return Message{}, fmt.Errorf("the reply to %v: %w", r, err)
	case reply.Request != r, reply.Flags&(3|FlagReply) != FlagVersion|FlagReply:
		closeAll(reply.FDs)
		return Message{}, fmt.Errorf("%w: %v was answered with %v, flags %#x", ErrViolation, r,
			reply.Request, reply.Flags)
	}
	return reply, nil
}

// number asks for a 64-bit number.
func (c *Conn) number(r Request) (uint64, error) {
	reply, err := c.Ask(r, nil)
	if err != nil {
		return 0, err
	}
	closeAll(reply.FDs)
	return reply.u64()
}
