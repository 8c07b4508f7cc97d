package targettest

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"kubevirt.io/disk/target/internal/pdu"
)

// Session is a session in full feature phase on one connection. Like a Conn it belongs to one
// goroutine.
type Session struct {
	*Conn
	Params  Params
	Answers Keys // the target's keys of the operational stage
	ISID    [6]byte
	TSIH    uint16
	CID     uint16

	AnswerPings bool // answer NOP-Ins that ask for it; default true

	tasks map[uint32]*Task // commands without a response yet
	inbox []*PDU           // PDUs that came while a call waited for something else
}

// Inbox returns the PDUs that no call waited for, and removes them: Async messages, Rejects,
// responses of unknown tasks.
func (s *Session) Inbox() []*PDU {
	list := s.inbox
	s.inbox = nil
	return list
}

// pump receives until a PDU matches. Meanwhile it handles PDUs of commands in flight, answers
// pings, and puts everything else into the inbox.
func (s *Session) pump(match func(*PDU) bool) (*PDU, error) {
	if i := slices.IndexFunc(s.inbox, match); i >= 0 {
		p := s.inbox[i]
		s.inbox = slices.Delete(s.inbox, i, i+1)
		return p, nil
	}
	for {
		p, err := s.Receive()
		if err != nil {
			return nil, err
		}
		handled, err := s.handle(p)
		switch {
		case err != nil:
			return nil, err
		case match(p):
			return p, nil
		case !handled:
			s.inbox = append(s.inbox, p)
		}
	}
}

// handle gives a PDU to its command, or answers a ping.
func (s *Session) handle(p *PDU) (bool, error) {
	switch p.Header.Opcode() {
	case pdu.OpDataIn, pdu.OpR2T, pdu.OpSCSIResponse:
		if t := s.tasks[p.Header.TaskTag()]; t != nil {
			return true, t.take(p)
		}
	case pdu.OpNOPIn:
		in, err := As[pdu.NOPIn](p)
		if err != nil {
			return false, err
		}
		if s.AnswerPings && in.TaskTag == pdu.ReservedTag && in.TransferTag != pdu.ReservedTag {
			return true, s.Send(&pdu.NOPOut{Immediate: true, LUN: in.LUN, TaskTag: pdu.ReservedTag,
				TransferTag: in.TransferTag, CmdSN: s.CmdSN, ExpStatSN: s.ExpStatSN}, nil)
		}
	}
	return false, nil
}

func isReject(p *PDU, tag uint32) bool {
	if p.Header.Opcode() != pdu.OpReject || len(p.Data) < pdu.HeaderLen {
		return false
	}
	h := pdu.Header(p.Data[:pdu.HeaderLen])
	return h.TaskTag() == tag
}

// answer waits for the answer to a request: a PDU with that opcode and tag. A Reject of the request
// is an error.
func (s *Session) answer(op pdu.Opcode, tag uint32) (*PDU, error) {
	p, err := s.pump(func(p *PDU) bool {
		return p.Header.Opcode() == op && p.Header.TaskTag() == tag || isReject(p, tag)
	})
	if err != nil {
		return nil, err
	}
	if p.Header.Opcode() == pdu.OpReject {
		r, err := asReject(p)
		if err != nil {
			return nil, err
		}
		return nil, r
	}
	return p, nil
}

// number returns the numbers of a new request. A request that is not immediate uses up a CmdSN.
func (s *Session) number(immediate bool) (cmdSN, expStatSN uint32) {
	cmdSN = s.CmdSN
	if !immediate {
		s.CmdSN++
	}
	return cmdSN, s.ExpStatSN
}

// Ping sends an immediate NOP-Out and waits for its echo.
func (s *Session) Ping(data []byte) ([]byte, error) {
	tag, err := s.SendPing(true, data)
	if err != nil {
		return nil, err
	}
	return s.AwaitPing(tag)
}

// SendPing sends a NOP-Out that asks for an answer. AwaitPing waits for it.
func (s *Session) SendPing(immediate bool, data []byte, opts ...Option) (tag uint32, err error) {
	tag = s.NewTag()
	cmdSN, expStatSN := s.number(immediate)
	return tag, s.Send(&pdu.NOPOut{Immediate: immediate, TaskTag: tag, TransferTag: pdu.ReservedTag,
		CmdSN: cmdSN, ExpStatSN: expStatSN}, data, opts...)
}

// AwaitPing waits for the echo of a ping.
func (s *Session) AwaitPing(tag uint32) ([]byte, error) {
	p, err := s.answer(pdu.OpNOPIn, tag)
	if err != nil {
		return nil, err
	}
	_, err = As[pdu.NOPIn](p)
	return p.Data, err
}

// ExpectOnlyPing pings the target and checks that nothing else came before the echo. A target that
// handles requests in order then has no answer to earlier requests.
func (s *Session) ExpectOnlyPing() error {
	if _, err := s.Ping(nil); err != nil {
		return err
	}
	if stray := s.Inbox(); len(stray) > 0 {
		return &UnexpectedError{Want: "nothing but the echo of a ping", PDU: stray[0]}
	}
	return nil
}

