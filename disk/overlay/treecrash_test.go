package overlay

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
)

// treeCrashes lets a disk with snapshots crash, or its process be killed, so many times.
func treeCrashes(t *testing.T, seed uint64, opt Options, whole bool, rounds int,
	prepare func(*simTree),
) error {
	d := newSimTree(t, seed, opt, whole)
	for round := range rounds {
		prepare(d)
		d.m.CrashIn = 1 + d.m.Random.IntN(120)
		var err error
		for err == nil {
			err = d.operate()
		}
		if !errors.Is(err, filetest.ErrCrashed) {
			return fmt.Errorf("round %d: an operation failed without a crash: %w", round, err)
		}
		if err := d.restart(d.m.Random.IntN(3) == 0); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
	}
	// Without snapshots it ends as if it never had one.
	for name := range d.snaps {
		require.NoError(t, d.tree.Delete(name))
	}
	d.mergeAll()
	require.Equal(t, d.tree.bottom, d.tree.top)
	require.Empty(t, d.files)
	for _, name := range []string{"record", "mark"} {
		kept, err := d.store.Load(name)
		require.NoError(t, err)
		require.Nil(t, kept, name)
	}
	clear(d.snaps)
	return d.look(0, int64(len(d.expected)))
}

// treeModes are the disks that snapshots are taken of.
var treeModes = map[string]struct {
	opt   Options
	whole bool
}{
	"copy-on-write": {},
	"copy-on-read":  {opt: Options{CopyReads: true, Unit: 2 * minGranule}},
	"complete":      {whole: true},
}

// TestPushAfterAPowerCut: a push that a power cut has ended may have left in the layer below what
// the layer above has lost. It does not come back, also behind the end that the disk had when the
// layer above was made, where that is in the midst of a block.
func TestPushAfterAPowerCut(t *testing.T) {
	const more = 4 * disk.SectorSize
	for name, mode := range treeModes {
		t.Run(name, func(t *testing.T) {
			d := newSimTree(t, 1, mode.opt, mode.whole)
			last := make([]byte, disk.SectorSize)
			filetest.Write(t, d.disk, last, simSize-disk.SectorSize)
			copy(d.expected[simSize-disk.SectorSize:], last)
			require.NoError(t, TakeSnapshot(t.Context(), "a", d.tree))
			require.NoError(t, d.tree.Grow(simSize+more))
			d.expected = append(d.expected, make([]byte, more)...)
			require.NoError(t, d.tree.Delete("a"))
			require.NoError(t, d.file.Grow(simSize+more))
			filetest.Write(t, d.file, bytes.Repeat([]byte{1}, more), simSize)
			require.NoError(t, d.look(0, simSize+more))
			d.mergeAll()
			require.NoError(t, d.look(0, simSize+more))
		})
	}
}

// TestSnapshotCrashPointsFindLostData checks that the simulation works: storage that ignores
// flushes loses data.
func TestSnapshotCrashPointsFindLostData(t *testing.T) {
	for name, lie := range map[string]func(*simTree){
		"the bottom":       func(d *simTree) { d.file.Lies = true },
		"the layers above": func(d *simTree) { d.lost = true },
	} {
		t.Run(name, func(t *testing.T) {
			found := false
			for seed := uint64(0); seed < 40 && !found; seed++ {
				found = treeCrashes(t, seed, Options{}, false, 25, lie) != nil
			}
			require.True(t, found)
		})
	}
}
