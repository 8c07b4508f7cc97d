package targettest

import (
	"encoding/binary"
	"fmt"

	"kubevirt.io/disk/target/internal/pdu"
)

// Command is a SCSI command to send.
type Command struct {
	LUN   uint16
	CDB   []byte // bytes beyond 16 go into an additional header
	Read  int    // bytes expected
	Write []byte // data for the target; its length is the expected length

	Immediate bool

	// How to send data. Default: as much immediate and then unsolicited data as the session's
	// parameters allow.
	NoImmediate, NoUnsolicited bool

	Edit    func(*pdu.SCSICommand) // may change the PDU when all fields are set
	Options []Option               // for the command PDU

	// OnR2T is called for an R2T. Without it the session sends the data.
	OnR2T func(t *Task, r pdu.R2T) error
}

// Result is the outcome of a command.
type Result struct {
	Response            uint8 // iSCSI service response, 0: completed
	Status              uint8
	Qualifier           uint16 // status qualifier
	Sense               Sense
	Data                []byte // from the target
	Overflow, Underflow bool
	Residual            uint32
	R2Ts                []pdu.R2T
	DataIns             []pdu.DataIn
	Rejects             []*RejectError // of this command's PDUs, such as data with a wrong digest
	StatusInData        bool           // status came with the last Data-In
}

// Task is a command in flight.
type Task struct {
	s        *Session
	command  Command
	cmd      pdu.SCSICommand
	result   Result
	done     bool
	sequence int  // bytes of Data-In in the current sequence
	open     bool // the current sequence has no F bit yet
	awaited  int  // R2Ts that AwaitR2T returned
}

// Tag is the initiator task tag.
func (t *Task) Tag() uint32 { return t.cmd.TaskTag }

// CmdSN is the command's CmdSN.
func (t *Task) CmdSN() uint32 { return t.cmd.CmdSN }

// LUN is the number of the command's LUN.
func (t *Task) LUN() uint16 { return uint16(t.cmd.LUN >> 48) }

// Resume takes a command back after Finish returned an error, such as the Reject of a Data-Out PDU.
func (t *Task) Resume() { t.s.tasks[t.cmd.TaskTag] = t }

// Done reports whether the response has come.
func (t *Task) Done() bool { return t.done }

// LUN returns the single-level LUN field for a LUN number, in peripheral device or flat space
// addressing (SAM-5 4.7).
func LUN(n uint16) uint64 {
	if n < 256 {
		return uint64(n) << 48
	}
	return uint64(0x4000|n) << 48
}

// Prepare makes the PDU of a command, with numbers and tag, and its immediate and unsolicited data.
// Start sends them.
func (s *Session) Prepare(c Command) (cmd pdu.SCSICommand, immediate, unsolicited []byte) {
	cmd = pdu.SCSICommand{Immediate: c.Immediate, Final: true, Read: c.Read > 0,
		Write: len(c.Write) > 0, Attr: pdu.TaskAttrSimple,
		LUN: LUN(c.LUN), TaskTag: s.NewTag(), ExpectedLength: uint32(max(c.Read, len(c.Write)))}
	copy(cmd.CDB[:], c.CDB)
	cmd.CmdSN, cmd.ExpStatSN = s.number(c.Immediate)
	p := &s.Params
	first := c.Write[:min(len(c.Write), p.FirstBurst)]
	if p.ImmediateData && !c.NoImmediate {
		immediate = first[:min(len(first), p.MaxSend)]
	}
	if !p.InitialR2T && !c.NoUnsolicited && len(first) > len(immediate) {
		unsolicited = first[len(immediate):]
		cmd.Final = false
	}
	if c.Edit != nil {
		c.Edit(&cmd)
	}
	return cmd, immediate, unsolicited
}

// Start sends a command with its immediate and unsolicited data.
func (s *Session) Start(c Command) (*Task, error) {
	if !c.Immediate && pdu.SNLess(s.MaxCmdSN, s.CmdSN) {
		return nil, fmt.Errorf("the command window is closed: CmdSN %d, MaxCmdSN %d", s.CmdSN,
			s.MaxCmdSN)
	}
	cmd, immediate, unsolicited := s.Prepare(c)
	t := &Task{s: s, command: c, cmd: cmd}
	if s.tasks == nil {
		s.tasks = make(map[uint32]*Task)
	}
	s.tasks[cmd.TaskTag] = t
	opts := c.Options
	if len(c.CDB) > 16 {
		more := c.CDB[16:]
		ahs := []byte{0, byte(len(more) + 1), 1, 0} // RFC 7143 11.2.2.3
		opts = append([]Option{WithAHS(append(ahs, more...))}, opts...)
	}
	if err := s.Send(&cmd, immediate, opts...); err != nil {
		return nil, err
	}
	return t, t.SendData(pdu.ReservedTag, len(immediate), unsolicited)
}

