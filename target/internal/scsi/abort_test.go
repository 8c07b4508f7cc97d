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
