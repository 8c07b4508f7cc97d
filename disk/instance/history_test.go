package instance

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
)

// requireHistory checks what a disk that holds content says has changed since its snapshots: never
// a block too few. It returns how many bytes are said to have changed since each.
func requireHistory(t *testing.T, h disk.Disk, content []byte, snaps map[string][]byte) (
	changed map[string]int64) {
	t.Helper()
	history := h.(disk.Historian)
	changed = map[string]int64{}
	for _, one := range history.Since() {
		since := one.Name
		before, known := snaps[since]
		require.True(t, known, since)
		for off, size := int64(0), int64(len(content)); off < size; {
			is, n := testtool.Must2(history.Changed(t.Context(), one.ID, off, size-off))(t)
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
		s := testtool.Must(d.inst.OpenSnapshot(name))(d.t)
		changed := requireHistory(d.t, s.Disk, content, d.snaps)
		require.Contains(d.t, s.Disk.(disk.Historian).Since(), s.Snapshot)
		require.Equal(d.t, name, s.Snapshot.Name)
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
		filetest.Write(t, d.inst, p, off)
	}
	take := func(name string) {
		require.NoError(t, TakeSnapshot(t.Context(), name, d.inst))
		d.snaps[name] = bytes.Clone(d.model)
	}
	ids := map[string]string{}
	since := func() (names []string) {
		for _, one := range d.inst.Disk.(disk.Historian).Since() {
			names, ids[one.Name] = append(names, one.Name), one.ID
		}
		return names
	}
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
	since()
	require.NoError(t, d.inst.DeleteSnapshot(t.Context(), "b"))
	delete(d.snaps, "b")
	require.Equal(t, map[string]int64{"a": 8192}, requireHistory(t, d.inst.Disk, d.model, d.snaps))
	_, _, err := d.inst.Disk.(disk.Historian).Changed(t.Context(), ids["b"], 0, 4096)
	require.ErrorIs(t, err, ErrSnapshotMissing)

	require.NoError(t, d.inst.Revert(t.Context(), "a"))
	d.model = slices.Clone(d.snaps["a"])
	require.Equal(t, []string{"a"}, since())
	require.Empty(t, requireHistory(t, d.inst.Disk, d.model, d.snaps))
	_, _, err = d.inst.Disk.(disk.Historian).Changed(t.Context(), ids["c"], 0, 4096)
	require.ErrorContains(t, err, "none any more with this identifier")
	d.compareHistory()

	// A snapshot that is made again under its name is another one, also after a restart.
	old := ids["a"]
	require.NoError(t, d.inst.DeleteSnapshot(t.Context(), "a"))
	write(32 << 10)
	take("a")
	for range 2 {
		since()
		require.NotEqual(t, old, ids["a"])
		_, _, err = d.inst.Disk.(disk.Historian).Changed(t.Context(), old, 0, 4096)
		require.ErrorIs(t, err, ErrSnapshotMissing)
		require.ErrorIs(t, d.inst.Committed(old, "sha256:1/vm.raw"), ErrSnapshotMissing)
		require.Empty(t, d.inst.CommittedBefore(d.inst.Disk))
		require.NoError(t, d.inst.Close())
		d.open()
	}
}

// TestSnapshotsWithoutAnID: a record of an earlier version of this program has no identifiers of
// snapshots. They get one that stays.
func TestSnapshotsWithoutAnID(t *testing.T) {
	opt := Options{PersistentDir: t.TempDir(), Mode: CopyClone}
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Sample(1<<20, 5), 0)
	inst, _ := start(t, path, opt)
	require.NoError(t, TakeSnapshot(t.Context(), "monday", inst))
	require.NoError(t, inst.Close())
	dir := persistentDirOf(opt.PersistentDir)
	r := testtool.Must(dir.loadLayers(testtool.Must(loadState(dir.state()))(t)))(t)
	created := r.Snapshots[0].Created
	r.Snapshots[0].ID = ""
	require.NoError(t, durable.SaveRecord(dir.layers(), r, nil, (*os.File).Sync))
	for range 3 {
		inst, _ = start(t, path, opt)
		require.Equal(t, "monday"+created.UTC().String(), inst.Snapshots()[0].ID)
		require.NoError(t, inst.Committed(inst.Snapshots()[0].ID, "sha256:1/vm.raw"))
		require.NoError(t, inst.Close())
	}
}

// TestSnapshotOfAClosedDisk: reads of a snapshot end with an error when its disk is closed. They do
// not wait for layers that never come.
func TestSnapshotOfAClosedDisk(t *testing.T) {
	for _, mode := range []CopyMode{CopyClone, CopyOnWrite} {
		path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Sample(1<<20, 5), 0)
		inst, _ := start(t, path, Options{PersistentDir: t.TempDir(), Mode: mode})
		filetest.Write(t, inst, make([]byte, 4096), 0)
		require.NoError(t, TakeSnapshot(t.Context(), "s", inst))
		s := testtool.Must(inst.OpenSnapshot("s"))(t)
		require.Equal(t, []string{"s"}, inst.Viewed())
		require.NoError(t, inst.Close())
		p := make([]byte, 4096)
		require.ErrorIs(t, testtool.Err(s.ReadAt(t.Context(), p, 0)), fs.ErrClosed)
		require.ErrorIs(t, testtool.Err(inst.ReadAt(t.Context(), p, 0)), fs.ErrClosed)
		require.NoError(t, s.Close())
		require.Empty(t, inst.Viewed())
	}
}

// TestCommitted: a disk remembers which image has the content of a snapshot, over a restart, for
// what was made from that snapshot, and as long as the snapshot is there.
func TestCommitted(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Sample(1<<20, 5), 0)
	opt := Options{PersistentDir: t.TempDir(), Mode: CopyClone}
	inst, _ := start(t, path, opt)
	for _, name := range []string{"monday", "tuesday", "wednesday"} {
		require.NoError(t, TakeSnapshot(t.Context(), name, inst))
	}
	tuesday := inst.Snapshots()[1].ID
	require.NoError(t, inst.Committed(tuesday, "sha256:1/vm.raw"))
	require.ErrorIs(t, inst.Committed("sunday", "sha256:1/vm.raw"), ErrSnapshotMissing)
	before := func(of string) map[string]string {
		t.Helper()
		s := testtool.Must(inst.OpenSnapshot(of))(t)
		defer s.Close()
		return inst.CommittedBefore(s.Disk)
	}
	want := map[string]string{"sha256:1/vm.raw": tuesday}
	for range 2 {
		require.Empty(t, before("monday"))
		require.Equal(t, want, before("tuesday"))
		require.Equal(t, want, before("wednesday"))
		require.Equal(t, want, inst.CommittedBefore(inst.Disk))
		require.NoError(t, inst.Close())
		inst, _ = start(t, path, opt)
	}
	require.NoError(t, inst.DeleteSnapshot(t.Context(), "tuesday"))
	require.Empty(t, inst.CommittedBefore(inst.Disk))
}
