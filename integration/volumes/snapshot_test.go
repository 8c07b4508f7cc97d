package volumes

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
)

// TestVolumeSnapshots keeps what a volume holds, by HTTP, and goes back to it.
func TestVolumeSnapshots(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-io", rig.QEMUISCSI)
	v := startVolumes(t, nil)
	url := volumeURL(v.put("vm1", "size: 16Mi\n"))
	const path = "/volume/vm1/snapshots"
	list := func() (names []string) {
		t.Helper()
		status, body := v.ask(http.MethodGet, path, "", "Accept", "application/json")
		require.Equal(t, http.StatusOK, status, body)
		var all api.Snapshots
		require.NoError(t, json.Unmarshal([]byte(body), &all))
		for _, s := range all.Snapshots {
			require.Equal(t, api.Size(16<<20), s.Size)
			names = append(names, s.Name)
		}
		return names
	}
	require.Empty(t, list())
	atDisk(t, url, "write -P 1 0 1M")
	for _, want := range []int{http.StatusCreated, http.StatusOK} {
		require.Equal(t, want, v.answers(http.MethodPut, path+"/first"))
	}
	atDisk(t, url, "write -P 2 0 64k")
	require.Equal(t, http.StatusCreated, v.answers(http.MethodPut, path+"/second"))
	require.Equal(t, []string{"first", "second"}, list())
	for method, at := range map[string]string{http.MethodGet: "/third",
		http.MethodPost: "/third/revert"} {
		require.Equal(t, http.StatusNotFound, v.answers(method, path+at))
	}
	require.Equal(t, http.StatusBadRequest, v.answers(http.MethodPut, path+"/no@name"))

	v.Crash()
	v.restart(t)
	url = volumeURL(v.json(http.StatusOK, http.MethodGet, "/volume/vm1", ""))
	atDisk(t, url, "read -P 2 0 64k", "read -P 1 64k 960k")
	require.Equal(t, http.StatusOK, v.answers(http.MethodPost, path+"/first/revert"))
	atDisk(t, url, "read -P 1 0 1M", "write -P 3 0 64k")
	require.Equal(t, http.StatusNoContent, v.answers(http.MethodDelete, path+"/first"))
	require.Equal(t, http.StatusNoContent, v.answers(http.MethodDelete, path+"/first"))
	require.Equal(t, []string{"second"}, list())
	require.Equal(t, http.StatusOK, v.answers(http.MethodPost, path+"/second/revert"))
	atDisk(t, url, "read -P 2 0 64k", "read -P 1 64k 960k")
	require.Equal(t, http.StatusNoContent, v.answers(http.MethodDelete, "/volume/vm1"))
	require.Equal(t, http.StatusNotFound, v.answers(http.MethodGet, path))
	require.NotContains(t, strings.Join(files(t, v.home), "\n"), "disk.img",
		"snapshots go with their volume")
}

// TestSnapshotWithoutStorage: the request is a right one, and the same one works later.
func TestSnapshotWithoutStorage(t *testing.T) {
	t.Parallel()
	v := startVolumes(t, nil)
	v.put("vm1", "size: 1Mi\n")
	const path = "/volume/vm1/snapshots/first"
	at := filepath.Join(v.home, "work", ".volumes", "vm1")
	require.NoError(t, os.Rename(at, at+".away"))
	v.refusal(http.StatusInternalServerError, http.MethodPut, path, "")
	require.NoError(t, os.Rename(at+".away", at))
	require.Equal(t, http.StatusCreated, v.answers(http.MethodPut, path))
}

