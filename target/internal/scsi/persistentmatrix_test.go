package scsi

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The table of SPC-4 5.13.3 and SBC-3 4.17, as the standards print it: what happens to a command of
// a nexus that does not hold the reservation. The columns: Write Exclusive; Exclusive Access; any
// registrants type, and the nexus is registered; Write Exclusive of a registrants type, and it is
// not; Exclusive Access of a registrants type, and it is not. A is allowed, C conflicts. The sixth
// column is that of a RESERVE(6) of somebody else (SPC-2 5.5.1).
const (
	matrixAllowed = "A A A A A A"
	matrixReads   = "A C A A C C"
	matrixWrites  = "C C A C C C"
)

// matrix has the commands that are not treated like a write, by name or by its first words.
var matrix = map[string]string{
	"TEST UNIT READY":               "A A A A A C",
	"INQUIRY":                       matrixAllowed,
	"REQUEST SENSE":                 matrixAllowed,
	"REPORT LUNS":                   matrixAllowed,
	"REPORT SUPPORTED":              "A C A A C A",
	"READ CAPACITY":                 matrixAllowed,
	"REPORT TARGET PORT GROUPS":     matrixAllowed,
	"MODE SENSE":                    matrixReads,
	"READ(":                         matrixReads,
	"VERIFY":                        matrixReads,
	"PRE-FETCH":                     matrixReads,
	"GET LBA STATUS":                matrixReads,
	"START STOP UNIT":               matrixWrites,
	"START STOP UNIT, START":        matrixAllowed,
	"START STOP UNIT, START, POWER": matrixWrites,
	"PERSISTENT RESERVE IN":         "A A A A A C",
}

// ownRules are the commands that decide by themselves: tested by TestReserveAmongRegistrations,
// TestReserveAndRelease.
var ownRules = []string{"RESERVE(6)", "RELEASE(6)", "PERSISTENT RESERVE OUT"}

// matrixCommands are CDBs of every command that the unit has, by name.
func matrixCommands(b *bench) map[string][]byte {
	all := map[string][]byte{
		"START STOP UNIT, START":        cdb("1b 00 00 00 01 00"),
		"START STOP UNIT, START, POWER": cdb("1b 00 00 00 11 00"),
	}
next:
	for i := range b.d.nth(0).table().commands {
		c := &b.d.nth(0).table().commands[i]
		for _, own := range ownRules {
			if strings.HasPrefix(c.name, own) {
				continue next
			}
		}
		request := make([]byte, 16)
		request[0], request[1] = c.opcode, c.action
		all[c.name] = request
	}
	return all
}

func matrixRow(name string) string {
	longest := ""
	for prefix := range matrix {
		if strings.HasPrefix(name, prefix) && len(prefix) > len(longest) {
			longest = prefix
		}
	}
	if longest == "" {
		return matrixWrites
	}
	return matrix[longest]
}

// TestConflictMatrix holds every command of the opcode table against the standards' table. A
// command that is not in the table above is expected to conflict as a write does.
func TestConflictMatrix(t *testing.T) {
	b := newBench(t)
	holder, registered, stranger := b.attach("iqn.h", 0), b.attach("iqn.r", 0), b.attach("iqn.s", 0)
	b.register(holder, 1)
	b.register(registered, 2)
	commands := matrixCommands(b)
	require.Greater(t, len(commands), 40)
	check := func(n *Nexus, column int) {
		t.Helper()
		for name, request := range commands {
			n.nth(0).pending.Store(0)
			task := &Task{Nexus: n, LUN: lun1}
			copy(task.CDB[:], request)
			want := "A"
			if column >= 0 {
				want = strings.Fields(matrixRow(name))[column]
			}
			got := "A"
			if b.d.Prepare(task) == error(errConflict) {
				got = "C"
			}
			require.Equal(t, want, got, "%s of %s, column %d", name, n.port.Name, column)
		}
	}
	for _, kind := range allTypes {
		t.Run(fmt.Sprint(kind), func(t *testing.T) {
			b.mustPersist(holder, saReserve, kind, 1, 0)
			defer b.mustPersist(holder, saRelease, kind, 1, 0)
			exclusiveAccess := 0
			if kind == typeExclusiveAccess || kind == typeExclusiveAccessRO ||
				kind == typeExclusiveAccessShared {
				exclusiveAccess = 1
			}
			check(holder, -1)
			if kind == typeWriteExclusive || kind == typeExclusiveAccess {
				check(registered, exclusiveAccess)
				check(stranger, exclusiveAccess)
			} else {
				check(registered, 2)
				check(stranger, 3+exclusiveAccess)
			}
		})
	}
	check(stranger, -1)
	pending(registered)
	b.mustPersist(registered, saClear, 0, 2, 0)
	holder.nth(0).pending.Store(0)
	require.Equal(t, "GOOD", b.runAs(holder, lun1, cdb(reserve), nil).outcome())
	check(stranger, 5)
	require.Equal(t, "GOOD", b.runAs(holder, lun1, cdb(release), nil).outcome())
	check(stranger, -1)
}

