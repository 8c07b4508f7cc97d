package scsi

import (
	"cmp"
	"encoding/binary"
	"slices"
	"sync"

	"kubevirt.io/disk/serving"
)

// The operation codes (SPC-4 annex, SBC-3 5.1).
const (
	opTestUnitReady    = 0x00
	opRequestSense     = 0x03
	opRead6            = 0x08
	opWrite6           = 0x0a
	opInquiry          = 0x12
	opModeSelect6      = 0x15
	opReserve6         = 0x16
	opRelease6         = 0x17
	opModeSense6       = 0x1a
	opStartStop        = 0x1b
	opReadCapacity10   = 0x25
	opRead10           = 0x28
	opWrite10          = 0x2a
	opWriteVerify10    = 0x2e
	opVerify10         = 0x2f
	opPrefetch10       = 0x34
	opSyncCache10      = 0x35
	opWriteSame10      = 0x41
	opUnmap            = 0x42
	opModeSelect10     = 0x55
	opModeSense10      = 0x5a
	opPersistIn        = 0x5e
	opPersistOut       = 0x5f
	opRead16           = 0x88
	opCompareAndWrite  = 0x89
	opWrite16          = 0x8a
	opWriteVerify16    = 0x8e
	opVerify16         = 0x8f
	opPrefetch16       = 0x90
	opSyncCache16      = 0x91
	opWriteSame16      = 0x93
	opWriteAtomic16    = 0x9c
	opServiceActionIn  = 0x9e
	opReportLUNs       = 0xa0
	opMaintenanceIn    = 0xa3
	opRead12           = 0xa8
	opWrite12          = 0xaa
	opWriteVerify12    = 0xae
	opVerify12         = 0xaf
	saReadCapacity16   = 0x10
	saGetLBAStatus     = 0x12
	saReportPortGroups = 0x0a
	saReportOpcodes    = 0x0c
	saReportManagement = 0x0d
)

// flags say under which conditions a command is executed.
//
// The rights follow the table of SPC-4 5.13.3 (and SBC-3 4.17, SPC-2 5.5.1): they say which
// reservations of another nexus let the command pass. A command without any right conflicts with
// all of them, as commands that write do. A registered nexus needs no right if the reservation has
// a registrants type.
type flags uint16

const (
	duringAttention flags = 1 << iota // leaves unit attentions pending (SAM-5 5.14.1)
	usesMedium                        // claims a write-exclusive unit
	writesMedium                      // refused by a write-protected unit

	duringClaim           // allowed while another initiator owns a write-exclusive unit
	duringReserve         // allowed while another nexus holds the unit by RESERVE(6)
	duringWriteExclusive  // allowed by the Write Exclusive types of persistent reservations
	duringExclusiveAccess // allowed by the Exclusive Access types

	duringPersistent  = duringWriteExclusive | duringExclusiveAccess
	duringReservation = duringReserve | duringPersistent
	// the command reads nothing that another initiator may own
	duringConflict = duringClaim | duringReservation
)

// layout says where a CDB holds its address and transfer length.
type layout uint8

const (
	cdb6 layout = iota
	cdb10
	cdb12
	cdb16
)

// command is a row of the opcode table.
type command struct {
	name      string
	opcode    byte
	hasAction bool
	action    byte // service action, in byte 1
	// usage has a one for every bit of the CDB that is evaluated, as REPORT SUPPORTED OPERATION
	// CODES reports it (SPC-4 6.35.3). It is as long as the CDB. Byte 0 is the operation code. The
	// bits of the service action hold its value.
	usage  []byte
	ignore byte      // bits of byte 1 that are neither evaluated nor refused
	mask   [2]uint64 // the bits that may be set, as two big-endian words
	flags  flags
	op     serving.Operation
	layout layout
	// seconds after which an initiator should suspect a fault, for the command timeouts descriptor
	timeout uint32

	// harmless recognizes forms of the command that pass every reservation; nil: flags alone
	// decide.
	harmless func(cdb *[16]byte) bool

	// validates the command and sets direction and length; nil: nothing to validate
	prepare func(*Task) error
	in      func(*Task, int64, []byte) error       // nil: returns the data that prepare made
	out     func(*Task, int64, []byte) error       // nil: takes no data
	finish  func(*Task) (status Status, err error) // nil: GOOD
}

