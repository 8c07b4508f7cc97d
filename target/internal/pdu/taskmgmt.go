package pdu

// TMFunction is a task management function (RFC 7143 11.5.1, RFC 7144 6.3).
type TMFunction uint8

// The task management functions.
const (
	TMAbortTask        TMFunction = 1
	TMAbortTaskSet     TMFunction = 2
	TMClearACA         TMFunction = 3
	TMClearTaskSet     TMFunction = 4
	TMLogicalUnitReset TMFunction = 5
	TMTargetWarmReset  TMFunction = 6
	TMTargetColdReset  TMFunction = 7
	TMTaskReassign     TMFunction = 8
	TMQueryTask        TMFunction = 9
	TMQueryTaskSet     TMFunction = 10
	TMITNexusReset     TMFunction = 11
	TMQueryAsyncEvent  TMFunction = 12
)

// TMResponse is the outcome of a task management function (RFC 7143 11.6.1, RFC 7144 6.4).
type TMResponse uint8

// The task management responses.
const (
	TMComplete             TMResponse = 0
	TMTaskNotExist         TMResponse = 1
	TMLUNNotExist          TMResponse = 2
	TMReassignNotSupported TMResponse = 4
	TMNotSupported         TMResponse = 5
	TMAuthorizationFailed  TMResponse = 6
	TMSucceeded            TMResponse = 7
	TMRejected             TMResponse = 255
)

// TaskManagementRequest asks for a task management function (RFC 7143 11.5).
type TaskManagementRequest struct {
	Immediate        bool
	Function         TMFunction
	LUN              uint64
	TaskTag          uint32
	RefTaskTag       uint32
	CmdSN, ExpStatSN uint32
	RefCmdSN         uint32
	ExpDataSN        uint32
}

// Decode reads a header.
func (p *TaskManagementRequest) Decode(h *Header) error {
	if err := h.expectBare(OpTaskManagementRequest); err != nil {
		return err
	}
	*p = TaskManagementRequest{Immediate: h.Immediate(), Function: TMFunction(h[1] & 0x7f),
		LUN: h.u64(8), TaskTag: h.u32(16), RefTaskTag: h.u32(20), CmdSN: h.u32(24),
		ExpStatSN: h.u32(28), RefCmdSN: h.u32(32), ExpDataSN: h.u32(36)}
	return h.expectTaskTag(OpTaskManagementRequest)
}

// Encode writes a header.
func (p *TaskManagementRequest) Encode(h *Header) {
	h.start(OpTaskManagementRequest, p.Immediate, 0)
	h[1] = bitFinal | byte(p.Function)&0x7f
	h.put64(8, p.LUN)
	h.put32(16, p.TaskTag)
	h.put32(20, p.RefTaskTag)
	h.put32(24, p.CmdSN)
	h.put32(28, p.ExpStatSN)
	h.put32(32, p.RefCmdSN)
	h.put32(36, p.ExpDataSN)
}

// TaskManagementResponse answers a TaskManagementRequest (RFC 7143 11.6, RFC 7144 6.4).
type TaskManagementResponse struct {
	Response TMResponse
	// additional response information (SAM-5 7); 0 below protocol level 2
	Additional                 [3]byte
	TaskTag                    uint32
	StatSN, ExpCmdSN, MaxCmdSN uint32
}

// Decode reads a header.
func (p *TaskManagementResponse) Decode(h *Header) error {
	if err := h.expectBare(OpTaskManagementResponse); err != nil {
		return err
	}
	*p = TaskManagementResponse{Response: TMResponse(h[2]), Additional: [3]byte(h[8:11]),
		TaskTag: h.u32(16), StatSN: h.u32(24), ExpCmdSN: h.u32(28), MaxCmdSN: h.u32(32)}
	return nil
}

// Encode writes a header.
func (p *TaskManagementResponse) Encode(h *Header) {
	h.start(OpTaskManagementResponse, false, 0)
	h[1], h[2] = bitFinal, byte(p.Response)
	copy(h[8:], p.Additional[:])
	h.put32(16, p.TaskTag)
	h.put32(24, p.StatSN)
	h.put32(28, p.ExpCmdSN)
	h.put32(32, p.MaxCmdSN)
}
