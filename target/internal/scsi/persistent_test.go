package scsi

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// persistOut is a PERSISTENT RESERVE OUT. more begins with the byte of SPEC_I_PT, ALL_TG_PT and
// APTPL; what follows comes after the basic parameter list.
func persistOut(action byte, kind reservationType, key, actionKey uint64, more ...byte) (request,
	list []byte) {
	list = binary.BigEndian.AppendUint64(nil, key)
	list = binary.BigEndian.AppendUint64(list, actionKey)
	list = append(list, make([]byte, 8)...)
	if len(more) > 0 {
		list[20] = more[0]
		list = append(list, more[1:]...)
	}
	request = []byte{opPersistOut, action, byte(kind), 0, 0, 0, 0, 0, 0, 0}
	binary.BigEndian.PutUint32(request[5:], uint32(len(list)))
	return request, list
}

// persist runs a PERSISTENT RESERVE OUT and returns how it ended.
func (b *bench) persist(n *Nexus, action byte, kind reservationType, key, actionKey uint64,
	more ...byte) string {
	request, list := persistOut(action, kind, key, actionKey, more...)
	return b.runAs(n, lun1, request, list).outcome()
}

// mustPersist is persist, and has to succeed.
func (b *bench) mustPersist(n *Nexus, action byte, kind reservationType, key, actionKey uint64,
	more ...byte) {
	b.t.Helper()
	require.Equal(b.t, "GOOD", b.persist(n, action, kind, key, actionKey, more...))
}

// register registers a nexus that may be registered already.
func (b *bench) register(n *Nexus, key uint64) {
	b.t.Helper()
	b.mustPersist(n, saRegisterIgnore, 0, 0, key)
}

// persistIn runs a PERSISTENT RESERVE IN that has to succeed.
func (b *bench) persistIn(n *Nexus, action byte) []byte {
	b.t.Helper()
	r := b.runAs(n, lun1, []byte{opPersistIn, action, 0, 0, 0, 0, 0, 0xff, 0xff, 0}, nil)
	require.Equal(b.t, "GOOD", r.outcome())
	return r.data
}

// keys is PRGENERATION and the registered keys, as "3: 1 2".
func (b *bench) keys() string {
	b.t.Helper()
	p := b.persistIn(b.nexus, saReadKeys)
	require.EqualValues(b.t, len(p)-8, binary.BigEndian.Uint32(p[4:]))
	s := fmt.Sprintf("%d:", binary.BigEndian.Uint32(p))
	for p = p[8:]; len(p) > 0; p = p[8:] {
		s += fmt.Sprintf(" %x", binary.BigEndian.Uint64(p))
	}
	return s
}

// reservation is the reservation as "key/type", or "none".
func (b *bench) reservation() string {
	b.t.Helper()
	p := b.persistIn(b.nexus, saReadReservation)
	require.EqualValues(b.t, len(p)-8, binary.BigEndian.Uint32(p[4:]))
	if len(p) == 8 {
		return "none"
	}
	require.Len(b.t, p, 24)
	return fmt.Sprintf("%x/%d", binary.BigEndian.Uint64(p[8:]), p[21])
}

// pending takes the unit attentions of a nexus.
func pending(n *Nexus) (codes []string) {
	for sense := n.nth(0).take(); sense != nil; sense = n.nth(0).take() {
		codes = append(codes, fmt.Sprintf("%04x", uint16(sense.code)))
	}
	return codes
}

var allTypes = []reservationType{typeWriteExclusive, typeExclusiveAccess, typeWriteExclusiveRO,
	typeExclusiveAccessRO, typeWriteExclusiveShared, typeExclusiveAccessShared}

