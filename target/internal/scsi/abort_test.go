package scsi

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/serving"
)

// TestAbortStopsLongCommands aborts commands during one of their many disk calls. No further call
// follows.
func TestAbortStopsLongCommands(t *testing.T) {
	for _, c := range []struct {
		name, method string
		cdb, data    []byte
	}{
		{"WRITE SAME", "write", cdb("93 00 0000000000000000 00002000 00 00"), pattern(1, 1)},
		{"VERIFY", "read", cdb("8f 00 0000000000000000 00002000 00 00"), nil},
		{"VERIFY of one block repeated", "read", cdb("8f 06 0000000000000010 00002000 00 00"),
			make([]byte, BlockSize)},
		{"PRE-FETCH", "read", cdb("90 00 0000000000000000 00002000 00 00"), nil},
		{"UNMAP", "discard", unmapCDB(8 + 16*4), unmapList(0, 8, 8, 8, 16, 8, 24, 8)},
		{"EXTENDED COPY", "write", extendedCopy(selfCopy), selfCopy},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			b.write(0, pattern(8, 1))
			b.disk.reset()
			task := b.prepared(b.nexus, c.cdb, c.data)
			b.disk.enter = func(method string) {
				if method == c.method && b.disk.count(method) == 1 {
					task.Abort()
				}
			}
			require.Contains(t, []error{serving.ErrAborted, errAborted}, carryOut(task, c.data))
			require.Equal(t, 2, b.disk.count(c.method))
			task.Reset()
			require.False(t, task.Aborted())
		})
	}
}

// carryOut gives a prepared command its data, if any, and ends it.
func carryOut(t *Task, data []byte) error {
	if len(data) > 0 {
		if err := t.Out(0, data); err != nil {
			return err
		}
	}
	_, err := t.Finish()
	return err
}

// TestAbortedWriteComesToNothing aborts commands just before they change the medium. Another
// initiator may know that they have ended, and may have written the same blocks since. It sees
// nothing of them, and gets answers to its own commands only.
func TestAbortedWriteComesToNothing(t *testing.T) {
	fresh := pattern(8, 2)
	twice := func(p []byte) []byte { return append(append([]byte(nil), p...), pattern(8, 1)...) }
	for _, c := range []struct {
		name      string
		cdb, data []byte
	}{
		{"WRITE(10)", cdb("2a 00 00000000 00 0008 00"), pattern(8, 1)},
		{"WRITE(10) that is cut short", cdb("2a 00 00000000 00 0008 00"), pattern(8, 1)[:200]},
		{"WRITE AND VERIFY(10)", cdb("2e 02 00000000 00 0008 00"), pattern(8, 1)},
		{"COMPARE AND WRITE", cdb("89 00 0000000000000000 000000 08 00 00"), twice(fresh)},
		{"WRITE ATOMIC(16)", cdb("9c 00 0000000000000000 0000 0008 00 00"), pattern(8, 1)},
		{"WRITE SAME(16)", cdb("93 00 0000000000000000 00000008 00 00"), pattern(1, 1)},
		{"WRITE SAME(16) of zeros", cdb("93 00 0000000000000000 00000008 00 00"),
			make([]byte, BlockSize)},
		{"WRITE SAME(16) that unmaps", cdb("93 08 0000000000000000 00000008 00 00"),
			make([]byte, BlockSize)},
		{"WRITE SAME(16) without data", cdb("93 09 0000000000000000 00000008 00 00"), nil},
		{"UNMAP", unmapCDB(8 + 16), unmapList(0, 8)},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, stored)
			b.write(0, fresh)
			task := b.prepared(b.nexus, c.cdb, c.data)
			b.disk.reset()
			task.Abort()
			require.ErrorIs(t, carryOut(task, c.data), serving.ErrAborted)
			for _, method := range []string{"write", "discard", "zero"} {
				require.Zero(t, b.disk.count(method), method)
			}
			require.Zero(t, b.d.nth(0).Ranges.State())
			require.Equal(t, fresh, b.good(cdb("28 00 00000000 00 0008 00"), nil))
		})
	}
}

