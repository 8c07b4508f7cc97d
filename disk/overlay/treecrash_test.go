package overlay

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
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

// TestSnapshotCrashPoints simulates crashes of the machine and kills at every call to storage while
// snapshots are taken, committed, deleted, merged and reverted to. Whatever happens, each snapshot
// has its content byte by byte, and the note of its image, and the disk what TestCrashPoints says.
// What has changed since an image is never said to be too little.
func TestSnapshotCrashPoints(t *testing.T) {
	for name, mode := range treeModes {
		t.Run(name, func(t *testing.T) {
			const rounds = 25
			seeds := testtool.Rounds(8, 1000)
			for seed := range uint64(seeds) {
				require.NoError(t, treeCrashes(t, seed, mode.opt, mode.whole, rounds,
					func(*simTree) {}), "seed %d", seed)
			}
			t.Logf("%d crashes and kills", seeds*rounds)
		})
	}
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
			_, err := d.disk.WriteAt(last, simSize-disk.SectorSize)
			require.NoError(t, err)
			copy(d.expected[simSize-disk.SectorSize:], last)
			require.NoError(t, TakeSnapshot(t.Context(), "a", d.tree))
			require.NoError(t, d.tree.Grow(simSize+more))
			d.expected = append(d.expected, make([]byte, more)...)
			require.NoError(t, d.tree.Delete("a"))
			require.NoError(t, d.file.Grow(simSize+more))
			_, err = d.file.WriteAt(bytes.Repeat([]byte{1}, more), simSize)
			require.NoError(t, err)
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

// TestSnapshotFaultAtEveryCall fails each call to storage in turn for lack of space. What was asked
// for then has not happened, and everything works as before.
func TestSnapshotFaultAtEveryCall(t *testing.T) {
	cause := fmt.Errorf("%w: %w", disk.ErrNoSpace, unix.ENOSPC)
	for _, mode := range treeModes {
		for failing := range testtool.Rounds(60, 400) {
			d := newSimTree(t, uint64(failing), mode.opt, mode.whole)
			calls := 0
			d.m.Fail = func() error {
				if calls++; calls == 2*failing {
					return cause
				}
				return nil
			}
			for calls < 2*failing+60 {
				err := d.operate()
				if err == nil {
					continue
				}
				require.ErrorIs(t, err, cause)
				if errors.Is(err, disk.ErrFailed) {
					break // a flush has failed, and a new start is needed
				}
				allowed := d.allowed
				require.NoError(t, d.compare(d.current))
				d.allowed, d.maybe = allowed, ""
			}
			d.m.Fail = nil
			require.NoError(t, d.restart(failing%2 == 0))
		}
	}
}
