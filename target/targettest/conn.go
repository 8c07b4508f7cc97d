// Package targettest is an iSCSI initiator for tests of a target. It can also misbehave.
//
// It has three layers. Each uses the one before:
//
//	Conn      one TCP connection: sends any PDU, also with wrong lengths, padding and digests
//	Login     the login phase, PDU by PDU (Conn.LoginStep) or at once; a hook may change each PDU
//	Session   full feature phase: commands with their data, task management, pings, text, logout
//
// The initiator checks every PDU that it receives against RFC 7143: digests, StatSN, the command
// window, the order and bounds of Data-In and R2T. The call that receives a violation returns an
// error, so every test checks all of that.
//
// Nothing here uses the target's own login and CHAP code: both sides are written separately, so
// that an error in one of them shows. Methods return errors; the Must functions fail a test
// instead.
package targettest

import (
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"kubevirt.io/disk/target/internal/pdu"
)

const (
	digestLen = 4

	// DefaultTimeout is how long a Conn waits for a PDU. On a busy machine or with slow storage an
	// answer may take many seconds.
	DefaultTimeout = time.Minute

	// maxReceived is the length in bytes of the longest data segment that a Conn receives.
	maxReceived = 1 << 24
)

// ErrClosed says that the target has closed the connection.
var ErrClosed = errors.New("the target has closed the connection")

// PDU is one PDU, received or to be sent.
type PDU struct {
	Header pdu.Header
	AHS    []byte
	Data   []byte
}

// Message is a PDU type of package pdu.
type Message interface{ Encode(*pdu.Header) }

// Conn is one connection to a target. It belongs to one goroutine. A test may change the sequence
// numbers between calls.
type Conn struct {
	nc net.Conn

	Timeout time.Duration // for one PDU in or out

	HeaderDigest, DataDigest bool // in force in both directions

	CmdSN     uint32 // of the next command
	ExpStatSN uint32 // the next StatSN expected; acknowledges all before it
	ExpCmdSN  uint32 // from the target's last PDU
	MaxCmdSN  uint32 // from the target's last PDU

	tag     uint32 // the last initiator task tag
	numbers bool   // ExpStatSN and the window are known, and checked
}

// Dial connects to a target.
func Dial(addr net.Addr) (*Conn, error) {
	nc, err := net.DialTimeout(addr.Network(), addr.String(), DefaultTimeout)
	if err != nil {
		return nil, err
	}
	return NewConn(nc), nil
}

// NewConn makes a Conn on an open connection.
func NewConn(nc net.Conn) *Conn { return &Conn{nc: nc, Timeout: DefaultTimeout, CmdSN: 1} }

// Close closes the connection, without a logout.
func (c *Conn) Close() error { return c.nc.Close() }

// Reset closes the connection so that the peer sees a reset, as after a crash.
func (c *Conn) Reset() error {
	if t, ok := c.nc.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	return c.nc.Close()
}

// LocalAddr is the initiator's address.
func (c *Conn) LocalAddr() net.Addr { return c.nc.LocalAddr() }

// NewTag returns an initiator task tag that was not used yet.
func (c *Conn) NewTag() uint32 {
	c.tag++
	return c.tag
}

// SendRaw sends bytes as they are.
func (c *Conn) SendRaw(b []byte) error {
	_ = c.nc.SetWriteDeadline(time.Now().Add(c.Timeout))
	_, err := c.nc.Write(b)
	return closedError(err)
}

// Option changes how one PDU is sent.
type Option func(*outgoing)

type outgoing struct {
	ahs              []byte
	pad              byte
	flipHeaderDigest bool
	flipDataDigest   bool
	edit             []func(*pdu.Header)
	flipHeader       int // bit to flip after the digest is computed; -1: none
	flipData         int
	cut              int // bytes to send; -1: all
}

// WithAHS adds additional header segments, which are padded to whole words.
func WithAHS(ahs []byte) Option { return func(o *outgoing) { o.ahs = ahs } }

// WithHeader edits the header after its lengths are set and before its digest is computed.
func WithHeader(edit func(h *pdu.Header)) Option {
	return func(o *outgoing) { o.edit = append(o.edit, edit) }
}

// WithPadding uses another value than 0 for padding bytes.
func WithPadding(b byte) Option { return func(o *outgoing) { o.pad = b } }

// WrongHeaderDigest sends a header digest that does not match.
func WrongHeaderDigest() Option { return func(o *outgoing) { o.flipHeaderDigest = true } }

// WrongDataDigest sends a data digest that does not match.
func WrongDataDigest() Option { return func(o *outgoing) { o.flipDataDigest = true } }