// Times that an initiator should grant, in seconds: for a command that only reads memory, for one
// that moves blocks, and for one that may wait for storage to catch up.
const (
	quick = 10
	moves = 60
	drain = 120
)

// addressed is the usage map of commands with an address and a length, by layout. b1 is the map of
// byte 1.
func addressed(l layout, b1 byte) []byte {
	const ff = 0xff
	switch l {
	case cdb6:
		return []byte{0, 0x1f, ff, ff, ff, 0}
	case cdb10:
		return []byte{0, b1, ff, ff, ff, ff, 0, ff, ff, 0}
	case cdb12:
		return []byte{0, b1, ff, ff, ff, ff, ff, ff, ff, ff, 0, 0}
	}
	return []byte{0, b1, ff, ff, ff, ff, ff, ff, ff, ff, ff, ff, ff, ff, 0, 0}
}

const (
	bitDPO    = 0x10
	bitFUA    = 0x08
	bitBytchk = 0x06
	bitImmed  = 0x02
	bitSyncNV = 0x04 // obsolete; any flush does this
	bitUnmap  = 0x08
	bitNDOB   = 0x01
)

// commonCommands do not depend on the abilities of the disk.
func commonCommands() []command {
	return []command{
		{name: "TEST UNIT READY", opcode: opTestUnitReady, usage: make([]byte, 6),
			flags: duringPersistent, timeout: quick},
		{name: "REQUEST SENSE", opcode: opRequestSense, usage: []byte{0, 0x01, 0, 0, 0xff, 0},
			flags: duringAttention | duringConflict, timeout: quick,
			prepare: prepareRequestSense},
		{name: "INQUIRY", opcode: opInquiry, usage: []byte{0, 0x01, 0xff, 0xff, 0xff, 0},
			ignore: oldLUN, flags: duringAttention | duringConflict,
			timeout: quick, prepare: prepareInquiry},
		{name: "REPORT LUNS", opcode: opReportLUNs,
			usage: []byte{0, 0, 0xff, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0},
			flags: duringAttention | duringConflict, timeout: quick,
			prepare: prepareReportLUNs},
		{name: "REPORT TARGET PORT GROUPS", opcode: opMaintenanceIn, hasAction: true,
			action: saReportPortGroups,
			usage:  []byte{0, parameterFormatMask, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0},
			flags:  duringConflict, timeout: quick, prepare: prepareReportPortGroups},
		{name: "REPORT SUPPORTED OPERATION CODES", opcode: opMaintenanceIn, hasAction: true,
			action: saReportOpcodes, usage: []byte{0, 0, 0x87, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
				0xff, 0, 0}, flags: duringClaim | duringReserve | duringWriteExclusive,
			timeout: quick, prepare: prepareReportOpcodes},
		{name: "REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS", opcode: opMaintenanceIn,
			hasAction: true, action: saReportManagement,
			usage: []byte{0, 0, 0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0},
			flags: duringClaim | duringReserve | duringWriteExclusive, timeout: quick,
			prepare: prepareReportManagement},

		// Linux reads the caching page once, when it finds the unit. If this were refused, Linux
		// would assume write-through, and would send no flushes later, when it owns the unit.
		{name: "MODE SENSE(6)", opcode: opModeSense6, usage: []byte{0, 0x08, 0xff, 0xff, 0xff, 0},
			flags: duringClaim | duringWriteExclusive, timeout: quick, prepare: prepareModeSense6},
		{name: "MODE SENSE(10)", opcode: opModeSense10,
			usage: []byte{0, 0x18, 0xff, 0xff, 0, 0, 0, 0xff, 0xff, 0},
			flags: duringClaim | duringWriteExclusive, timeout: quick, prepare: prepareModeSense10},
		{name: "MODE SELECT(6)", opcode: opModeSelect6, usage: []byte{0, bitPF, 0, 0, 0xff, 0},
			timeout: drain, prepare: prepareModeSelect6, out: outModeSelect,
			finish: finishModeSelect},
		{name: "MODE SELECT(10)", opcode: opModeSelect10,
			usage: []byte{0, bitPF, 0, 0, 0, 0, 0, 0xff, 0xff, 0}, timeout: drain,
			prepare: prepareModeSelect10, out: outModeSelect, finish: finishModeSelect},

		{name: "RESERVE(6)", opcode: opReserve6, usage: make([]byte, 6), flags: duringPersistent,
			timeout: quick, finish: finishReserve},
		{name: "RELEASE(6)", opcode: opRelease6, usage: make([]byte, 6), flags: duringConflict,
			timeout: quick, finish: finishRelease},

		{name: "READ CAPACITY(10)", opcode: opReadCapacity10, usage: make([]byte, 10),
			flags: duringConflict, timeout: quick, prepare: prepareReadCapacity10},
		{name: "READ CAPACITY(16)", opcode: opServiceActionIn, hasAction: true,
			action: saReadCapacity16, usage: []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff,
				0xff, 0, 0}, flags: duringConflict, timeout: quick,
			prepare: prepareReadCapacity16},
		{name: "START STOP UNIT", opcode: opStartStop,
			usage: []byte{0, 0x01, 0, 0, powerConditionMask | bitNoFlush | bitLOEJ | bitStart,
				0},
			harmless: onlyStarts, timeout: drain, prepare: prepareStartStop,
			finish: finishStartStop},
	}
}