// TestChangedBlocks: a backup of what changed between two snapshots, by tools that know QEMU's
// bitmaps.
func TestChangedBlocks(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-io", "nbdinfo", "nbdcopy", "nbdsh")
	dir := t.TempDir()
	socket := filepath.Join(dir, "nbd.sock")
	v := startVolumes(t, map[string]string{"NBD_LISTEN": "unix:" + socket})
	v.put("vm1", "size: 16Mi\n")
	uri := func(export string) string { return "nbd+unix:///" + export + "?socket=" + socket }
	take := func(name string) {
		require.Equal(t, http.StatusCreated,
			v.answers(http.MethodPut, "/volume/vm1/snapshots/"+name))
	}
	changed := func(export, since string) []string {
		t.Helper()
		var dirty []string
		for line := range strings.Lines(rig.OK(t, "nbdinfo", "--map=qemu:dirty-bitmap:"+since,
			uri(export))) {
			if f := strings.Fields(line); f[2] != "0" {
				dirty = append(dirty, strings.Join(f[:3], " "))
			}
		}
		return dirty
	}
	atDisk(t, uri("vm1"), "write -P 1 0 8M")
	take("monday")
	atDisk(t, uri("vm1"), "write -P 2 1M 64k", "discard 4M 4k")
	take("tuesday")
	atDisk(t, uri("vm1"), "write -P 3 12M 4k")
	require.Equal(t, []string{"1048576 65536 1", "4194304 4096 1", "12582912 4096 1"},
		changed("vm1", "monday"))
	require.Equal(t, []string{"12582912 4096 1"}, changed("vm1", "tuesday"))

	page := func(more string) (status int, c api.Changes) {
		t.Helper()
		status, body := v.ask(http.MethodGet, "/volume/vm1/snapshots/monday/changes?until=tuesday"+
			more, "", "Accept", "application/json")
		if status == http.StatusOK {
			require.NoError(t, json.Unmarshal([]byte(body), &c))
		}
		return status, c
	}
	status, first := page("")
	require.Equal(t, http.StatusOK, status)
	status, next := page("&offset=1052672&of=" + first.Of)
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, api.Changes{Since: "monday", Until: "tuesday", Of: first.Of, Size: 16777216,
		Next: 16777216, Ranges: []api.Range{{Offset: 1052672, Length: 61440},
			{Offset: 4194304, Length: 4096}}}, next)
	status, _ = page("&offset=1052672") // of whichever snapshots have these names by now
	require.Equal(t, http.StatusBadRequest, status)
	for path, want := range map[string]int{"monday/changes": http.StatusOK,
		"sunday/changes": http.StatusNotFound, "tuesday/changes?until=monday": http.StatusNotFound,
		"monday/changes?until=sunday": http.StatusNotFound,
		"monday/changes?offset=-1":    http.StatusBadRequest} {
		require.Equal(t, want, v.answers(http.MethodGet, "/volume/vm1/snapshots/"+path), path)
	}

	// A backup reads a snapshot, which stays as it is.
	program := rig.Program(t)
	work := []string{"WORK_DIR=" + filepath.Join(v.home, "work")}
	said := rig.OKEnv(t, work, program, "snapshot", "serve", "vm1", "tuesday")
	require.Contains(t, said, `as "vm1@tuesday"`)
	require.Equal(t, []string{"1048576 65536 1", "4194304 4096 1"},
		changed("vm1@tuesday", "monday"))
	require.Empty(t, changed("vm1@tuesday", "tuesday"))
	out := rig.OK(t, "qemu-io", "-r", "-f", "raw", "-c", "read -P 2 1M 64k", "-c",
		"read -P 0 12M 4k", "-c", "read -P 1 0 1M", uri("vm1@tuesday"))
	require.NotContains(t, out, "failed")
	require.Contains(t, rig.OK(t, "nbdinfo", "--list", uri("")), "vm1@tuesday")

	// The example brings the copy of one day up to the next.
	rig.OKEnv(t, work, program, "snapshot", "serve", "vm1", "monday")
	backup, whole := filepath.Join(dir, "backup.img"), filepath.Join(dir, "whole.img")
	rig.OK(t, "nbdcopy", uri("vm1@monday"), backup)
	rig.OK(t, "nbdcopy", uri("vm1@tuesday"), whole)
	example := []string{"../../examples/incremental-backup.py", uri("vm1@tuesday"), "monday",
		backup}
	require.Equal(t, "copied 69632 of 16777216 bytes\n", rig.OK(t, "/usr/bin/python3", example...))
	require.Equal(t, rig.ReadFile(t, whole), rig.ReadFile(t, backup))
	example[2] = "sunday"
	r := rig.Client(t, nil, "/usr/bin/python3", example...)
	require.NotZero(t, r.Status)
	require.Contains(t, r.Output, "make a full copy")
	rig.OKEnv(t, work, program, "snapshot", "unserve", "vm1", "monday")
	require.Equal(t, http.StatusConflict, v.answers(http.MethodDelete,
		"/volume/vm1/snapshots/tuesday"))
	rig.OKEnv(t, work, program, "snapshot", "unserve", "vm1", "tuesday")
	require.Equal(t, http.StatusNoContent, v.answers(http.MethodDelete,
		"/volume/vm1/snapshots/tuesday"))
	require.Equal(t, []string{"1048576 65536 1", "4194304 4096 1", "12582912 4096 1"},
		changed("vm1", "monday"))
}

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
