package pdu

// RejectReason says why a PDU was not accepted (RFC 7143 11.17.1).
type RejectReason uint8

// The reject reasons.
const (
	RejectDataDigest      RejectReason = 0x02
	RejectSNACK           RejectReason = 0x03
	RejectProtocolError   RejectReason = 0x04
	RejectNotSupported    RejectReason = 0x05
	RejectImmediate       RejectReason = 0x06
	RejectTaskInProgress  RejectReason = 0x07
	RejectInvalidPDUField RejectReason = 0x09
	RejectLongOperation   RejectReason = 0x0a
)

var rejectReasonNames = map[RejectReason]string{RejectDataDigest: "data digest error",
	RejectSNACK:         "SNACK reject",
	RejectProtocolError: "protocol error", RejectNotSupported: "command not supported",
	RejectImmediate: "immediate command reject", RejectTaskInProgress: "task in progress",
	RejectInvalidPDUField: "invalid PDU field", RejectLongOperation: "out of resources"}

func (r RejectReason) String() string { return enumName(rejectReasonNames, r) }

// Reject answers a PDU that was not accepted. Its data segment is the header of that PDU (RFC 7143
// 11.17).
type Reject struct {
	Reason                     RejectReason
	StatSN, ExpCmdSN, MaxCmdSN uint32
	DataSN                     uint32
	DataLen                    int // bytes
}

// Decode reads a header.
func (p *Reject) Decode(h *Header) error {
	if err := h.expectFinal(OpReject); err != nil {
		return err
	}
	*p = Reject{Reason: RejectReason(h[2]), StatSN: h.u32(24), ExpCmdSN: h.u32(28),
		MaxCmdSN: h.u32(32), DataSN: h.u32(36), DataLen: h.DataLen()}
	if p.DataLen < HeaderLen {
		return &FieldError{OpReject, "DataSegmentLength", "has no room for the rejected header"}
	}
	return nil
}

// Encode writes a header.
func (p *Reject) Encode(h *Header) {
	h.start(OpReject, false, p.DataLen)
	h[1], h[2] = bitFinal, byte(p.Reason)
	h.put32(16, ReservedTag)
	h.put32(24, p.StatSN)
	h.put32(28, p.ExpCmdSN)
	h.put32(32, p.MaxCmdSN)
	h.put32(36, p.DataSN)
}

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
