package volumes

import (
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
)

// TestVolumeClones: a volume that begins with a snapshot of another one is there at once, and has
// what the snapshot has, whatever happens to the other one. What it needs cannot be deleted.
func TestVolumeClones(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-io", rig.QEMUISCSI)
	v := startVolumes(t, map[string]string{"LOG_LEVEL": "debug"})
	at := func(name string) string {
		a := v.json(http.StatusOK, http.MethodGet, "/volume/"+name, "")
		require.NotNil(t, a.ISCSI, "%s: %+v", name, a.Info)
		return volumeURL(a)
	}
	first := volumeURL(v.put("vm1", "size: 16Mi\n"))
	atDisk(t, first, "write -P 1 0 8M", "flush")
	require.Equal(t, http.StatusCreated, v.answers(http.MethodPut, "/volume/vm1/snapshots/base"))
	atDisk(t, first, "write -P 9 0 1M", "flush")

	const onWrite = "from: {snapshot: vm1@base}\ncopy: {mode: copy-on-write}\n"
	second := volumeURL(v.put("vm2", onWrite+"size: 32Mi\n"))
	atDisk(t, second, "read -P 1 0 8M", "read -P 0 8M 24M", "write -P 2 1M 64k")
	require.Equal(t, http.StatusCreated, v.answers(http.MethodPut, "/volume/vm2/snapshots/own"))
	atDisk(t, second, "write -P 3 1M 64k", "flush")
	third := volumeURL(v.put("a-clone-of-a-clone",
		"from: {snapshot: vm2@own}\ncopy: {mode: copy-on-write}\n"))
	atDisk(t, third, "read -P 1 0 1M", "read -P 2 1M 64k", "write -P 4 2M 64k", "flush")
	atDisk(t, first, "read -P 9 0 1M", "read -P 1 1M 7M")
	v.json(http.StatusOK, http.MethodPut, "/volume/vm2", onWrite) // the same request again
	e := v.refusal(http.StatusConflict, http.MethodPut, "/volume/vm2", "from: {snapshot: vm1@b}")
	require.Contains(t, e.Message, `the snapshot "vm1@base"`)

	check := func() {
		t.Helper()
		for name, by := range map[string]string{"vm1": "vm2", "vm2": "a-clone-of-a-clone"} {
			for _, query := range []string{"", "?force=true"} {
				e := v.refusal(http.StatusConflict, http.MethodDelete, "/volume/"+name+query, "")
				require.Contains(t, e.Message, by)
			}
		}
		require.Contains(t, v.refusal(http.StatusConflict, http.MethodDelete,
			"/volume/vm1/snapshots/base", "").Message, "needed by what was cloned from it, vm2")
		atDisk(t, at("vm2"), "read -P 1 0 1M", "read -P 3 1M 64k")
		atDisk(t, at("a-clone-of-a-clone"), "read -P 2 1M 64k", "read -P 4 2M 64k")
	}
	check()
	v.Stop()
	v.restart(t)
	check()
	v.Crash()
	v.restart(t)
	check()

	// Without what it was cloned from, a clone waits for it, and nobody may delete the rest.
	v.Stop()
	volumes := filepath.Join(v.home, "work", ".volumes")
	disk := filepath.Join(volumes, "vm2", "disk.img")
	require.NoError(t, os.Rename(disk, disk+".away"))
	v.restart(t)
	for _, name := range []string{"vm2", "a-clone-of-a-clone"} {
		a := v.json(http.StatusOK, http.MethodGet, "/volume/"+name, "")
		require.Equal(t, api.StateFailed, a.Info.State, name)
	}
	require.Contains(t, v.refusal(http.StatusConflict, http.MethodDelete,
		"/volume/vm1/snapshots/base", "").Message, "vm2")
	require.Contains(t, v.refusal(http.StatusConflict, http.MethodDelete,
		"/volume/vm2", "").Message, "a-clone-of-a-clone")
	require.NoError(t, os.Rename(disk+".away", disk))
	testtool.Within(t, rig.Timeout, func() bool {
		return v.json(http.StatusOK, http.MethodGet, "/volume/a-clone-of-a-clone", "").Info.State ==
			api.StateReady
	}, "the clone is back")
	check()

	// In mode clone it needs nobody any more when it has copied everything.
	require.Equal(t, http.StatusCreated,
		v.answers(http.MethodPut, "/volume/a-clone-of-a-clone/snapshots/last"))
	v.put("copied", "from: {snapshot: a-clone-of-a-clone@last}\n")
	for _, name := range []string{"a-clone-of-a-clone", "vm2", "vm1"} {
		testtool.Within(t, rig.Timeout, func() bool {
			return v.answers(http.MethodDelete, "/volume/"+name) == http.StatusNoContent
		}, "%s is deleted", name)
	}
	atDisk(t, at("copied"), "read -P 1 0 1M", "read -P 2 1M 64k", "read -P 4 2M 64k")
}

// TestVolumeClonesThatAreRefused: a clone needs a snapshot that is kept.
func TestVolumeClonesThatAreRefused(t *testing.T) {
	t.Parallel()
	v := startVolumes(t, nil)
	v.put("vm1", "size: 16Mi\n")
	for from, want := range map[string]string{
		"vm1@none": "none", "vm2@base": `the disk "vm2" is not here`, "vm1": "say DISK@NAME",
		"@base": "say DISK@NAME", "vm1@": "say DISK@NAME", "vm3@base": "not here",
	} {
		e := v.refusal(http.StatusBadRequest, http.MethodPut, "/volume/vm3",
			"from: {snapshot: '"+from+"'}")
		require.Contains(t, e.Message, want, from)
		require.Equal(t, http.StatusNotFound, v.answers(http.MethodGet, "/volume/vm3"))
	}
}

// TestVolumeBlockSizes: a clone has the logical blocks of its disk, whatever a guest has written,
// and the API tells them. Data that was made for others is refused, asked for or not.
func TestVolumeBlockSizes(t *testing.T) {
	t.Parallel()
	v := startVolumes(t, nil)
	v.put("vm1", "size: 16Mi\nblock-size: 4096\n")
	require.Equal(t, http.StatusCreated, v.answers(http.MethodPut, "/volume/vm1/snapshots/s"))
	const from = "from: {snapshot: vm1@s}\n"
	require.Equal(t, 4096, v.put("vm2", from).Info.BlockSize)
	v.json(http.StatusOK, http.MethodPut, "/volume/vm2", from)
	v.json(http.StatusOK, http.MethodPut, "/volume/vm2", from+"block-size: 4096\n")
	e := v.refusal(http.StatusConflict, http.MethodPut, "/volume/vm2", from+"block-size: 512\n")
	require.Contains(t, e.Message, "4096")
	e = v.refusal(http.StatusBadRequest, http.MethodPut, "/volume/vm3", from+"block-size: 512\n")
	require.Contains(t, e.Message, "has blocks of 4096 bytes")
	require.Equal(t, http.StatusNotFound, v.answers(http.MethodGet, "/volume/vm3"))
	require.Equal(t, 512, v.put("vm3", "size: 16Mi\n").Info.BlockSize)
}
