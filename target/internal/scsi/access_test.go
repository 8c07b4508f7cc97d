package scsi

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

const (
	readOne  = "28 00 00 00 00 00 00 00 01 00"
	writeOne = "2a 00 00 00 00 00 00 00 01 00"
	conflict = "RESERVATION CONFLICT"
)

func TestWriteExclusive(t *testing.T) {
	b := newBench(t, exclusive)
	second := b.attach("iqn.b", 0)
	require.Equal(t, "GOOD", b.ready(second), "nobody owns it yet")
	require.Equal(t, "GOOD", b.ready(b.nexus))
	require.Equal(t, "GOOD", b.reads(b.nexus),
		"the first that accesses the medium becomes the owner")
	twin := b.attach("iqn.a", 1)
	require.Equal(t, "GOOD", b.writes(twin), "a second session of the owner")

	for _, c := range []struct{ cdb, want string }{
		{testReady, conflict},
		{readOne, conflict},
		{writeOne, conflict},
		{"28 20 00 00 00 00 00 00 01 00", conflict},
		{"15 10 00 00 00 00", conflict},
		{"35 00 00 00 00 00 00 00 00 00", conflict},
		{"9e 12 00 00 00 00 00 00 00 00 00 00 00 18 00 00", conflict},
		{"1a 00 3f 00 ff 00", "GOOD"},
		{"5a 00 08 00 00 00 00 00 ff 00", "GOOD"},
		{"12 00 00 00 24 00", "GOOD"},
		{"a0 00 00 00 00 00 00 00 01 00 00 00", "GOOD"},
		{"03 00 00 00 ff 00", "GOOD"},
		{"25 00 00 00 00 00 00 00 00 00", "GOOD"},
		{"9e 10 00 00 00 00 00 00 00 00 00 00 00 20 00 00", "GOOD"},
		{"a3 0c 00 00 00 00 00 00 01 00 00 00", "GOOD"},
		{"ff 00 00 00 00 00", "5/20/00"},
	} {
		require.Equal(t, c.want, b.runAs(second, lun1, cdb(c.cdb), pattern(1, 1)).outcome(), c.cdb)
	}

	b.d.Detach(b.nexus)
	require.Equal(t, conflict, b.reads(second), "the owner has a nexus left")
	b.d.Detach(twin)
	b.d.Detach(twin)
	require.Equal(t, "GOOD", b.reads(second))
	back := b.attach("iqn.a", 0)
	require.Equal(t, conflict, b.reads(back), "it is the second one's now")
}

func TestRefusedCommandDoesNotClaim(t *testing.T) {
	b := newBench(t, exclusive)
	second := b.attach("iqn.b", 0)
	require.Equal(t, "5/21/00", b.run(cdb("28 00 ff 00 00 00 00 00 01 00"), nil).outcome())
	require.Equal(t, "GOOD", b.reads(second))
}

func TestOwnerReturnsAfterItsSession(t *testing.T) {
	b := newBench(t, exclusive)
	b.good(cdb(writeOne), pattern(1, 1))
	b.d.Detach(b.nexus)
	b.nexus = b.attach("iqn.a", 9)
	b.good(cdb(writeOne), pattern(1, 1))
}

// storing are commands that store something from block 0 on, in one call of the disk; each holds
// its blocks in its way.
var storing = map[string]struct {
	cdb  string
	data []byte
}{
	"WRITE": {writeOne, pattern(1, 1)},
	"COMPARE AND WRITE": {"89 00 00 00 00 00 00 00 00 00 00 00 00 01 00 00",
		append(make([]byte, BlockSize), pattern(1, 1)...)},
	"WRITE ATOMIC": {"9c 00 00 00 00 00 00 00 00 00 00 00 00 08 00 00", pattern(8, 1)},
}