// mediumCommands read and write logical blocks.
func mediumCommands(a abilities) []command {
	const reads, writes = usesMedium | duringWriteExclusive, usesMedium | writesMedium
	sameBits := byte(0)
	if a.discards {
		sameBits = bitUnmap
	}
	return []command{
		{name: "READ(6)", opcode: opRead6, layout: cdb6, op: serving.OpRead, flags: reads,
			prepare: prepareRead, in: inRead},
		{name: "READ(10)", opcode: opRead10, layout: cdb10, usage: addressed(cdb10, bitDPO|bitFUA),
			op: serving.OpRead, flags: reads, prepare: prepareRead, in: inRead},
		{name: "READ(12)", opcode: opRead12, layout: cdb12, usage: addressed(cdb12, bitDPO|bitFUA),
			op: serving.OpRead, flags: reads, prepare: prepareRead, in: inRead},
		{name: "READ(16)", opcode: opRead16, layout: cdb16, usage: addressed(cdb16, bitDPO|bitFUA),
			op: serving.OpRead, flags: reads, prepare: prepareRead, in: inRead},
		{name: "WRITE(6)", opcode: opWrite6, layout: cdb6, op: serving.OpWrite, flags: writes,
			prepare: prepareWrite, out: outWrite, finish: finishWrite},
		{name: "WRITE(10)", opcode: opWrite10, layout: cdb10,
			usage: addressed(cdb10, bitDPO|bitFUA), op: serving.OpWrite, flags: writes,
			prepare: prepareWrite, out: outWrite, finish: finishWrite},
		{name: "WRITE(12)", opcode: opWrite12, layout: cdb12,
			usage: addressed(cdb12, bitDPO|bitFUA), op: serving.OpWrite, flags: writes,
			prepare: prepareWrite, out: outWrite, finish: finishWrite},
		{name: "WRITE(16)", opcode: opWrite16, layout: cdb16,
			usage: addressed(cdb16, bitDPO|bitFUA), op: serving.OpWrite, flags: writes,
			prepare: prepareWrite, out: outWrite, finish: finishWrite},
		{name: "WRITE AND VERIFY(10)", opcode: opWriteVerify10, layout: cdb10,
			usage: addressed(cdb10, bitDPO|bitBytchk), op: serving.OpWrite, flags: writes,
			timeout: drain, prepare: prepareWriteAndVerify, out: outWriteAndVerify,
			finish: finishWrite},
		{name: "WRITE AND VERIFY(12)", opcode: opWriteVerify12, layout: cdb12,
			usage: addressed(cdb12, bitDPO|bitBytchk), op: serving.OpWrite, flags: writes,
			timeout: drain, prepare: prepareWriteAndVerify, out: outWriteAndVerify,
			finish: finishWrite},
		{name: "WRITE AND VERIFY(16)", opcode: opWriteVerify16, layout: cdb16,
			usage: addressed(cdb16, bitDPO|bitBytchk), op: serving.OpWrite, flags: writes,
			timeout: drain, prepare: prepareWriteAndVerify, out: outWriteAndVerify,
			finish: finishWrite},
		{name: "VERIFY(10)", opcode: opVerify10, layout: cdb10,
			usage: addressed(cdb10, bitDPO|bitBytchk), op: serving.OpRead, flags: reads,
			prepare: prepareVerify, out: outVerify, finish: finishVerify},
		{name: "VERIFY(12)", opcode: opVerify12, layout: cdb12,
			usage: addressed(cdb12, bitDPO|bitBytchk), op: serving.OpRead, flags: reads,
			prepare: prepareVerify, out: outVerify, finish: finishVerify},
		{name: "VERIFY(16)", opcode: opVerify16, layout: cdb16,
			usage: addressed(cdb16, bitDPO|bitBytchk), op: serving.OpRead, flags: reads,
			prepare: prepareVerify, out: outVerify, finish: finishVerify},
		{name: "PRE-FETCH(10)", opcode: opPrefetch10, layout: cdb10,
			usage: grouped(addressed(cdb10, bitImmed)), op: serving.OpRead, flags: reads,
			prepare: preparePrefetch, finish: finishPrefetch},
		{name: "PRE-FETCH(16)", opcode: opPrefetch16, layout: cdb16,
			usage: grouped(addressed(cdb16, bitImmed)), op: serving.OpRead, flags: reads,
			prepare: preparePrefetch, finish: finishPrefetch},
		{name: "SYNCHRONIZE CACHE(10)", opcode: opSyncCache10, layout: cdb10,
			usage: addressed(cdb10, bitImmed|bitSyncNV), op: serving.OpFlush, flags: usesMedium,
			timeout: drain, prepare: prepareSync, finish: finishSync},
		{name: "SYNCHRONIZE CACHE(16)", opcode: opSyncCache16, layout: cdb16,
			usage: addressed(cdb16, bitImmed|bitSyncNV), op: serving.OpFlush, flags: usesMedium,
			timeout: drain, prepare: prepareSync, finish: finishSync},
		{name: "WRITE SAME(10)", opcode: opWriteSame10, layout: cdb10,
			usage: addressed(cdb10, sameBits), op: serving.OpWrite, flags: writes, timeout: drain,
			prepare: prepareWriteSame, out: outWriteSame, finish: finishWriteSame},
		{name: "WRITE SAME(16)", opcode: opWriteSame16, layout: cdb16,
			usage: addressed(cdb16, sameBits|bitNDOB), op: serving.OpWrite, flags: writes,
			timeout: drain, prepare: prepareWriteSame, out: outWriteSame, finish: finishWriteSame},
		{name: "COMPARE AND WRITE", opcode: opCompareAndWrite,
			usage: []byte{0, bitDPO | bitFUA, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0,
				0, 0xff, 0, 0}, op: serving.OpWrite, flags: writes, prepare: prepareCompareAndWrite,
			out: outCompareAndWrite, finish: finishWrite},
	}
}

