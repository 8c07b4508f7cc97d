package scsi

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

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