// TestAbortedReservationComesToNothing aborts a REGISTER that waits for another one, which a slow
// store holds up. The initiator was told that it has ended, so its later registrations must count.
func TestAbortedReservationComesToNothing(t *testing.T) {
	b := newBench(t)
	task := b.prepared(b.nexus,
		[]byte{opPersistOut, saRegister, 0, 0, 0, 0, 0, 0, persistListLen}, nil)
	task.Abort()
	list := make([]byte, persistListLen)
	list[15] = 7
	require.ErrorIs(t, task.Out(0, list), serving.ErrAborted)
	require.Equal(t, "0:", strings.TrimSpace(b.keys()))
}

// selfCopy copies over any holes.
var selfCopy = copyParameters(1, 0, []string{ownNAA}, block(0, 0, 8, 0, 100),
	block(0, 0, 8, 0, 200), block(0, 0, 8, 0, 300))

// TestAbortedStateChangesComeToNothing aborts commands that wait for another one or for storage. A
// LOGICAL UNIT RESET aborts them and is answered before they go on. If they still took effect, they
// would undo the reset and nobody would know.
func TestAbortedStateChangesComeToNothing(t *testing.T) {
	for _, c := range []struct {
		name, cdb string
		check     func(t *testing.T, b *bench)
	}{
		{"RESERVE(6)", reserve,
			func(t *testing.T, b *bench) { require.Nil(t, b.d.nth(0).reserved.Load()) }},
		{"RELEASE(6)", release,
			func(t *testing.T, b *bench) { require.Equal(t, b.nexus, b.d.nth(0).reserved.Load()) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			if c.cdb == release {
				b.good(cdb(reserve), nil)
			}
			task := b.prepared(b.nexus, cdb(c.cdb), nil)
			task.Abort()
			if c.cdb != release {
				b.d.ResetLUN(lun1)
			}
			require.ErrorIs(t, carryOut(task, nil), serving.ErrAborted)
			c.check(t, b)
		})
	}
}

const testReady = "00 00 00 00 00 00"

func TestNewNexusHasAttention(t *testing.T) {
	b := newBench(t)
	port := InitiatorPort{Name: "iqn.c", ISID: [6]byte{1}}
	n := b.d.Attach(port)
	require.Equal(t, "6/29/00", b.ready(n))
	require.Equal(t, "GOOD", b.ready(n), "it is reported once")
	b.d.Detach(n)

	again := b.d.Attach(port)
	require.Equal(t, "6/29/07", b.ready(again), "the port was here before")
	other := b.d.Attach(InitiatorPort{Name: "iqn.c", ISID: [6]byte{2}})
	require.Equal(t, "6/29/00", b.ready(other))
}

// TestAttentionAndCommands checks which commands report a unit attention, and which leave it
// pending (SAM-5 5.14.1).
func TestAttentionAndCommands(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct {
		name, cdb, want string
		stays           bool
	}{
		{"INQUIRY", "12 00 00 00 24 00", "GOOD", true},
		{"REPORT LUNS", "a0 00 00 00 00 00 00 00 01 00 00 00", "GOOD", true},
		{"REQUEST SENSE", "03 00 00 00 ff 00", "GOOD", false},
		{"TEST UNIT READY", testReady, "6/29/03", false},
		{"READ", "28 00 00 00 00 00 00 00 01 00", "6/29/03", false},
		{"an invalid CDB", "28 20 00 00 00 00 00 00 01 00", "6/29/03", false},
		{"an unknown operation code", "ff 00 00 00 00 00", "6/29/03", false},
		{"REPORT SUPPORTED OPERATION CODES", "a3 0c 00 00 00 00 00 00 01 00 00 00", "6/29/03",
			false},
	} {
		t.Run(c.name, func(t *testing.T) {
			b.nexus.nth(0).pending.Store(0)
			b.d.ResetLUN(lun1)
			r := b.run(cdb(c.cdb), nil)
			require.Equal(t, c.want, r.outcome())
			if c.name == "REQUEST SENSE" {
				requireHex(t, "70 00 06 00000000 0a 00000000 2903 00 000000", r.data)
			}
			require.Equal(t, c.stays, b.nexus.nth(0).pending.Load() != 0)
		})
	}
}

