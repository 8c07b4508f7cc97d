package instance

import (
	"bytes"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
)

// requireHistory checks what a disk that holds content says has changed since its snapshots: never
// a block too few. It returns how many bytes are said to have changed since each.
func requireHistory(t *testing.T, h disk.Disk, content []byte, snaps map[string][]byte) (
	changed map[string]int64) {
	t.Helper()
	history := h.(disk.Historian)
	changed = map[string]int64{}
	for _, since := range history.Since() {
		before, known := snaps[since]
		require.True(t, known, since)
		for off, size := int64(0), int64(len(content)); off < size; {
			is, n, err := history.Changed(since, off, size-off)
			require.NoError(t, err)
			require.Positive(t, n)
			require.LessOrEqual(t, off+n, size)
			if is {
				changed[since] += n
			} else {
				require.LessOrEqual(t, off+n, int64(len(before)))
				require.True(t, bytes.Equal(before[off:off+n], content[off:off+n]),
					"%d bytes at %d since %s", n, off, since)
			}
			off += n
		}
	}
	return changed
}

// compareHistory is requireHistory for the disk and its snapshots.
func (d *snapshotDisk) compareHistory() {
	d.t.Helper()
	requireHistory(d.t, d.inst.Disk, d.model, d.snaps)
	for name, content := range d.snaps {
		s, err := d.inst.OpenSnapshot(name)
		require.NoError(d.t, err)
		changed := requireHistory(d.t, s.Disk, content, d.snaps)
		require.Contains(d.t, s.Disk.(disk.Historian).Since(), name)
		require.Zero(d.t, changed[name], "since itself")
		require.NoError(d.t, s.Close())
	}
}

// TestHistory: what changed since a snapshot is what was written since, also over restarts and when
// other snapshots go. A snapshot that the disk does not come from is none to compare with.
func TestHistory(t *testing.T) {
	content := filetest.Sample(1<<20, 5)
	d := &snapshotDisk{t: t, path: filetest.Put(t, t.TempDir(), "disk.raw", content, 0),
		opt:   killOptions(filepath.Join(t.TempDir(), "persistent"), string(CopyOnWrite)),
		model: bytes.Clone(content), snaps: map[string][]byte{}}
	d.open()
	write := func(off int64) {
		p := bytes.Repeat([]byte{byte(off >> 12)}, 4096)
		copy(d.model[off:], p)
		_, err := d.inst.WriteAt(p, off)
		require.NoError(t, err)
	}
	take := func(name string) {
		require.NoError(t, TakeSnapshot(t.Context(), name, d.inst))
		d.snaps[name] = bytes.Clone(d.model)
	}
	since := func() []string { return d.inst.Disk.(disk.Historian).Since() }
	require.Empty(t, since())
	write(0)
	take("a")
	write(8192)
	take("b")
	write(8192)
	write(64 << 10)
	require.Equal(t, []string{"a", "b"}, since())
	for range 2 {
		require.Equal(t, map[string]int64{"a": 8192, "b": 8192},
			requireHistory(t, d.inst.Disk, d.model, d.snaps))
		require.NoError(t, d.inst.Close())
		d.open()
	}
	take("c")
	require.NoError(t, d.inst.DeleteSnapshot(t.Context(), "b"))
	delete(d.snaps, "b")
	require.Equal(t, map[string]int64{"a": 8192}, requireHistory(t, d.inst.Disk, d.model, d.snaps))
	_, _, err := d.inst.Disk.(disk.Historian).Changed("b", 0, 4096)
	require.ErrorIs(t, err, ErrSnapshotMissing)

	require.NoError(t, d.inst.Revert(t.Context(), "a"))
	d.model = slices.Clone(d.snaps["a"])
	require.Equal(t, []string{"a"}, since())
	require.Empty(t, requireHistory(t, d.inst.Disk, d.model, d.snaps))
	_, _, err = d.inst.Disk.(disk.Historian).Changed("c", 0, 4096)
	require.ErrorContains(t, err, "none that this content was made from")
	d.compareHistory()
}