// grouped adds the GROUP NUMBER to a usage map. It assigns the command to a group for statistics,
// which are not kept.
func grouped(usage []byte) []byte {
	at := 6 // SBC-3 5.9
	if len(usage) == 16 {
		at = 14
	}
	usage[at] = 0x1f
	return usage
}

// storeCommands need a store.
func storeCommands() []command {
	return []command{
		{name: "WRITE ATOMIC(16)", opcode: opWriteAtomic16,
			usage: []byte{0, bitDPO | bitFUA, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0,
				0xff, 0xff, 0, 0}, op: serving.OpWrite, flags: usesMedium | writesMedium,
			timeout: drain, prepare: prepareWriteAtomic, out: outWriteAtomic},
	}
}

// discardCommands need a disk that can give space back.
func discardCommands() []command {
	return []command{
		{name: "UNMAP", opcode: opUnmap, usage: []byte{0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0},
			op: serving.OpDiscard, flags: usesMedium | writesMedium,
			timeout: drain, prepare: prepareUnmap,
			out: outUnmap, finish: finishUnmap},
	}
}

// extentCommands need a disk that knows what is allocated.
func extentCommands() []command {
	return []command{
		{name: "GET LBA STATUS", opcode: opServiceActionIn, hasAction: true, action: saGetLBAStatus,
			usage: []byte{0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
				0xff, 0, 0}, flags: usesMedium | duringWriteExclusive, timeout: moves,
			prepare: prepareLBAStatus, in: inLBAStatus},
	}
}

