package targettest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"kubevirt.io/disk/target/internal/pdu"
)

// Offsets of the numbers that every PDU of a target carries.
const (
	offStatSN   = 24
	offExpCmdSN = 28
	offMaxCmdSN = 32
)

// track takes over the numbers of a PDU and checks that they continue the earlier ones (RFC 7143
// 4.2.2 and 11.4.9).
func (c *Conn) track(h *pdu.Header) error {
	op := h.Opcode()
	if op&0x20 == 0 {
		return fmt.Errorf("opcode %v is an initiator's", op)
	}
	stat, exp, limit := binary.BigEndian.Uint32(h[offStatSN:]),
		binary.BigEndian.Uint32(h[offExpCmdSN:]), binary.BigEndian.Uint32(h[offMaxCmdSN:])
	advances := true
	switch op {
	case pdu.OpDataIn:
		advances = h[1]&1 != 0
	case pdu.OpR2T:
		advances = false
	case pdu.OpNOPIn:
		advances = h.TaskTag() != pdu.ReservedTag
	}
	if !c.numbers {
		c.ExpStatSN, c.ExpCmdSN, c.MaxCmdSN, c.numbers = stat, exp, limit, true
	}
	if stat != c.ExpStatSN && (advances || op != pdu.OpDataIn) {
		return fmt.Errorf("%v: StatSN is %d, want %d", op, stat, c.ExpStatSN)
	}
	if advances {
		c.ExpStatSN++
	}
	if pdu.SNLess(limit, exp-1) {
		return fmt.Errorf("%v: MaxCmdSN %d is less than ExpCmdSN %d minus 1", op, limit, exp)
	}
	if pdu.SNLess(exp, c.ExpCmdSN) || pdu.SNLess(limit, c.MaxCmdSN) {
		return fmt.Errorf("%v: the command window goes back from %d-%d to %d-%d", op, c.ExpCmdSN,
			c.MaxCmdSN, exp, limit)
	}
	c.ExpCmdSN, c.MaxCmdSN = exp, limit
	return nil
}

// decoder is a pointer to a PDU type.
type decoder[T any] interface {
	*T
	Decode(*pdu.Header) error
}

// RejectError is a Reject that came instead of the expected PDU.
type RejectError struct {
	Reason pdu.RejectReason
	Header pdu.Header // of the rejected PDU
}

func (e *RejectError) Error() string {
	return fmt.Sprintf("the target rejected a %v: %v", e.Header.Opcode(), e.Reason)
}

// UnexpectedError is a PDU that came instead of the expected one.
type UnexpectedError struct {
	Want string
	PDU  *PDU
}

func (e *UnexpectedError) Error() string {
	return fmt.Sprintf("got a %v, want %s", e.PDU.Header.Opcode(), e.Want)
}

// As decodes a received PDU as type T.
func As[T any, P decoder[T]](p *PDU) (T, error) {
	var v T
	err := P(&v).Decode(&p.Header)
	if err == nil {
		return v, nil
	}
	if p.Header.Opcode() == pdu.OpReject {
		if r, rerr := asReject(p); rerr == nil {
			return v, r
		}
	}
	if fe, ok := errors.AsType[*pdu.FieldError](err); ok && fe.Field == "opcode" {
		err = &UnexpectedError{Want: fe.Opcode.String(), PDU: p}
	}
	return v, err
}

func asReject(p *PDU) (*RejectError, error) {
	var r pdu.Reject
	if err := r.Decode(&p.Header); err != nil {
		return nil, err
	}
	return &RejectError{Reason: r.Reason, Header: pdu.Header(p.Data[:pdu.HeaderLen])}, nil
}

// Expect receives a PDU of one type and returns it with its data. A Reject instead is a
// *RejectError, any other PDU an *UnexpectedError.
func Expect[T any, P decoder[T]](c *Conn) (T, []byte, error) {
	p, err := c.Receive()
	if err != nil {
		var none T
		return none, nil, err
	}
	v, err := As[T, P](p)
	return v, p.Data, err
}

// ExpectClosed waits until the target closes the connection. Another PDU is an error.
func (c *Conn) ExpectClosed() error {
	p, err := c.Receive()
	switch {
	case errors.Is(err, ErrClosed):
		return nil
	case err != nil:
		return fmt.Errorf("want a closed connection: %w", err)
	}
	return &UnexpectedError{Want: "a closed connection", PDU: p}
}

// ExpectClosedAfter is like ExpectClosed, but returns the PDUs that come first.
func (c *Conn) ExpectClosedAfter() ([]*PDU, error) {
	var list []*PDU
	for {
		p, err := c.Receive()
		switch {
		case errors.Is(err, ErrClosed):
			return list, nil
		case err != nil:
			return list, fmt.Errorf("want a closed connection: %w", err)
		}
		list = append(list, p)
	}
}

// ExpectNothing checks that no PDU comes within a time. A PDU may still come later, so a test
// should rather wait for the answer to a later ping (see Session.ExpectOnlyPing).
func (c *Conn) ExpectNothing(within time.Duration) error {
	p, err := c.receive(within)
	switch {
	case IsTimeout(err):
		return nil
	case err != nil:
		return fmt.Errorf("want silence: %w", err)
	}
	return &UnexpectedError{Want: "silence", PDU: p}
}