// TestReserveAmongRegistrations is RESERVE(6) and RELEASE(6) while there are registrations: they
// conflict (SPC-2 5.5.1), except for nexuses that have access by a persistent reservation, which
// stays as it is (SPC-4 5.13.3, CRH).
func TestReserveAmongRegistrations(t *testing.T) {
	b := newBench(t)
	registered, stranger := b.attach("iqn.r", 0), b.attach("iqn.s", 0)
	tries := func(n *Nexus, want string) {
		t.Helper()
		for _, c := range []string{reserve, release} {
			require.Equal(t, want, b.runAs(n, lun1, cdb(c), nil).outcome(), "%s of %s", c,
				n.port.Name)
		}
		require.Nil(t, b.d.nth(0).reserved.Load())
	}
	b.register(b.nexus, 1)
	b.register(registered, 2)
	for _, n := range []*Nexus{b.nexus, registered, stranger} {
		tries(n, conflict)
	}
	for _, kind := range allTypes {
		b.mustPersist(b.nexus, saReserve, kind, 1, 0)
		tries(b.nexus, "GOOD")
		if kind.registrants() {
			tries(registered, "GOOD")
		} else {
			tries(registered, conflict)
		}
		tries(stranger, conflict)
		require.NotEqual(t, "none", b.reservation())
		b.mustPersist(b.nexus, saRelease, kind, 1, 0)
		pending(registered)
	}
}

// TestPersistentAmongReserve is the other way round (SPC-2 5.5.1): not even the nexus that has
// reserved the unit can use persistent reservations.
func TestPersistentAmongReserve(t *testing.T) {
	b := newBench(t)
	second := b.attach("iqn.b", 0)
	b.good(cdb(reserve), nil)
	require.ErrorContains(t, b.d.Bars(b.d.nth(0).served, false), "or log out", "not sg_persist")
	for _, n := range []*Nexus{b.nexus, second} {
		for action := byte(0); action <= saReadFullStatus; action++ {
			require.Equal(t, conflict,
				b.runAs(n, lun1, []byte{opPersistIn, action, 0, 0, 0, 0, 0, 0, 64, 0},
					nil).outcome())
		}
		for action := byte(0); action <= saRegisterIgnore; action++ {
			request, list := persistOut(action, 1, 0, 1)
			require.Equal(t, conflict, b.runAs(n, lun1, request, list).outcome())
		}
	}
	b.d.Detach(b.nexus)
	b.register(second, 1)

	// A RESERVE(6) that comes between the check and the execution of a PERSISTENT RESERVE OUT.
	b = newBench(t)
	request, list := persistOut(saRegister, 0, 0, 1)
	task := b.prepared(b.nexus, request, nil)
	require.Equal(t, "GOOD", b.runAs(b.attach("iqn.b", 0), lun1, cdb(reserve), nil).outcome())
	require.Equal(t, error(errConflict), task.Out(0, list))
}

// TestPersistentAndAccessMode checks that a write-exclusive unit admits one initiator name at a
// time, whatever is registered.
func TestPersistentAndAccessMode(t *testing.T) {
	b := newBench(t, exclusive)
	second, twin := b.attach("iqn.b", 0), b.attach("iqn.a", 1)
	require.Equal(t, "5/26/00", b.persist(b.nexus, saRegister, 0, 0, 1, bitAPTPL|0x80),
		"what is refused claims nothing")
	b.register(second, 2)
	require.Equal(t, conflict, b.persist(b.nexus, saRegister, 0, 0, 1), "to register is to use it")
	require.Equal(t, conflict, b.reads(b.nexus))
	b.d.Detach(second)

	b.register(b.nexus, 1)
	b.register(twin, 3)
	b.mustPersist(b.nexus, saReserve, typeWriteExclusiveRO, 1, 0)
	require.Equal(t, "GOOD", b.writes(twin))
	second = b.attach("iqn.b", 0)
	require.Equal(t, conflict, b.reads(second), "registered, but not the owner")
	require.Equal(t, conflict, b.persist(second, saPreempt, typeWriteExclusive, 2, 1))
	require.Equal(t, "GOOD", b.runAs(second, lun1,
		[]byte{opPersistIn, saReadKeys, 0, 0, 0, 0, 0, 0, 64, 0}, nil).outcome())
	b.d.Detach(b.nexus)
	b.d.Detach(twin)
	require.Equal(t, "GOOD", b.writes(second), "a registrant, and now the owner")
	stranger := b.attach("iqn.c", 0)
	b.d.Detach(second)
	require.Equal(t, conflict, b.writes(stranger), "the reservation outlives the sessions")
}
