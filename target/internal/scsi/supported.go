package scsi

import "encoding/binary"

// Values of REPORTING OPTIONS (SPC-4 6.35).
const (
	reportAll       = 0
	reportOpcode    = 1 // a command without service actions
	reportAction    = 2 // a command with service actions
	reportEither    = 3
	bitRCTD         = 0x80
	supportNone     = 0x01
	supportStandard = 0x03
)

// prepareReportOpcodes is REPORT SUPPORTED OPERATION CODES (SPC-4 6.35).
func prepareReportOpcodes(t *Task) error {
	options, opcode, action := t.CDB[2]&7, t.CDB[3], binary.BigEndian.Uint16(t.CDB[4:])
	timeouts := t.CDB[2]&bitRCTD != 0
	table := t.unit.table()
	var c *command
	if i := table.first[opcode]; i != 0 {
		c = &table.commands[i-1]
	}
	switch options {
	case reportAll:
		t.data = table.appendAll(t.data[:0], timeouts)
	case reportOpcode:
		if c != nil && c.hasAction {
			return invalidField(2, 2)
		}
		t.data = appendOne(t.data[:0], c, timeouts)
	case reportAction:
		if c != nil && !c.hasAction {
			return invalidField(2, 2)
		}
		t.data = appendOne(t.data[:0], table.find(opcode, action), timeouts)
	case reportEither:
		if c != nil && c.hasAction {
			c = table.find(opcode, action)
		} else if action != 0 {
			c = nil
		}
		t.data = appendOne(t.data[:0], c, timeouts)
	default:
		return invalidField(2, 2)
	}
	t.reply(binary.BigEndian.Uint32(t.CDB[6:]))
	return nil
}

// appendAll appends the all_commands parameter data (SPC-4 6.35.2).
func (o *opcodeTable) appendAll(b []byte, timeouts bool) []byte {
	start := len(b)
	b = append(b, 0, 0, 0, 0)
	for i := range o.commands {
		c := &o.commands[i]
		const ctdp, servactv = 0x02, 0x01
		var flags byte
		if timeouts {
			flags |= ctdp
		}
		if c.hasAction {
			flags |= servactv
		}
		b = append(b, c.opcode, 0, 0, c.action, 0, flags, 0, byte(len(c.usage)))
		if timeouts {
			b = c.appendTimeouts(b)
		}
	}
	binary.BigEndian.PutUint32(b[start:], uint32(len(b)-start-4))
	return b
}

// appendOne appends the one_command parameter data (SPC-4 6.35.3); c is nil if the command is not
// supported.
func appendOne(b []byte, c *command, timeouts bool) []byte {
	const ctdp = 0x80
	if c == nil {
		return append(b, 0, supportNone, 0, 0)
	}
	support := byte(supportStandard)
	if timeouts {
		support |= ctdp
	}
	b = append(b, 0, support, 0, byte(len(c.usage)))
	b = append(b, c.usage...)
	if timeouts {
		b = c.appendTimeouts(b)
	}
	return b
}

// appendTimeouts appends the command timeouts descriptor (SPC-4 6.35.4). It has no nominal time,
// only the time after which an initiator should suspect a fault.
func (c *command) appendTimeouts(b []byte) []byte {
	b = append(b, 0, 10, 0, 0, 0, 0, 0, 0)
	return binary.BigEndian.AppendUint32(b, c.timeout)
}

const bitREPD = 0x80

// prepareReportManagement is REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS (SPC-4 6.36). It reports
// the functions of RFC 7143 11.5.1 that the transport has and, if the session has negotiated them,
// those of RFC 7144 6.3.
func prepareReportManagement(t *Task) error {
	allocation := binary.BigEndian.Uint32(t.CDB[6:])
	if allocation < 4 {
		return invalidField(6, 7)
	}
	const abortTask, abortTaskSet, clearTaskSet, unitReset, targetReset = 0x80, 0x40, 0x10, 0x08,
		0x02
	const queryTask, queryEvent, queryTaskSet, nexusReset = 0x04, 0x04, 0x02, 0x01
	first, second := byte(abortTask|abortTaskSet|clearTaskSet|unitReset|targetReset), byte(0)
	if t.Nexus.level >= levelRFC7144 {
		first, second = first|queryTask, queryEvent|queryTaskSet|nexusReset
	}
	t.data = append(t.data[:0], first, second, 0, 0)
	if t.CDB[2]&bitREPD != 0 {
		t.data[3] = 12                               // additional data length
		t.data = append(t.data, make([]byte, 12)...) // no times known
	}
	t.reply(allocation)
	return nil
}