// FlipHeaderBit flips a bit of the header after its digest is computed.
func FlipHeaderBit(bit int) Option { return func(o *outgoing) { o.flipHeader = bit } }

// FlipDataBit flips a bit of the data segment after its digest is computed.
func FlipDataBit(bit int) Option { return func(o *outgoing) { o.flipData = bit } }

// CutAfter sends only the first n bytes of the PDU.
func CutAfter(n int) Option { return func(o *outgoing) { o.cut = n } }

// Bytes returns the bytes that Send sends.
func (c *Conn) Bytes(m Message, data []byte, opts ...Option) []byte {
	o := outgoing{flipHeader: -1, flipData: -1, cut: -1}
	for _, opt := range opts {
		opt(&o)
	}
	var h pdu.Header
	m.Encode(&h)
	h.SetDataLen(len(data))
	ahs := append([]byte(nil), o.ahs...)
	for len(ahs)%4 != 0 {
		ahs = append(ahs, 0)
	}
	h.SetAHSLen(len(ahs))
	for _, edit := range o.edit {
		edit(&h)
	}
	b := append(append([]byte(nil), h[:]...), ahs...)
	digest := func(part []byte, flip bool) {
		d := pdu.Digest(part)
		if flip {
			d ^= 1 << 9
		}
		b = pdu.AppendDigest(b, d)
	}
	if c.HeaderDigest {
		digest(b, o.flipHeaderDigest)
	}
	start := len(b)
	b = append(b, data...)
	for (len(b)-start)%4 != 0 {
		b = append(b, o.pad)
	}
	if c.DataDigest && len(data) > 0 {
		digest(b[start:], o.flipDataDigest)
	}
	if o.flipHeader >= 0 {
		b[o.flipHeader/8] ^= 0x80 >> (o.flipHeader % 8)
	}
	if o.flipData >= 0 {
		b[start+o.flipData/8] ^= 0x80 >> (o.flipData % 8)
	}
	if o.cut >= 0 {
		b = b[:min(o.cut, len(b))]
	}
	return b
}

// Send sends a PDU. Its data length is that of data, unless an option changes it.
func (c *Conn) Send(m Message, data []byte, opts ...Option) error {
	return c.SendRaw(c.Bytes(m, data, opts...))
}

// Receive waits for the next PDU and checks its digests and numbers.
func (c *Conn) Receive() (*PDU, error) { return c.receive(c.Timeout) }

func (c *Conn) receive(timeout time.Duration) (*PDU, error) {
	_ = c.nc.SetReadDeadline(time.Now().Add(timeout))
	p := new(PDU)
	if _, err := io.ReadFull(c.nc, p.Header[:]); err != nil {
		return nil, closedError(err)
	}
	if n := p.Header.AHSLen(); n > 0 {
		return nil, fmt.Errorf("%v: %d bytes of additional header, but a target sends none (RFC "+
			"7143 11.2)", p.Header.Opcode(), n)
	}
	if c.HeaderDigest {
		if err := c.checkDigest("header", p.Header[:]); err != nil {
			return nil, fmt.Errorf("%v: %w", p.Header.Opcode(), err)
		}
	}
	if n := p.Header.PaddedDataLen(); n > 0 {
		padded := make([]byte, min(n, maxReceived))
		if _, err := io.ReadFull(c.nc, padded); err != nil {
			return nil, closedError(err)
		}
		if c.DataDigest {
			if err := c.checkDigest("data", padded); err != nil {
				return nil, fmt.Errorf("%v: %w", p.Header.Opcode(), err)
			}
		}
		p.Data = padded[:p.Header.DataLen()]
		for _, b := range padded[len(p.Data):] {
			if b != 0 {
				return nil, fmt.Errorf("%v: padding is not zero (RFC 7143 11.1)", p.Header.Opcode())
			}
		}
	}
	if err := c.track(&p.Header); err != nil {
		return p, err
	}
	return p, nil
}

func (c *Conn) checkDigest(what string, covered []byte) error {
	var got, want [digestLen]byte
	if _, err := io.ReadFull(c.nc, got[:]); err != nil {
		return closedError(err)
	}
	pdu.PutDigest(want[:], pdu.Digest(covered))
	if got != want {
		return fmt.Errorf("%s digest is %x, want %x", what, got, want)
	}
	return nil
}

// closedError returns ErrClosed for all errors that mean a closed connection.
func closedError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) ||
		errors.Is(err, io.ErrClosedPipe) {
		return fmt.Errorf("%w (%v)", ErrClosed, err)
	}
	return err
}

// IsTimeout reports whether an error says that nothing came in time.
func IsTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}