// TestRegister is SPC-4 tables 52 and 53: what REGISTER and REGISTER AND IGNORE EXISTING KEY do.
func TestRegister(t *testing.T) {
	const old = 0x11
	for _, c := range []struct {
		name           string
		registered     bool
		action         byte
		key, actionKey uint64
		want, keys     string
	}{
		{"a new one", false, saRegister, 0, 0x22, "GOOD", "1: 22"},
		{"a new one with a key", false, saRegister, 5, 0x22, conflict, "0:"},
		{"nothing to remove", false, saRegister, 0, 0, "GOOD", "0:"},
		{"nothing to remove, with a key", false, saRegister, 5, 0, conflict, "0:"},
		{"another key", true, saRegister, old, 0x22, "GOOD", "2: 22"},
		{"another key by the wrong one", true, saRegister, 5, 0x22, conflict, "1: 11"},
		{"another key by none", true, saRegister, 0, 0x22, conflict, "1: 11"},
		{"the same key", true, saRegister, old, old, "GOOD", "2: 11"},
		{"remove", true, saRegister, old, 0, "GOOD", "2:"},
		{"remove by the wrong key", true, saRegister, 5, 0, conflict, "1: 11"},
		{"ignoring, a new one", false, saRegisterIgnore, 5, 0x22, "GOOD", "1: 22"},
		{"ignoring, nothing to remove", false, saRegisterIgnore, 5, 0, "GOOD", "0:"},
		{"ignoring, another key", true, saRegisterIgnore, 5, 0x22, "GOOD", "2: 22"},
		{"ignoring, remove", true, saRegisterIgnore, 5, 0, "GOOD", "2:"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			if c.registered {
				b.mustPersist(b.nexus, saRegister, 0, 0, old)
			}
			require.Equal(t, c.want, b.persist(b.nexus, c.action, 0, c.key, c.actionKey))
			require.Equal(t, c.keys, b.keys())
		})
	}
}

// TestRegistrationsBelongToPorts checks that a registration belongs to a name and ISID, with or
// without a session.
func TestRegistrationsBelongToPorts(t *testing.T) {
	b := newBench(t)
	twin, second := b.attach("iqn.a", 1), b.attach("iqn.b", 0)
	b.register(b.nexus, 1)
	require.Equal(t, conflict, b.persist(twin, saReserve, typeWriteExclusive, 1, 0),
		"another session of that name")
	b.register(second, 2)
	b.mustPersist(second, saReserve, typeExclusiveAccess, 2, 0)
	require.Equal(t, conflict, b.reads(b.nexus))

	b.d.Detach(second)
	b.d.ResetLUN(lun1)
	b.d.ResetTarget()
	pending(b.nexus)
	require.Equal(t, conflict, b.reads(b.nexus), "it outlives session and resets")
	require.Equal(t, "2: 1 2", b.keys())
	second = b.attach("iqn.b", 0)
	require.Equal(t, "GOOD", b.reads(second), "the port is back")
	require.Equal(t, conflict, b.reads(b.attach("iqn.b", 7)))
	b.mustPersist(second, saRelease, typeExclusiveAccess, 2, 0)
	b.good(cdb(readOne), nil)
}

func TestRegistrationsAreBounded(t *testing.T) {
	b := newBench(t)
	name := strings.Repeat("x", 100)
	for i := range maxRegistrations {
		b.register(b.attach(name, 0), 1)
		n := b.d.Attach(InitiatorPort{Name: name, ISID: [6]byte{1, byte(i), byte(i >> 8)}})
		pending(n)
		want := "GOOD"
		if i == maxRegistrations-1 {
			want = "5/55/04"
		}
		require.Equal(t, want, b.persist(n, saRegister, 0, 0, 7))
		b.d.Detach(n)
	}
	require.Equal(t, 8+8*maxRegistrations, len(b.persistIn(b.nexus, saReadKeys)))
	full := b.persistIn(b.nexus, saReadFullStatus)
	require.Equal(t, 0xffff, len(full), "as much as can be asked for")
	require.EqualValues(t, maxRegistrations*(24+4+120), binary.BigEndian.Uint32(full[4:]),
		"and the length of all")
	b.register(b.attach(name, 0), 0)
	b.register(b.nexus, 7)
}

