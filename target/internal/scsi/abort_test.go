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
