package instance

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
)

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
		s, err := inst.OpenSnapshot(of)
		require.NoError(t, err)
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