// SendData sends a sequence of Data-Out PDUs, each as long as the target allows, the last one with
// the F bit. The transfer tag is that of an R2T, or the reserved one for unsolicited data.
func (t *Task) SendData(transferTag uint32, offset int, data []byte, opts ...Option) error {
	for sn := uint32(0); len(data) > 0; sn++ {
		n := min(len(data), t.s.Params.MaxSend)
		if err := t.s.Send(&pdu.DataOut{Final: n == len(data), LUN: t.cmd.LUN,
			TaskTag: t.cmd.TaskTag, TransferTag: transferTag, ExpStatSN: t.s.ExpStatSN, DataSN: sn,
			BufferOffset: uint32(offset)}, data[:n], opts...); err != nil {
			return err
		}
		data, offset = data[n:], offset+n
	}
	return nil
}

// DataOut sends one Data-Out PDU of the command. It sets LUN, tag and ExpStatSN, and nothing else.
func (t *Task) DataOut(p pdu.DataOut, data []byte, opts ...Option) error {
	p.LUN, p.TaskTag, p.ExpStatSN = t.cmd.LUN, t.cmd.TaskTag, t.s.ExpStatSN
	return t.s.Send(&p, data, opts...)
}

// Answer sends the data for an R2T.
func (t *Task) Answer(r pdu.R2T) error {
	from, to := int(r.BufferOffset), int(r.BufferOffset)+int(r.DesiredLength)
	if to > len(t.command.Write) {
		return fmt.Errorf("R2T for bytes %d to %d of %d", from, to, len(t.command.Write))
	}
	return t.SendData(r.TransferTag, from, t.command.Write[from:to])
}

// Do runs a command to its end.
func (s *Session) Do(c Command) (*Result, error) {
	t, err := s.Start(c)
	if err != nil {
		return nil, err
	}
	return t.Finish()
}

// Finish waits for the end of a command. A Reject of the command is an error.
func (t *Task) Finish() (*Result, error) {
	defer t.s.Forget(t)
	for !t.done {
		p, err := t.s.pump(func(p *PDU) bool { return t.done || isReject(p, t.cmd.TaskTag) })
		if err != nil {
			return nil, err
		}
		if t.done {
			break
		}
		r, err := asReject(p)
		if err != nil {
			return nil, err
		}
		if r.Reason != pdu.RejectDataDigest {
			return nil, r
		}
		t.result.Rejects = append(t.result.Rejects, r) // the response follows (RFC 7143 7.8)
	}
	return &t.result, nil
}

// AwaitR2T waits for the next R2T of a command whose OnR2T does nothing.
func (t *Task) AwaitR2T() (pdu.R2T, error) {
	n := t.awaited
	t.awaited++
	if !t.done && len(t.result.R2Ts) <= n {
		_, err := t.s.pump(func(*PDU) bool { return t.done || len(t.result.R2Ts) > n })
		if err != nil {
			return pdu.R2T{}, err
		}
	}
	if len(t.result.R2Ts) <= n {
		return pdu.R2T{}, fmt.Errorf("the command ended with status %#x and sense %v, want an R2T",
			t.result.Status, t.result.Sense)
	}
	return t.result.R2Ts[n], nil
}

// HoldR2T is an OnR2T that does not answer.
func HoldR2T(*Task, pdu.R2T) error { return nil }

// take handles one PDU for the command.
func (t *Task) take(p *PDU) error {
	if t.done {
		return fmt.Errorf("%v for task %#x after its response", p.Header.Opcode(), t.cmd.TaskTag)
	}
	switch p.Header.Opcode() {
	case pdu.OpDataIn:
		return t.takeDataIn(p)
	case pdu.OpR2T:
		return t.takeR2T(p)
	}
	return t.takeResponse(p)
}