// TaskManagement sends a task management request with a number and a new tag, and waits for the
// response.
func (s *Session) TaskManagement(r pdu.TaskManagementRequest) (pdu.TMResponse, error) {
	tag, err := s.SendTaskManagement(r)
	if err != nil {
		return 0, err
	}
	return s.AwaitTaskManagement(tag)
}

// SendTaskManagement sends a task management request. The Immediate field counts. RefTaskTag 0
// becomes the reserved tag.
func (s *Session) SendTaskManagement(r pdu.TaskManagementRequest) (tag uint32, err error) {
	r.TaskTag = s.NewTag()
	r.CmdSN, r.ExpStatSN = s.number(r.Immediate)
	r.RefTaskTag = cmp.Or(r.RefTaskTag, pdu.ReservedTag)
	return r.TaskTag, s.Send(&r, nil)
}

// AwaitTaskManagement waits for a task management response.
func (s *Session) AwaitTaskManagement(tag uint32) (pdu.TMResponse, error) {
	r, err := s.AwaitTaskManagementPDU(tag)
	return r.Response, err
}

// AwaitTaskManagementPDU is like AwaitTaskManagement, but returns the whole response.
func (s *Session) AwaitTaskManagementPDU(tag uint32) (r pdu.TaskManagementResponse, err error) {
	p, err := s.answer(pdu.OpTaskManagementResponse, tag)
	if err != nil {
		return r, err
	}
	if r, err = As[pdu.TaskManagementResponse](p); err == nil && r.Additional != [3]byte{} &&
		s.Params.ProtocolLevel < 2 {
		err = fmt.Errorf("%v: additional response information at protocol level %d (RFC 7144 4.1)",
			&r, s.Params.ProtocolLevel)
	}
	return r, err
}

// AbortTask aborts a command of this session that has no response yet, and calls Forget.
func (s *Session) AbortTask(t *Task) (pdu.TMResponse, error) {
	r := pdu.TaskManagementRequest{Immediate: true, Function: pdu.TMAbortTask, LUN: t.cmd.LUN,
		RefTaskTag: t.cmd.TaskTag, RefCmdSN: t.cmd.CmdSN}
	rsp, err := s.TaskManagement(r)
	s.Forget(t)
	return rsp, err
}

// Forget gives a command up. Everything that comes for it from now on goes to the inbox.
func (s *Session) Forget(t *Task) { delete(s.tasks, t.cmd.TaskTag) }

// Text sends a text request and collects the whole answer.
func (s *Session) Text(keys Keys) (Keys, error) {
	tag := s.NewTag()
	var text []byte
	req := pdu.TextRequest{Final: true, TaskTag: tag, TransferTag: pdu.ReservedTag}
	data := keys.Text()
	for {
		req.CmdSN, req.ExpStatSN = s.number(false)
		if err := s.Send(&req, data); err != nil {
			return nil, err
		}
		p, err := s.answer(pdu.OpTextResponse, tag)
		if err != nil {
			return nil, err
		}
		rsp, err := As[pdu.TextResponse](p)
		if err != nil {
			return nil, err
		}
		if len(p.Data) > s.Params.MaxReceive {
			return nil, fmt.Errorf("text response of %d bytes, but MaxRecvDataSegmentLength is %d",
				len(p.Data), s.Params.MaxReceive)
		}
		text = append(text, p.Data...)
		if rsp.Final {
			return ParseText(text)
		}
		req.TransferTag, req.LUN, data = rsp.TransferTag, rsp.LUN, nil
	}
}

// Logout asks for a logout and waits for the response. The caller checks that the connection
// closes.
func (s *Session) Logout(reason pdu.LogoutReason) (pdu.LogoutResponse, error) {
	return s.LogoutCID(reason, s.CID)
}

// LogoutCID is Logout with a connection identifier of the caller's choice.
func (s *Session) LogoutCID(reason pdu.LogoutReason, cid uint16) (pdu.LogoutResponse, error) {
	tag := s.NewTag()
	cmdSN, expStatSN := s.number(true)
	if err := s.Send(&pdu.LogoutRequest{Immediate: true, Reason: reason, TaskTag: tag, CID: cid,
		CmdSN: cmdSN, ExpStatSN: expStatSN}, nil); err != nil {
		return pdu.LogoutResponse{}, err
	}
	p, err := s.answer(pdu.OpLogoutResponse, tag)
	if err != nil {
		return pdu.LogoutResponse{}, err
	}
	return As[pdu.LogoutResponse](p)
}

// AwaitAsync waits for an asynchronous message.
func (s *Session) AwaitAsync() (pdu.AsyncMessage, error) {
	p, err := s.pump(func(p *PDU) bool { return p.Header.Opcode() == pdu.OpAsyncMessage })
	if err != nil {
		return pdu.AsyncMessage{}, err
	}
	return As[pdu.AsyncMessage](p)
}

// AwaitReject waits for a Reject of the PDU with this tag.
func (s *Session) AwaitReject(tag uint32) (*RejectError, error) {
	p, err := s.pump(func(p *PDU) bool { return isReject(p, tag) })
	if err != nil {
		return nil, err
	}
	return asReject(p)
}

// ReasonOf returns the reason if an error is a Reject, and whether it is one.
func ReasonOf(err error) (pdu.RejectReason, bool) {
	if r, ok := errors.AsType[*RejectError](err); ok {
		return r.Reason, true
	}
	return 0, false
}