// TestOwnerReturnsWhileAWriteIsStuck lets the owner come back and leave again while a write of its
// first session hangs in the disk. Nobody else gets the unit until that write has ended.
func TestOwnerReturnsWhileAWriteIsStuck(t *testing.T) {
	const elsewhere = "28 00 00 00 10 00 00 00 01 00"
	for name, c := range storing {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, exclusive, stored)
			stuck, release := b.hang("write")
			written := make(chan string)
			go func() { written <- b.run(cdb(c.cdb), c.data).outcome() }()
			<-stuck
			b.d.Detach(b.nexus)
			again := b.attach("iqn.a", 0)
			claimed := b.runAs(again, lun1, cdb(elsewhere), nil).outcome()
			b.d.Detach(again)
			other := b.attach("iqn.b", 0)
			early := b.runAs(other, lun1, cdb(elsewhere), nil).outcome()
			close(release)
			require.Equal(t, "GOOD", <-written)
			require.Equal(t, "GOOD", claimed)
			require.Equal(t, conflict, early)
			require.Equal(t, "GOOD", b.runAs(other, lun1, cdb(elsewhere), nil).outcome())
		})
	}
}

// TestSessionEndsOnce ends a session twice, as its reader and the one that reinstates it may at
// once. The owner's other session goes on.
func TestSessionEndsOnce(t *testing.T) {
	b := newBench(t, exclusive)
	b.good(cdb(writeOne), pattern(1, 1))
	again := b.attach("iqn.a", 1)
	b.d.Detach(again)
	b.d.Detach(again)
	require.Equal(t, conflict, b.reads(b.attach("iqn.b", 0)))
	b.good(cdb(writeOne), pattern(1, 1))
}

func TestEndedSessionDoesNotClaim(t *testing.T) {
	b := newBench(t, exclusive)
	b.d.Detach(b.nexus)
	require.Equal(t, conflict, b.reads(b.nexus))
	require.Equal(t, "GOOD", b.reads(b.attach("iqn.b", 0)))
}

func TestSharedModes(t *testing.T) {
	shared := newBench(t)
	for _, n := range []*Nexus{shared.nexus, shared.attach("iqn.b", 0)} {
		require.Equal(t, "GOOD", shared.writes(n))
	}
	for _, mode := range []func(*LUN){readSharedLUN, readOnly} {
		b := newBench(t, mode)
		for _, n := range []*Nexus{b.nexus, b.attach("iqn.b", 0)} {
			require.Equal(t, "GOOD", b.reads(n))
		}
	}
}

// TestWriteProtection checks every command that writes, and that none reaches the disk.
func TestWriteProtection(t *testing.T) {
	b := newBench(t, readOnly)
	for i := range b.d.nth(0).table().commands {
		c := &b.d.nth(0).table().commands[i]
		request := make([]byte, len(c.usage))
		request[0] = c.opcode
		if c.hasAction {
			request[1] = c.action
		}
		if r := b.run(request, nil); c.flags&writesMedium != 0 {
			require.Equal(t, "7/27/00", r.outcome(), c.name)
		} else {
			require.NotEqual(t, "7/27/00", r.outcome(), c.name)
		}
	}
	for _, method := range []string{"write", "discard", "zero"} {
		require.Zero(t, b.disk.count(method))
	}
}

const (
	reserve = "16 00 00 00 00 00"
	release = "17 00 00 00 00 00"
)

func TestReserve(t *testing.T) {
	b := newBench(t)
	second, twin := b.attach("iqn.b", 0), b.attach("iqn.a", 1)
	b.good(cdb(reserve), nil)
	b.good(cdb(reserve), nil)
	for _, n := range []*Nexus{second, twin} {
		require.Equal(t, conflict, b.runAs(n, lun1, cdb(reserve), nil).outcome())
		require.Equal(t, "GOOD", b.runAs(n, lun1, cdb(release), nil).outcome())
		require.Equal(t, conflict, b.ready(n), "see also TestConflictMatrix")
	}
	b.good(cdb(writeOne), pattern(1, 1))
	b.good(cdb(release), nil)
	require.Equal(t, "GOOD", b.runAs(second, lun1, cdb(reserve), nil).outcome())
	require.Equal(t, conflict, b.reads(b.nexus))
	require.Equal(t, "5/24/00", b.runAs(second, lun1, cdb("16 01 00 00 00 00"), nil).outcome(),
		"an extent")
	require.Equal(t, "5/24/00", b.runAs(second, lun1, cdb("16 10 00 00 00 00"), nil).outcome(),
		"a third party")
}

