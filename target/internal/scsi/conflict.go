package scsi

import (
	"fmt"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/serving"
)

// A guest sees a reservation conflict only as an I/O error, so the log says which peer has the
// unit.

// conflictInterval is how long the log does not repeat a conflict. An initiator may get it a
// thousand times a second.
const conflictInterval = 10 * time.Minute

// conflictCause is why commands of an initiator end with RESERVATION CONFLICT.
type conflictCause string

const (
	conflictOwner      conflictCause = "another initiator owns the LUN"
	conflictReserve    conflictCause = "another initiator has reserved the LUN by RESERVE(6)"
	conflictPersistent conflictCause = "a persistent reservation keeps the initiator out"
	conflictKey        conflictCause = "the command does not fit the LUN's persistent reservations"
)

// conflictOf returns why a command of the nexus has conflicted, and with whom. cmd is nil for a
// reset. cause is empty if the conflict is over by now.
func (d *Device) conflictOf(u *unit, n *Nexus, cmd *command) (cause conflictCause, with string) {
	if !n.Admitted(u.served) {
		return conflictOwner, u.Owner()
	}
	if holder := u.reserved.Load(); holder != nil && holder != n {
		return conflictReserve, holder.Name()
	}
	switch s := u.persistent.state.Load(); {
	case s.admits(n.port):
	case s.kind.shared():
		return conflictPersistent, "everyone who is registered"
	default:
		return conflictPersistent, s.holder.Name
	}
	if cmd != nil {
		switch cmd.opcode {
		case opPersistOut, opReserve6, opRelease6:
			return conflictKey, ""
		}
	}
	return "", ""
}

// advice says what a person can do about a conflict.
func (c conflictCause) advice(lun uint16, initiator string) string {
	switch c {
	case conflictOwner:
		return fmt.Sprintf("shut the owner's guest down, so that its last session ends; for a "+
			"live migration, handover --lun %d --to %s; for a cluster file system, access mode %s",
			lun, initiator, serving.AccessWriteShared)
	case conflictReserve:
		return "end the owner's session, or have it release the LUN"
	case conflictPersistent:
		return "register this initiator by the cluster software that has reserved the LUN, or " +
			"have that " +
			"release it; sg_persist --in --read-full-status shows all registrations"
	}
	return "compare the command's key with the one that the initiator has registered: sg_persist " +
		"--in --read-full-status"
}

// logConflict logs that a reservation or the unit's owner bars a command. cmd is nil for a reset.
func (d *Device) logConflict(u *unit, n *Nexus, cmd *command) {
	if n.Fenced(u.served) {
		d.logFenced(u, n)
		return
	}
	name := n.Name()
	cause, with := d.conflictOf(u, n, cmd)
	if cause == "" {
		return
	}
	suppressed, ok := u.refusals.Admit(conflictNote{name, cause, with}, time.Now())
	if !ok {
		return
	}
	fields := []zap.Field{zap.Uint16("lun", u.Number), zap.String("initiator", name),
		zap.String("address", n.Address())}
	if cmd != nil {
		fields = append(fields, zap.String("command", cmd.name))
	}
	if with != "" {
		fields = append(fields, zap.String("owner", with))
	}
	fields = append(fields, serving.Unsaid(suppressed)...)
	d.log.Warn("commands of an initiator end with RESERVATION CONFLICT: "+string(cause),
		append(fields, zap.String("try", cause.advice(u.Number, name)))...)
}

// conflictNote identifies a line of the log: an initiator, its conflict, and with whom.
type conflictNote struct {
	initiator string
	cause     conflictCause
	with      string
}

// missedLUN identifies a line of the log: an initiator, and a LUN without a disk that it asked for.
type missedLUN struct {
	initiator string
	lun       uint64
}

// logMissingLUN logs that an initiator wants to use a LUN that no disk has.
func (d *Device) logMissingLUN(t *Task) {
	suppressed, ok := d.missed.Admit(missedLUN{t.Nexus.Name(), t.LUN}, time.Now())
	if !ok {
		return
	}
	lun := zap.String("lun", fmt.Sprintf("%016x", t.LUN))
	if number, ok := decodeLUN(t.LUN); ok {
		lun = zap.Uint16("lun", number)
	}
	d.log.Warn("an initiator asks for a LUN that no disk has", append([]zap.Field{lun,
		zap.String("initiator", t.Nexus.Name()), zap.String("address", t.Nexus.Address()),
		zap.String("try", "kubevirt-disk ps, which lists the LUNs that there are")},
		serving.Unsaid(suppressed)...)...)
}
