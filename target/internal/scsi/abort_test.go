package scsi

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestAbortStopsLongCommands aborts commands of many disk calls in the midst of one: none follows.
func TestAbortStopsLongCommands(t *testing.T) {
	for _, c := range []struct {
		name, method string
		cdb, data    []byte
	}{
		{"WRITE SAME", "write", cdb("93 00 0000000000000000 00002000 00 00"), pattern(1, 1)},
		{"VERIFY", "read", cdb("8f 00 0000000000000000 00002000 00 00"), nil},
		{"VERIFY of one block repeated", "read", cdb("8f 06 0000000000000010 00002000 00 00"), make([]byte, BlockSize)},
		{"PRE-FETCH", "read", cdb("90 00 0000000000000000 00002000 00 00"), nil},
		{"UNMAP", "discard", unmapCDB(8 + 16*4), unmapList(0, 8, 8, 8, 16, 8, 24, 8)},
		{"EXTENDED COPY", "write", extendedCopy(selfCopy), selfCopy},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			b.write(0, pattern(8, 1))
			b.disk.reset()
			task := &Task{Nexus: b.nexus, LUN: lun1}
			copy(task.CDB[:], c.cdb)
			require.NoError(t, b.d.Prepare(task))
			b.disk.enter = func(method string) {
				if method == c.method && b.disk.count(method) == 1 {
					task.Abort()
				}
			}
			var err error
			if len(c.data) > 0 {
				err = task.Out(0, c.data)
			}
			if err == nil {
				_, err = task.Finish()
			}
			require.ErrorIs(t, err, errAborted)
			require.Equal(t, 2, b.disk.count(c.method))
			task.Reset()
			require.NoError(t, task.wanted())
		})
	}
}

// selfCopy copies over what holes there are.
var selfCopy = copyParameters(1, 0, []string{ownNAA}, block(0, 0, 8, 0, 100), block(0, 0, 8, 0, 200), block(0, 0, 8, 0, 300))

// TestAbortedWriteStaysAway aborts writes before they have a place among the others of their blocks. Newer data may be there
// by the time they come to write, and must stay.
func TestAbortedWriteStaysAway(t *testing.T) {
	both := append(pattern(1, 0), pattern(1, 9)...)
	for _, c := range []struct {
		name      string
		cdb, data []byte
	}{
		{"WRITE", cdb("2a 00 00000000 00 0001 00"), pattern(1, 9)},
		{"WRITE AND VERIFY", cdb("2e 00 00000000 00 0001 00"), pattern(1, 9)},
		{"ORWRITE", cdb("8b 00 0000000000000000 00000001 00 00"), pattern(1, 9)},
		{"WRITE SAME of zeros", cdb("93 00 0000000000000000 00000001 00 00"), make([]byte, BlockSize)},
		{"WRITE SAME that unmaps", cdb("93 08 0000000000000000 00000008 00 00"), make([]byte, BlockSize)},
		{"COMPARE AND WRITE", cdb("89 00 0000000000000000 000000 01 00 00"), both},
		{"WRITE ATOMIC", cdb("9c 00 0000000000000000 0000 0008 00 00"), pattern(8, 9)},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, stored)
			newer := pattern(8, 1)
			copy(newer, pattern(1, 0))
			b.write(0, newer)
			task := &Task{Nexus: b.nexus, LUN: lun1}
			copy(task.CDB[:], c.cdb)
			require.NoError(t, b.d.Prepare(task))
			b.disk.reset()
			task.Abort()
			require.ErrorIs(t, task.Out(0, c.data), errAborted)
			for _, method := range []string{"write", "discard", "zero"} {
				require.Zero(t, b.disk.count(method), method)
			}
		})
	}
}