func TestAttentionsAreReportedInOrder(t *testing.T) {
	b := newBench(t)
	a := b.nexus.nth(0)
	a.raise(attnLUNsChanged | attnClearedByOther | attnNexusLoss)
	a.raise(attnModeChanged | attnCapacityChanged | attnReset | attnPowerOn)
	for _, want := range []string{"6/29/00", "6/29/03", "6/29/07", "6/2a/09", "6/2a/01", "6/2f/00",
		"6/3f/0e", "GOOD"} {
		require.Equal(t, want, b.ready(b.nexus))
	}
}

func TestReportLUNsDeliversTheNews(t *testing.T) {
	b := newBench(t)
	b.nexus.nth(0).raise(attnLUNsChanged | attnModeChanged)
	b.good(cdb("a0 00 00 00 00 00 00 00 01 00 00 00"), nil)
	require.Equal(t, "6/2a/01", b.ready(b.nexus))
	require.Equal(t, "GOOD", b.ready(b.nexus))
}

func TestResetsReachEveryNexus(t *testing.T) {
	b := newBench(t)
	other := b.attach("iqn.b", 0)
	for _, reset := range []func(){
		func() { b.d.ResetLUN(lun1) },
		func() { b.d.ResetTarget() },
	} {
		reset()
		for _, n := range []*Nexus{b.nexus, other} {
			require.Equal(t, "6/29/03", b.ready(n))
			require.Equal(t, "GOOD", b.ready(n))
		}
	}
	b.d.ResetLUN(9 << 48)
	require.Equal(t, "GOOD", b.ready(b.nexus))
}

func TestTasksCleared(t *testing.T) {
	b := newBench(t)
	hit, spared := b.attach("iqn.b", 0), b.attach("iqn.c", 0)
	b.d.TasksCleared(lun1, b.nexus, []*Nexus{b.nexus, hit})
	b.d.TasksCleared(9<<48, b.nexus, []*Nexus{spared})
	require.Equal(t, "GOOD", b.ready(b.nexus))
	require.Equal(t, "6/2f/00", b.ready(hit))
	require.Equal(t, "GOOD", b.ready(spared))
}

func TestRequestSense(t *testing.T) {
	b := newBench(t)
	requireHex(t, "70 00 00 00000000 0a 00000000 0000 00 000000",
		b.good(cdb("03 00 00 00 ff 00"), nil))
	requireHex(t, "72 00 00 00 00000000", b.good(cdb("03 01 00 00 ff 00"), nil))
	requireHex(t, "70 00 00 00", b.good(cdb("03 00 00 00 04 00"), nil))
	require.Equal(t, "5/24/00", b.run(cdb("03 02 00 00 ff 00"), nil).outcome())
	requireHex(t, "72 05 25 00 00000000",
		b.runAs(b.nexus, 9<<48, cdb("03 01 00 00 ff 00"), nil).data)
}

func TestKnownPortsAreBounded(t *testing.T) {
	b := newBench(t)
	for i := range maxKnownPorts + 10 {
		b.d.Detach(b.d.Attach(InitiatorPort{Name: "iqn.x", ISID: [6]byte{byte(i), byte(i >> 8)}}))
	}
	require.Len(t, b.d.known, maxKnownPorts)
}

func TestPendingAttention(t *testing.T) {
	b := newBench(t)
	for _, lun := range []uint64{lun1, 0, 9 << 48} {
		info, pending := b.d.PendingAttention(lun, b.nexus)
		require.False(t, pending)
		require.Zero(t, info)
	}
	b.nexus.nth(0).raise(attnNexusLoss)
	info, pending := b.d.PendingAttention(lun1, b.nexus)
	require.True(t, pending)
	require.Equal(t, [3]byte{0x16, 0x29, 0x07}, info, "one, UNIT ATTENTION")
	b.nexus.nth(0).raise(attnPowerOn)
	info, _ = b.d.PendingAttention(lun1, b.nexus)
	require.Equal(t, [3]byte{0x26, 0x29, 0x00}, info, "several, the one of highest precedence")
	require.Equal(t, "6/29/00", b.ready(b.nexus), "they are still pending")
	require.Equal(t, "6/29/07", b.ready(b.nexus))
	_, pending = b.d.PendingAttention(lun1, b.nexus)
	require.False(t, pending)
}
