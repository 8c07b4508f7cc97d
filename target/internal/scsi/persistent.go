package scsi

import "slices"

// reservationType is the TYPE of a persistent reservation (SPC-4 6.15.3.4).
type reservationType uint8

// The types. Others are obsolete or reserved.
const (
	typeNone                  reservationType = 0x0 // there is no reservation
	typeWriteExclusive        reservationType = 0x1
	typeExclusiveAccess       reservationType = 0x3
	typeWriteExclusiveRO      reservationType = 0x5 // registrants only
	typeExclusiveAccessRO     reservationType = 0x6
	typeWriteExclusiveShared  reservationType = 0x7 // all registrants hold it
	typeExclusiveAccessShared reservationType = 0x8
)

// scopeLU is the only SCOPE that is not obsolete: the whole logical unit (SPC-4 6.15.3.3).
const scopeLU = 0x0

// reservationTypes says for each type which right a command of another nexus needs, and which ports
// have access.
var reservationTypes = [...]struct {
	right       flags // 0: no such type
	registrants bool  // every registrant has access
	shared      bool  // every registrant holds the reservation
}{
	typeWriteExclusive:        {right: duringWriteExclusive},
	typeExclusiveAccess:       {right: duringExclusiveAccess},
	typeWriteExclusiveRO:      {right: duringWriteExclusive, registrants: true},
	typeExclusiveAccessRO:     {right: duringExclusiveAccess, registrants: true},
	typeWriteExclusiveShared:  {right: duringWriteExclusive, registrants: true, shared: true},
	typeExclusiveAccessShared: {right: duringExclusiveAccess, registrants: true, shared: true},
}

func (r reservationType) valid() bool {
	return int(r) < len(reservationTypes) && reservationTypes[r].right != 0
}

func (r reservationType) registrants() bool { return reservationTypes[r].registrants }
func (r reservationType) shared() bool      { return reservationTypes[r].shared }

// maxRegistrations bounds the registrations of a logical unit.
const maxRegistrations = 1024

// registration is the reservation key of an I_T nexus. There is only one target port, so the
// initiator port identifies the nexus. The port need not have a session.
type registration struct {
	port     InitiatorPort
	key      uint64
	allPorts bool // registered with ALL_TG_PT
}

// persistentState is the state of persistent reservations at a logical unit. It never changes once
// it is published.
type persistentState struct {
	generation    uint32 // PRGENERATION; starts at 0 with each start, even with APTPL
	aptpl         bool   // the fields below survive a loss of power
	kind          reservationType
	holder        InitiatorPort  // of a reservation that is not shared
	registrations []registration // oldest first
	index         map[InitiatorPort]int
}

func (s *persistentState) find(p InitiatorPort) *registration {
	if i, ok := s.index[p]; ok {
		return &s.registrations[i]
	}
	return nil
}

// holds reports whether a port is a holder of the reservation (SPC-4 5.13.10).
func (s *persistentState) holds(p InitiatorPort) bool {
	switch {
	case s.kind == typeNone:
		return false
	case s.kind.shared():
		return s.find(p) != nil
	}
	return s.holder == p
}

// holders returns the names of the initiators that hold the reservation. They may be repeated.
func (s *persistentState) holders() (names []string) {
	for i := range s.registrations {
		if port := s.registrations[i].port; s.holds(port) {
			names = append(names, port.Name)
		}
	}
	return names
}

// admits reports whether the reservation does not restrict a port.
func (s *persistentState) admits(p InitiatorPort) bool {
	return s.kind == typeNone || s.holds(p) || s.kind.registrants() && s.find(p) != nil
}

// bars returns the right that a command of this port needs, or 0.
func (s *persistentState) bars(p InitiatorPort) flags {
	if s.admits(p) {
		return 0
	}
	return reservationTypes[s.kind].right
}

// reservationKey is the key that READ RESERVATION reports. Shared reservations have none (SPC-4
// 6.15.3.2).
func (s *persistentState) reservationKey() uint64 {
	if r := s.find(s.holder); r != nil && !s.kind.shared() {
		return r.key
	}
	return 0
}

// persistentEdit builds the next state, and collects the ports that need a unit attention.
type persistentEdit struct {
	persistentState
	by      InitiatorPort // the sender of the command, which learns the result from the status
	notices map[InitiatorPort]attention
	removed []InitiatorPort // ports whose registration was preempted, possibly by that port itself
}

// edit begins a change of s.
func (s *persistentState) edit(by InitiatorPort) *persistentEdit {
	e := &persistentEdit{persistentState: *s, by: by, notices: map[InitiatorPort]attention{}}
	e.registrations = slices.Clone(s.registrations)
	e.reindex()
	return e
}

func (s *persistentState) reindex() {
	s.index = make(map[InitiatorPort]int, len(s.registrations))
	for i := range s.registrations {
		s.index[s.registrations[i].port] = i
	}
}

// add registers a port that is not yet registered.
func (e *persistentEdit) add(r registration) error {
	if len(e.registrations) >= maxRegistrations {
		return errRegistrationResources
	}
	e.index[r.port] = len(e.registrations)
	e.registrations = append(e.registrations, r)
	return nil
}

// remove deletes registrations. If the reservation then has no holder, it ends, too. The caller
// notifies the ports.
func (e *persistentEdit) remove(which func(*registration) bool) (gone []InitiatorPort) {
	e.registrations = slices.DeleteFunc(e.registrations, func(r registration) bool {
		if !which(&r) {
			return false
		}
		gone = append(gone, r.port)
		return true
	})
	e.reindex()
	if len(e.registrations) == 0 || e.kind != typeNone && !e.kind.shared() &&
		e.find(e.holder) == nil {
		e.release()
	}
	return gone
}

func (e *persistentEdit) release() { e.kind, e.holder = typeNone, InitiatorPort{} }

// reserve makes the sender of the command the holder.
func (e *persistentEdit) reserve(kind reservationType) {
	e.kind, e.holder = kind, InitiatorPort{}
	if !kind.shared() {
		e.holder = e.by
	}
}

// tell raises a unit attention for every registered port except the sender of the command.
func (e *persistentEdit) tell(c attention) {
	for i := range e.registrations {
		if p := e.registrations[i].port; p != e.by {
			e.notices[p] |= c
		}
	}
}

// withoutFenced returns the state after fencing initiators: it drops their registrations and
// reservations.
func (s *persistentState) withoutFenced(fenced func(name string) bool) *persistentEdit {
	e := s.edit(InitiatorPort{})
	gone := e.remove(func(r *registration) bool { return fenced(r.port.Name) })
	if len(gone) > 0 {
		e.generation++
	}
	for _, p := range gone {
		e.notices[p] |= attnRegistrationsPreempted
	}
	if e.kind == typeNone && s.kind.registrants() {
		e.tell(attnReservationsReleased)
	}
	return e
}

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
// itself checks which nexus may use it (SPC-4 table 64). Its usage map covers fields that a service
// action ignores, because initiators fill them in.
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
