package pdu

// AsyncEvent is what an asynchronous message reports (RFC 7143 11.9.1).
type AsyncEvent uint8

// The asynchronous events.
const (
	AsyncSCSI          AsyncEvent = 0
	AsyncLogoutRequest AsyncEvent = 1
)

// AsyncMessage reports an event to the initiator (RFC 7143 11.9).
type AsyncMessage struct {
	LUN                                uint64
	StatSN, ExpCmdSN, MaxCmdSN         uint32
	Event                              AsyncEvent
	VendorCode                         uint8
	Parameter1, Parameter2, Parameter3 uint16
	DataLen                            int // bytes
}

// Decode reads a header.
func (p *AsyncMessage) Decode(h *Header) error {
	if err := h.expectFinal(OpAsyncMessage); err != nil {
		return err
	}
	*p = AsyncMessage{LUN: h.u64(8), StatSN: h.u32(24), ExpCmdSN: h.u32(28), MaxCmdSN: h.u32(32),
		Event: AsyncEvent(h[36]), VendorCode: h[37], Parameter1: h.u16(38), Parameter2: h.u16(40),
		Parameter3: h.u16(42), DataLen: h.DataLen()}
	return nil
}

// Encode writes a header.
func (p *AsyncMessage) Encode(h *Header) {
	h.start(OpAsyncMessage, false, p.DataLen)
	h[1] = bitFinal
	h.put64(8, p.LUN)
	h.put32(16, ReservedTag)
	h.put32(24, p.StatSN)
	h.put32(28, p.ExpCmdSN)
	h.put32(32, p.MaxCmdSN)
	h[36], h[37] = byte(p.Event), p.VendorCode
	h.put16(38, p.Parameter1)
	h.put16(40, p.Parameter2)
	h.put16(42, p.Parameter3)
}
