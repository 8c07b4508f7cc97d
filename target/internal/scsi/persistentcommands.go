package scsi

// The service actions of PERSISTENT RESERVE IN and OUT (SPC-4 6.15, 6.16).
const (
	saReadKeys           = 0x00
	saReadReservation    = 0x01
	saReportCapabilities = 0x02
	saReadFullStatus     = 0x03

	saRegister        = 0x00
	saReserve         = 0x01
	saRelease         = 0x02
	saClear           = 0x03
	saPreempt         = 0x04
	saPreemptAndAbort = 0x05
	saRegisterIgnore  = 0x06
)

// persistentCommands are the service actions of persistent reservations. PERSISTENT RESERVE OUT
// checks itself who may use it (SPC-4 table 64). Its usage map covers fields that a service action
// ignores, because initiators fill them in.
func persistentCommands() []command {
	var commands []command
	for _, c := range []command{
		{name: "PERSISTENT RESERVE IN, READ KEYS", action: saReadKeys, prepare: prepareReadKeys},
		{name: "PERSISTENT RESERVE IN, READ RESERVATION", action: saReadReservation,
			prepare: prepareReadReservation},
		{name: "PERSISTENT RESERVE IN, REPORT CAPABILITIES", action: saReportCapabilities,
			prepare: prepareReportCapabilities},
		{name: "PERSISTENT RESERVE IN, READ FULL STATUS", action: saReadFullStatus,
			prepare: prepareReadFullStatus},
	} {
		c.opcode, c.hasAction, c.flags, c.timeout = opPersistIn, true, duringClaim|duringPersistent,
			quick
		c.usage = []byte{0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0}
		commands = append(commands, c)
	}
	for _, c := range []command{
		{name: "PERSISTENT RESERVE OUT, REGISTER", action: saRegister},
		{name: "PERSISTENT RESERVE OUT, RESERVE", action: saReserve},
		{name: "PERSISTENT RESERVE OUT, RELEASE", action: saRelease},
		{name: "PERSISTENT RESERVE OUT, CLEAR", action: saClear},
		{name: "PERSISTENT RESERVE OUT, PREEMPT", action: saPreempt},
		{name: "PERSISTENT RESERVE OUT, PREEMPT AND ABORT", action: saPreemptAndAbort},
		{name: "PERSISTENT RESERVE OUT, REGISTER AND IGNORE EXISTING KEY",
			action: saRegisterIgnore},
	} {
		c.opcode, c.hasAction, c.flags, c.timeout = opPersistOut, true, duringPersistent, drain
		c.usage = []byte{0, 0, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0}
		c.prepare, c.out = preparePersistOut, outPersist
		commands = append(commands, c)
	}
	return commands
}
