package scsi

import "slices"

// lookup finds the command of a CDB, or returns why it is refused.
func (t *opcodeTable) lookup(cdb *[16]byte) (*command, error) {
	i := int(t.first[cdb[0]])
	if i == 0 {
		return nil, errInvalidOpcode
	}
	if c := &t.commands[i-1]; !c.hasAction {
		return c, nil
	}
	if c := t.find(cdb[0], uint16(cdb[1]&actionMask)); c != nil {
		return c, nil
	}
	return nil, invalidField(1, 4)
}

// find returns a command with a service action; nil if it is not supported.
func (t *opcodeTable) find(opcode byte, action uint16) *command {
	i := int(t.first[opcode])
	if i == 0 {
		return nil
	}
	for i--; i < len(t.commands) && t.commands[i].opcode == opcode; i++ {
		if c := &t.commands[i]; c.hasAction && uint16(c.action) == action {
			return c
		}
	}
	return nil
}

// newOrphanTable makes the table of commands that a LUN without a disk answers.
func newOrphanTable() *opcodeTable {
	return indexCommands(slices.DeleteFunc(commonCommands(), func(c command) bool {
		return c.opcode != opInquiry && c.opcode != opReportLUNs && c.opcode != opRequestSense
	}))
}