// takeDataIn checks order and bounds (RFC 7143 11.7) and keeps the data.
func (t *Task) takeDataIn(p *PDU) error {
	in, err := As[pdu.DataIn](p)
	if err != nil {
		return err
	}
	r, params := &t.result, &t.s.Params
	switch {
	case !t.cmd.Read:
		return fmt.Errorf("data %+v for a command that reads nothing", &in)
	case in.DataSN != uint32(len(r.DataIns)):
		return fmt.Errorf("data %+v: want DataSN %d", &in, len(r.DataIns))
	case int(in.BufferOffset) != len(r.Data):
		return fmt.Errorf("data %+v: want offset %d, as DataSequenceInOrder and DataPDUInOrder "+
			"are Yes", &in, len(r.Data))
	case in.DataLen > params.MaxReceive:
		return fmt.Errorf("data %+v: longer than MaxRecvDataSegmentLength %d",
			&in, params.MaxReceive)
	case len(r.Data)+in.DataLen > int(t.cmd.ExpectedLength):
		return fmt.Errorf("data %+v: beyond the expected length %d", &in, t.cmd.ExpectedLength)
	}
	t.sequence += in.DataLen
	if t.sequence > params.MaxBurst {
		return fmt.Errorf("data %+v: a sequence of %d bytes, but MaxBurstLength is %d",
			&in, t.sequence, params.MaxBurst)
	}
	if t.open = !in.Final; in.Final {
		t.sequence = 0
	}
	r.Data = append(r.Data, p.Data...)
	r.DataIns = append(r.DataIns, in)
	if in.HasStatus {
		r.Status, r.Overflow, r.Underflow, r.Residual = in.Status, in.Overflow, in.Underflow,
			in.Residual
		r.StatusInData, t.done = true, true
	}
	return nil
}

// takeR2T checks order and bounds (RFC 7143 11.8) and answers.
func (t *Task) takeR2T(p *PDU) error {
	r2t, err := As[pdu.R2T](p)
	if err != nil {
		return err
	}
	r := &t.result
	switch {
	case !t.cmd.Write:
		return fmt.Errorf("R2T %+v for a command that writes nothing", &r2t)
	case r2t.R2TSN != uint32(len(r.R2Ts)):
		return fmt.Errorf("R2T %+v: want R2TSN %d", &r2t, len(r.R2Ts))
	case int(r2t.DesiredLength) > t.s.Params.MaxBurst:
		return fmt.Errorf("R2T %+v: longer than MaxBurstLength %d", &r2t, t.s.Params.MaxBurst)
	case uint64(r2t.BufferOffset)+uint64(r2t.DesiredLength) > uint64(t.cmd.ExpectedLength):
		return fmt.Errorf("R2T %+v: beyond the expected length %d", &r2t, t.cmd.ExpectedLength)
	case r2t.LUN != t.cmd.LUN:
		return fmt.Errorf("R2T %+v: LUN %#x, want %#x", &r2t, r2t.LUN, t.cmd.LUN)
	}
	if n := len(r.R2Ts); n > 0 && r2t.BufferOffset != r.R2Ts[n-1].BufferOffset+
		r.R2Ts[n-1].DesiredLength {
		return fmt.Errorf("R2T %+v: does not follow the one before, as DataSequenceInOrder is Yes",
			&r2t)
	}
	r.R2Ts = append(r.R2Ts, r2t)
	if t.command.OnR2T != nil {
		return t.command.OnR2T(t, r2t)
	}
	return t.Answer(r2t)
}

// takeResponse checks the response (RFC 7143 11.4) and keeps status and sense data.
func (t *Task) takeResponse(p *PDU) error {
	rsp, err := As[pdu.SCSIResponse](p)
	if err != nil {
		return err
	}
	r := &t.result
	if n := uint32(len(r.DataIns)); rsp.Response == 0 && rsp.ExpDataSN != n { // R2Ts do not count
		return fmt.Errorf("response %+v: ExpDataSN is %d, want %d (RFC 7143 11.4.8)",
			&rsp, rsp.ExpDataSN, n)
	}
	if t.open {
		return fmt.Errorf("response %+v: the last Data-In has no F bit (RFC 7143 11.7.1)", &rsp)
	}
	if rsp.StatusQualifier != 0 && t.s.Params.ProtocolLevel < 2 {
		return fmt.Errorf("response %+v: a status qualifier at protocol level %d (RFC 7144 5.2.1)",
			&rsp, t.s.Params.ProtocolLevel)
	}
	r.Response, r.Status, r.Qualifier = rsp.Response, rsp.Status, rsp.StatusQualifier
	r.Overflow, r.Underflow, r.Residual = rsp.Overflow, rsp.Underflow, rsp.Residual
	t.done = true
	if len(p.Data) == 0 {
		if rsp.Status == StatusCheckCondition {
			return fmt.Errorf("response %+v: CHECK CONDITION without sense data (RFC 7143 7.7)",
				&rsp)
		}
		return nil
	}
	if len(p.Data) < 2 || int(binary.BigEndian.Uint16(p.Data)) > len(p.Data)-2 {
		return fmt.Errorf("response %+v: the sense length does not fit the data segment (RFC "+
			"7143 11.4.7.1)", &rsp)
	}
	r.Sense, err = ParseSense(p.Data[2 : 2+int(binary.BigEndian.Uint16(p.Data))])
	return err
}