func TestReservationEnds(t *testing.T) {
	for name, end := range map[string]func(b *bench, holder *Nexus){
		"nexus loss":   func(b *bench, holder *Nexus) { b.d.Detach(holder) },
		"LUN reset":    func(b *bench, _ *Nexus) { b.d.ResetLUN(lun1) },
		"target reset": func(b *bench, _ *Nexus) { b.d.ResetTarget() },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			holder := b.attach("iqn.b", 0)
			require.Equal(t, "GOOD", b.runAs(holder, lun1, cdb(reserve), nil).outcome())
			require.Equal(t, conflict, b.ready(b.nexus))
			end(b, holder)
			b.nexus.nth(0).pending.Store(0)
			require.Equal(t, "GOOD", b.ready(b.nexus))
		})
	}
	b := newBench(t)
	b.d.Detach(b.nexus)
	require.Equal(t, conflict, b.run(cdb(reserve), nil).outcome(),
		"an ended session would hold it for ever")
	require.Equal(t, "GOOD", b.reads(b.attach("iqn.b", 0)))
}

// TestReserveRace lets a second nexus reserve between the check and the execution of the first
// one's command.
func TestReserveRace(t *testing.T) {
	b := newBench(t)
	task := &Task{Nexus: b.nexus, LUN: lun1, CDB: [16]byte{opReserve6}}
	require.NoError(t, b.d.Prepare(task))
	require.Equal(t, "GOOD", b.runAs(b.attach("iqn.b", 0), lun1, cdb(reserve), nil).outcome())
	_, err := task.Finish()
	status, _ := b.d.Outcome(task, err, nil)
	require.Equal(t, StatusReservationConflict, status)
}

func TestSetAccess(t *testing.T) {
	b := newBench(t, exclusive)
	second := b.attach("iqn.b", 0)
	good, conflict := b.writes(b.nexus), b.writes(second)
	require.NotEqual(t, good, conflict)
	require.ErrorContains(t, b.d.disks.SetAccess(2, AccessWriteShared, false), "no LUN 2")

	// A machine that a handover lets in would lose its place, and nobody would know whom to fence.
	require.NoError(t, b.d.disks.Admit(1, "iqn.c", time.Time{}))
	require.ErrorContains(t, b.d.disks.SetAccess(1, AccessWriteShared, false), "handover")
	require.ErrorContains(t, b.d.disks.SetAccess(1, AccessReadShared, false), "handover")
	require.Equal(t, conflict, b.writes(second))
	require.NoError(t, testtool.Err(b.d.disks.Withdraw(1)))

	require.NoError(t, b.d.disks.SetAccess(1, AccessWriteExclusive, true))
	require.Equal(t, "6/2a/01", b.writes(b.nexus))
	require.Equal(t, "7/27/00", b.writes(b.nexus))
	require.Equal(t, "6/2a/01", b.writes(second),
		"everybody is told, whom a conflict keeps out, too")
	require.Equal(t, conflict, b.writes(second))
	require.NoError(t, b.d.disks.SetAccess(1, AccessWriteExclusive, true))
	require.Equal(t, "7/27/00", b.writes(b.nexus), "nothing has changed, and nobody is told")
	require.NoError(t, b.d.disks.SetAccess(1, AccessWriteShared, false))
	for _, n := range []*Nexus{b.nexus, second} {
		require.Equal(t, "6/2a/01", b.writes(n))
		require.Equal(t, good, b.writes(n))
	}
	require.ErrorContains(t, b.d.disks.SetAccess(1, AccessWriteExclusive, false), "restart")
	require.Equal(t, good, b.writes(second))
	require.ErrorContains(t, b.d.disks.Admit(1, "iqn.c", time.Time{}), "every initiator")

	sealed := newBench(t, readSharedLUN)
	require.ErrorContains(t, sealed.d.disks.SetAccess(1, AccessWriteShared, false),
		"opened for reading")
	require.NoError(t, sealed.d.disks.SetAccess(1, AccessWriteShared, true))
}