// TestReserveAndRelease is SPC-4 5.13.9 and 5.13.11.2.
func TestReserveAndRelease(t *testing.T) {
	for _, kind := range allTypes {
		t.Run(fmt.Sprint(kind), func(t *testing.T) {
			b := newBench(t)
			second, third := b.attach("iqn.b", 0), b.attach("iqn.c", 0)
			require.Equal(t, conflict, b.persist(b.nexus, saReserve, kind, 0, 0), "not registered")
			b.register(b.nexus, 1)
			b.register(second, 2)
			require.Equal(t, conflict, b.persist(b.nexus, saReserve, kind, 2, 0),
				"the key of somebody else")
			require.Equal(t, "none", b.reservation())
			b.mustPersist(b.nexus, saRelease, kind, 1, 0)
			b.mustPersist(b.nexus, saReserve, kind, 1, 0)
			want := fmt.Sprintf("1/%d", kind)
			if kind.shared() {
				want = fmt.Sprintf("0/%d", kind)
			}
			require.Equal(t, want, b.reservation())
			b.mustPersist(b.nexus, saReserve, kind, 1, 0)
			for _, other := range allTypes {
				if other != kind {
					require.Equal(t, conflict, b.persist(b.nexus, saReserve, other, 1, 0),
						"the type is never changed")
					require.Equal(t, "5/26/04", b.persist(b.nexus, saRelease, other, 1, 0),
						"the type must be the same")
				}
			}
			if kind.shared() {
				b.mustPersist(second, saReserve, kind, 2, 0)
			} else {
				require.Equal(t, conflict, b.persist(second, saReserve, kind, 2, 0))
				b.mustPersist(second, saRelease, kind, 2, 0)
			}
			require.Equal(t, conflict, b.persist(third, saRelease, kind, 0, 0), "not registered")
			require.Equal(t, conflict, b.persist(b.nexus, saRelease, kind, 9, 0))
			require.Equal(t, "5/26/04", b.persist(b.nexus, saRelease, 0x20|kind, 1, 0),
				"the scope must be the same")
			require.Equal(t, want, b.reservation())
			require.Equal(t, "2: 1 2", b.keys(), "RESERVE and RELEASE do not count")

			b.mustPersist(b.nexus, saRelease, kind, 1, 0)
			require.Equal(t, "none", b.reservation())
			require.Equal(t, "2: 1 2", b.keys())
			require.Empty(t, pending(b.nexus))
			require.Empty(t, pending(third))
			if kind.registrants() {
				require.Equal(t, []string{"2a04"}, pending(second))
			} else {
				require.Empty(t, pending(second))
			}
			require.Equal(t, "GOOD", b.writes(third))
		})
	}
}

// TestUnregister is SPC-4 5.13.11.3: what happens to a reservation whose holder unregisters.
func TestUnregister(t *testing.T) {
	for _, kind := range allTypes {
		t.Run(fmt.Sprint(kind), func(t *testing.T) {
			b := newBench(t)
			second, third := b.attach("iqn.b", 0), b.attach("iqn.c", 0)
			b.register(b.nexus, 1)
			b.register(second, 2)
			b.mustPersist(b.nexus, saReserve, kind, 1, 0)
			b.mustPersist(b.nexus, saRegister, 0, 1, 0)
			require.Equal(t, "3: 2", b.keys())
			if kind.shared() {
				require.Equal(t, fmt.Sprintf("0/%d", kind), b.reservation(),
					"the other one holds it too")
				require.Empty(t, pending(second))
				b.mustPersist(second, saRegister, 0, 2, 0)
			} else if kind.registrants() {
				require.Equal(t, []string{"2a04"}, pending(second))
			}
			require.Equal(t, "none", b.reservation())
			for _, n := range []*Nexus{b.nexus, second, third} {
				require.Empty(t, pending(n))
				require.Equal(t, "GOOD", b.writes(n))
			}
		})
	}
	b := newBench(t)
	second := b.attach("iqn.b", 0)
	b.register(b.nexus, 1)
	b.register(second, 2)
	b.mustPersist(b.nexus, saReserve, typeExclusiveAccess, 1, 0)
	b.mustPersist(second, saRegister, 0, 2, 0)
	require.Equal(t, "1/3", b.reservation(), "somebody who does not hold it")
	b.mustPersist(b.nexus, saRegister, 0, 1, 0x99)
	require.Equal(t, "99/3", b.reservation(), "it has the holder's new key")
}

// TestClear is SPC-4 5.13.11.6.
func TestClear(t *testing.T) {
	b := newBench(t)
	second, third := b.attach("iqn.b", 0), b.attach("iqn.c", 0)
	b.register(b.nexus, 1)
	b.register(second, 2)
	b.mustPersist(second, saReserve, typeExclusiveAccess, 2, 0)
	require.Equal(t, conflict, b.persist(third, saClear, 0, 0, 0))
	require.Equal(t, conflict, b.persist(b.nexus, saClear, 0, 2, 0))
	b.mustPersist(b.nexus, saClear, 0x0f, 1, 0)
	require.Equal(t, "3:", b.keys())
	require.Equal(t, "none", b.reservation())
	require.Empty(t, pending(b.nexus))
	require.Equal(t, []string{"2a03"}, pending(second))
	require.Empty(t, pending(third))
	b.good(cdb(writeOne), pattern(1, 1))
}

