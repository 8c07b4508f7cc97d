package pdu

// LogoutReason says what a logout ends (RFC 7143 11.14.1).
type LogoutReason uint8

// The logout reasons.
const (
	LogoutCloseSession     LogoutReason = 0
	LogoutCloseConnection  LogoutReason = 1
	LogoutRemoveConnection LogoutReason = 2
)

// LogoutResult is the outcome of a logout (RFC 7143 11.15.1).
type LogoutResult uint8

// The logout results.
const (
	LogoutSuccess              LogoutResult = 0
	LogoutCIDNotFound          LogoutResult = 1
	LogoutRecoveryNotSupported LogoutResult = 2
)

// LogoutRequest ends a session or a connection (RFC 7143 11.14).
type LogoutRequest struct {
	Immediate        bool
	Reason           LogoutReason
	TaskTag          uint32
	CID              uint16
	CmdSN, ExpStatSN uint32
}

// Decode reads a header.
func (p *LogoutRequest) Decode(h *Header) error {
	if err := h.expectBare(OpLogoutRequest); err != nil {
		return err
	}
	*p = LogoutRequest{Immediate: h.Immediate(), Reason: LogoutReason(h[1] & 0x7f),
		TaskTag: h.u32(16), CID: h.u16(20), CmdSN: h.u32(24), ExpStatSN: h.u32(28)}
	return h.expectTaskTag(OpLogoutRequest)
}

// Encode writes a header.
func (p *LogoutRequest) Encode(h *Header) {
	h.start(OpLogoutRequest, p.Immediate, 0)
	h[1] = bitFinal | byte(p.Reason)&0x7f
	h.put32(16, p.TaskTag)
	h.put16(20, p.CID)
	h.put32(24, p.CmdSN)
	h.put32(28, p.ExpStatSN)
}

// LogoutResponse answers a LogoutRequest (RFC 7143 11.15).
type LogoutResponse struct {
	Response                   LogoutResult
	TaskTag                    uint32
	StatSN, ExpCmdSN, MaxCmdSN uint32
	Time2Wait, Time2Retain     uint16 // seconds
}

// Decode reads a header.
func (p *LogoutResponse) Decode(h *Header) error {
	if err := h.expectBare(OpLogoutResponse); err != nil {
		return err
	}
	*p = LogoutResponse{Response: LogoutResult(h[2]), TaskTag: h.u32(16), StatSN: h.u32(24),
		ExpCmdSN: h.u32(28), MaxCmdSN: h.u32(32), Time2Wait: h.u16(40), Time2Retain: h.u16(42)}
	return nil
}

// Encode writes a header.
func (p *LogoutResponse) Encode(h *Header) {
	h.start(OpLogoutResponse, false, 0)
	h[1], h[2] = bitFinal, byte(p.Response)
	h.put32(16, p.TaskTag)
	h.put32(24, p.StatSN)
	h.put32(28, p.ExpCmdSN)
	h.put32(32, p.MaxCmdSN)
	h.put16(40, p.Time2Wait)
	h.put16(42, p.Time2Retain)
}
