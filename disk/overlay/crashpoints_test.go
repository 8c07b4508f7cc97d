//go:build !race

package overlay // One goroutine computes: the race detector has nothing to find.

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/testtool"
)

// TestCrashPoints simulates crashes of the machine that drop and tear unflushed writes. All flushed
// data is there, and every sector holds something that was once in it.
func TestCrashPoints(t *testing.T) {
	const seeds, rounds = 60, 25
	for name, opt := range map[string]Options{
		"copy-on-write": {},
		"copy-on-read":  {CopyReads: true, Unit: 2 * minGranule},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(seeds) {
				require.NoError(t, crashes(t, seed, opt, rounds, func(*simDisk) {}), "seed %d",
					seed)
			}
		})
	}
}

// TestFaultAtEveryCall fails each call to storage in turn. Reads still return the old or the new
// content. When storage works again so does the disk, unless a flush has failed.
func TestFaultAtEveryCall(t *testing.T) {
	for _, cause := range []error{fmt.Errorf("%w: %w", disk.ErrNoSpace, unix.ENOSPC),
		&disk.MediumError{Op: "write", Err: errors.New("input/output error")}} {
		for failing := range 250 {
			d := newSimDisk(t, uint64(failing), Options{CopyReads: failing%2 == 0})
			calls := 0
			d.m.Fail = func() error {
				calls++
				if calls == failing {
					return cause
				}
				return nil
			}
			var err error
			for i := 0; i < 150 && calls < failing; i++ {
				err = d.operate()
			}
			if err == nil { // it was a call of a read, which ignores the error
				require.Equal(t, d.expected, d.killed())
				continue
			}
			require.ErrorIs(t, err, cause)
			failed := errors.Is(err, disk.ErrFailed)
			got := make([]byte, simSize)
			_, readErr := d.over.ReadAt(t.Context(), got, 0)
			require.NoError(t, readErr, "the disk stays readable")
			for sector := range int64(simSize / disk.SectorSize) {
				part := got[sector*disk.SectorSize : (sector+1)*disk.SectorSize]
				if bytes.Equal(part,
					d.expected[sector*disk.SectorSize:(sector+1)*disk.SectorSize]) {
					continue
				}
				require.NotEmpty(t, d.allowed[sector], "sector %d", sector)
				require.Contains(t, d.allowed[sector], part, "sector %d", sector)
			}
			copy(d.expected, got)
			_, err = d.over.WriteAt(t.Context(), make([]byte, disk.SectorSize), 0)
			if failed {
				require.ErrorIs(t, err, disk.ErrFailed)
				require.ErrorIs(t, d.over.Flush(), disk.ErrFailed)
				continue
			}
			require.NoError(t, err)
			clear(d.expected[:disk.SectorSize])
			for range 100 {
				require.NoError(t, d.operate())
			}
			require.Equal(t, d.expected, d.killed())
			require.NoError(t, d.over.Flush())
			clear(d.allowed)
			require.NoError(t, d.recover())
		}
	}
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