// TestPreempt is SPC-4 5.13.11.4. The bench's nexus has key 1, a second and a third one key 2, a
// fourth one key 3; a fifth one is not registered.
func TestPreempt(t *testing.T) {
	const none = typeNone
	for _, c := range []struct {
		name      string
		held      reservationType // by the second nexus
		key       uint64          // to be preempted
		kind      reservationType // asked for
		want      string
		keys      string
		reserved  string
		attention [3]string // of the second, third and fourth nexus
	}{
		{"registrations where nothing is reserved", none, 2, 1, "GOOD", "5: 1 3", "none",
			[3]string{"2a05", "2a05", ""}},
		{"oneself where nothing is reserved", none, 1, 1, "GOOD", "5: 2 2 3", "none", [3]string{}},
		{"a key that nobody has", none, 9, 1, conflict, "4: 1 2 2 3", "none", [3]string{}},
		{"key zero where nothing is reserved", none, 0, 1, "5/26/00", "4: 1 2 2 3", "none",
			[3]string{}},

		{"the holder", 3, 2, 3, "GOOD", "5: 1 3", "1/3", [3]string{"2a05", "2a05", ""}},
		{"the holder, for another type", 3, 2, 5, "GOOD", "5: 1 3", "1/5",
			[3]string{"2a05", "2a05", "2a04"}},
		{"the holder, for a shared type", 5, 2, 8, "GOOD", "5: 1 3", "0/8",
			[3]string{"2a05", "2a05", "2a04"}},
		{"the holder, for no type", 3, 2, 4, "5/24/00", "4: 1 2 2 3", "2/3", [3]string{}},
		{"somebody beside the holder", 3, 3, 0x0f, "GOOD", "5: 1 2 2", "2/3",
			[3]string{"", "", "2a05"}},
		{"oneself beside the holder", 5, 1, 1, "GOOD", "5: 2 2 3", "2/5", [3]string{}},
		{"key zero, and one holds it", 3, 0, 3, "5/26/00", "4: 1 2 2 3", "2/3", [3]string{}},
		{"a key that nobody has, and one holds it", 3, 9, 3, conflict, "4: 1 2 2 3", "2/3",
			[3]string{}},

		{"all of a shared one", 7, 0, 7, "GOOD", "5: 1", "0/7", [3]string{"2a05", "2a05", "2a05"}},
		{"all of a shared one, for another type", 7, 0, 1, "GOOD", "5: 1", "1/1",
			[3]string{"2a05", "2a05", "2a05"}},
		{"some of a shared one", 8, 2, 1, "GOOD", "5: 1 3", "0/8", [3]string{"2a05", "2a05", ""}},
		{"oneself of a shared one", 8, 1, 1, "GOOD", "5: 2 2 3", "0/8", [3]string{}},
		{"a key that nobody has, of a shared one", 8, 9, 1, conflict, "4: 1 2 2 3", "0/8",
			[3]string{}},
	} {
		for _, action := range []byte{saPreempt, saPreemptAndAbort} {
			t.Run(fmt.Sprintf("%s/%d", c.name, action), func(t *testing.T) {
				b := newBench(t)
				others := []*Nexus{b.attach("iqn.b", 0), b.attach("iqn.c", 0), b.attach("iqn.d", 0)}
				stranger := b.attach("iqn.e", 0)
				b.register(b.nexus, 1)
				for i, key := range []uint64{2, 2, 3} {
					b.register(others[i], key)
				}
				if c.held != none {
					b.mustPersist(others[0], saReserve, c.held, 2, 0)
				}
				require.Equal(t, conflict, b.persist(stranger, action, c.kind, 0, c.key),
					"not registered")
				require.Equal(t, conflict, b.persist(b.nexus, action, c.kind, 7, c.key),
					"the wrong key")

				require.Equal(t, c.want, b.persist(b.nexus, action, c.kind, 1, c.key))
				require.Equal(t, c.keys, b.keys())
				require.Equal(t, c.reserved, b.reservation())
				for i, n := range others {
					var want []string
					if c.attention[i] != "" {
						want = []string{c.attention[i]}
					}
					require.Equal(t, want, pending(n), "nexus %d", i+2)
				}
				require.Empty(t, pending(b.nexus))
				require.Empty(t, pending(stranger))
			})
		}
	}
}