// opcodeTable is the list of commands that a logical unit supports. It is sorted by operation code
// and service action, and indexed by operation code.
type opcodeTable struct {
	commands []command
	// 1 + index into commands of the first command with this operation code; 0: none
	first [256]uint16
}

// abilities decide which commands a unit supports.
type abilities struct{ discards, store, extents, writtenElsewhere bool }

// localOnly reports whether a command's promise binds only users of the disk at this server: a
// reservation, or that nothing comes between its read and its write.
func (c *command) localOnly() bool {
	switch c.opcode {
	case opPersistIn, opPersistOut, opReserve6, opRelease6, opCompareAndWrite:
		return true
	}
	return false
}

// opcodeTables has the tables by abilities. Units share them: one takes 13 KiB, and there may be
// thousands of units.
var opcodeTables sync.Map

func opcodeTableOf(a abilities) *opcodeTable {
	if t, ok := opcodeTables.Load(a); ok {
		return t.(*opcodeTable)
	}
	t, _ := opcodeTables.LoadOrStore(a, newOpcodeTable(a))
	return t.(*opcodeTable)
}

func newOpcodeTable(a abilities) *opcodeTable {
	commands := slices.Concat(commonCommands(), persistentCommands(), mediumCommands(a))
	if a.discards {
		commands = append(commands, discardCommands()...)
	}
	if a.store {
		commands = append(commands, storeCommands()...)
	}
	if a.extents {
		commands = append(commands, extentCommands()...)
	}
	commands = append(commands, copyCommands()...)
	if a.writtenElsewhere {
		commands = slices.DeleteFunc(commands, func(c command) bool { return c.localOnly() })
	}
	return indexCommands(commands)
}

// oldLUN has the bits of byte 1 in which SCSI-2 had the LUN. Linux still sets them while it does
// not know the version of a device: in its first INQUIRY of a single LUN that is named, as the
// kubelet does.
const oldLUN = 0xe0

// actionMask has the bits of byte 1 that hold a service action.
const actionMask = 0x1f

// indexCommands completes the rows and sorts them.
func indexCommands(commands []command) *opcodeTable {
	slices.SortFunc(commands, func(a, b command) int {
		return cmp.Or(cmp.Compare(a.opcode, b.opcode), cmp.Compare(a.action, b.action))
	})
	t := &opcodeTable{commands: commands}
	for i := range commands {
		c := &commands[i]
		if c.usage == nil {
			c.usage = addressed(c.layout, 0)
		}
		c.timeout = cmp.Or(c.timeout, moves)
		c.usage[0] = c.opcode
		// The transport pads a CDB to 16 bytes. Ignore what lies beyond its length.
		mask := [16]byte{0xff}
		for j := 1; j < len(mask); j++ {
			mask[j] = 0xff
			if j < len(c.usage) {
				mask[j] = c.usage[j]
			}
		}
		mask[1] |= c.ignore
		if c.hasAction {
			mask[1] |= actionMask
			c.usage[1] |= c.action
		}
		c.mask = [2]uint64{binary.BigEndian.Uint64(mask[:8]), binary.BigEndian.Uint64(mask[8:])}
		if t.first[c.opcode] == 0 {
			t.first[c.opcode] = uint16(i + 1)
		}
	}
	return t
}

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