// TestPreemptOwnReservation changes the type of one's own reservation in one step.
func TestPreemptOwnReservation(t *testing.T) {
	b := newBench(t)
	second := b.attach("iqn.b", 0)
	b.register(b.nexus, 1)
	b.register(second, 2)
	b.mustPersist(b.nexus, saReserve, typeWriteExclusive, 1, 0)
	b.mustPersist(b.nexus, saPreempt, typeExclusiveAccessRO, 1, 1)
	require.Equal(t, "1/6", b.reservation())
	require.Equal(t, "3: 1 2", b.keys(), "and keeps the registration")
	require.Equal(t, []string{"2a04"}, pending(second))
}

// TestPreemptAndAbortFences checks the order in which a nexus is fenced off: from the moment at
// which its registration is gone no new command is let through, its commands are aborted, and the
// status waits until its writes have left the disk.
func TestPreemptAndAbortFences(t *testing.T) {
	b := newBench(t)
	second := b.attach("iqn.b", 0)
	b.register(b.nexus, 1)
	b.register(second, 2)
	b.mustPersist(second, saReserve, typeWriteExclusiveRO, 2, 0)

	var aborted []*Nexus
	b.d.opt.Abort = func(nexuses []*Nexus, meant func(*Task) bool) {
		assert.True(t, meant(&Task{unit: b.d.nth(0)}))
		assert.False(t, meant(&Task{}), "not of this unit")
		assert.Equal(t, []string{"2a05"}, pending(second))
		assert.Equal(t, conflict, b.runAs(second, lun1, cdb(writeOne), pattern(1, 9)).outcome(),
			"fenced off before anything is aborted")
		aborted = nexuses
	}
	stuck, release := b.hang("write")
	written, done := make(chan string), make(chan string)
	go func() { written <- b.runAs(second, lun1, cdb(writeOne), pattern(1, 5)).outcome() }()
	<-stuck
	go func() { done <- b.persist(b.nexus, saPreemptAndAbort, typeWriteExclusiveRO, 1, 2) }()

	// The PREEMPT AND ABORT has a place behind the write, so that it waits.
	b.waitsForRange(1)
	require.Equal(t, []*Nexus{second}, aborted)
	require.Equal(t, "1/5", b.reservation(), "nobody else waits for the disk")
	select {
	case status := <-done:
		t.Fatalf("it ended with %s while a write of the fenced nexus was under way", status)
	default:
	}
	close(release)
	require.Equal(t, "GOOD", <-done)
	require.Equal(t, "GOOD", <-written)
	require.Zero(t, b.d.nth(0).Ranges.State())
}

// TestPreemptDoesNotAbort checks that only PREEMPT AND ABORT ends commands, and that nexuses
// without a session have none to end.
func TestPreemptDoesNotAbort(t *testing.T) {
	b := newBench(t)
	b.d.opt.Abort = func([]*Nexus, func(*Task) bool) { t.Error("nothing is to be aborted") }
	second := b.attach("iqn.b", 0)
	b.register(b.nexus, 1)
	b.register(second, 2)
	b.mustPersist(b.nexus, saPreempt, 0, 1, 2)
	require.Equal(t, []string{"2a05"}, pending(second))
	b.register(second, 2)
	b.d.Detach(second)
	b.mustPersist(b.nexus, saPreemptAndAbort, 0, 1, 2)
}

func TestTaskFor(t *testing.T) {
	b := newBench(t)
	task := &Task{Nexus: b.nexus, LUN: lun1}
	b.d.Address(task)
	require.True(t, task.For(lun1))
	require.True(t, task.For(0x4001<<48), "flat space addressing")
	require.False(t, task.For(9<<48))
	nowhere := &Task{Nexus: b.nexus, LUN: 9 << 48}
	b.d.Address(nowhere)
	require.True(t, nowhere.For(9<<48), "there is no such LUN, and it is the one that was meant")
	require.False(t, nowhere.For(8<<48))
}
