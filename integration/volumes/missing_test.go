package volumes

import (
	"bytes"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
)

// TestVolumeStorageIsMissing: a volume whose storage is not there at a start has failed. It is
// never made again, and comes back as it was, by itself, when its storage does.
func TestVolumeStorageIsMissing(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-io", "qemu-img", rig.QEMUISCSI)
	above, images := t.TempDir(), t.TempDir()
	fast := filepath.Join(above, "fast")
	require.NoError(t, os.Mkdir(fast, 0o755))
	rig.OK(t, "qemu-img", "create", "-q", "-f", "qcow2", filepath.Join(images, "a.qcow2"), "8M")
	v := startVolumes(t, map[string]string{"USAGE_TYPES": "fast=" + fast, "DISK_DIR": images})
	for name, spec := range map[string]string{"empty": "size: 8Mi\ncopy: {usage-type: fast}",
		"image": "from: {image: a.qcow2}\ncopy: {usage-type: fast}", "own": "size: 8Mi",
		"stateless": "size: 8Mi"} {
		atDisk(t, volumeURL(v.put(name, spec)), "write -P 0x42 0 1M", "flush")
	}
	names := []string{"empty", "image", "own", "stateless"}
	before := map[string]api.Volume{}
	for _, name := range names {
		testtool.Within(t, rig.Timeout, func() bool {
			before[name] = v.json(http.StatusOK, "GET", "/volume/"+name, "")
			return before[name].Info.State == api.StateReady
		}, "%s is ready: %+v", name, func() any { return before[name] })
	}
	v.Stop()
	own := filepath.Join(v.home, "work", ".volumes", "own", "disk.img")
	state := filepath.Join(v.home, "work", ".volumes", "stateless", "disk.img.state")
	away := map[string]string{fast: filepath.Join(above, "away"), own: own + ".away",
		state: state + ".away"}
	for from, to := range away {
		require.NoError(t, os.Rename(from, to))
	}
	require.NoError(t, os.Mkdir(fast, 0o755))
	v.restart(t)
	for _, name := range names {
		a := v.json(http.StatusOK, "GET", "/volume/"+name, "")
		require.Equal(t, api.StateFailed, a.Info.State, name)
		require.Contains(t, a.Info.Failure, "is missing")
		status, text := v.ask("PUT", "/volume/"+name, "")
		require.Equal(t, http.StatusInternalServerError, status, text)
		require.Contains(t, text, "is missing")
	}
	require.Empty(t, files(t, fast), "nothing is made in its place")
	require.NoFileExists(t, own)
	require.Len(t, v.Status().LUNs, 1, "the image's")

	require.NoError(t, os.Remove(fast))
	for from, to := range away {
		require.NoError(t, os.Rename(to, from))
	}
	for _, name := range names {
		var a api.Volume
		testtool.Within(t, rig.Timeout, func() bool {
			a = v.json(http.StatusOK, "GET", "/volume/"+name, "")
			return a.Info.State == api.StateReady
		}, "%s is ready: %+v", name, func() any { return a })
		require.Equal(t, before[name].ISCSI.LUN, a.ISCSI.LUN)
		require.Equal(t, before[name].Info.Serial, a.Info.Serial)
		atDisk(t, volumeURL(a), "read -P 0x42 0 1M")
	}
}

// TestVolumesOnFullStorage: on full storage a volume can be deleted, and one that cannot be made is
// refused for that reason.
func TestVolumesOnFullStorage(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-io", "qemu-img", rig.QEMUISCSI)
	rig.NeedRoot(t)
	small := t.TempDir()
	rig.MountTmpfs(t, small, "8m")
	v := startVolumes(t, map[string]string{"VOLUMES_DIR": filepath.Join(small, "volumes")})
	kept, gone := v.put("kept", "size: 4Mi"), v.put("gone", "size: 4Mi")
	atDisk(t, volumeURL(kept), "write -P 0x42 0 1M", "flush")
	atDisk(t, volumeURL(gone), "write -P 0x42 0 1M", "flush")
	fill, err := os.Create(filepath.Join(small, "fill"))
	require.NoError(t, err)
	defer fill.Close()
	for err == nil {
		_, err = fill.Write(bytes.Repeat([]byte{1}, 4096))
	}
	status, text := v.ask("PUT", "/volume/new", "size: 4Mi")
	require.Equal(t, http.StatusInsufficientStorage, status, text)
	require.Equal(t, http.StatusNotFound, v.answers("GET", "/volume/new"))
	require.Equal(t, http.StatusNoContent, v.answers("DELETE", "/volume/gone"))
	require.Equal(t, http.StatusNotFound, v.answers("GET", "/volume/gone"))

	// The room that it had is free.
	v.Stop()
	v.restart(t)
	atDisk(t, volumeURL(v.json(http.StatusOK, "GET", "/volume/kept", "")), "read -P 0x42 0 1M",
		"write -P 0x43 1M 512k", "flush", "discard 0 1M")
}

// TestMissingPersistentDirectory: a volume that is not mounted is refused at the start, also where
// volumes are made in it.
func TestMissingPersistentDirectory(t *testing.T) {
	t.Parallel()
	missing := filepath.Join(t.TempDir(), "volume")
	_, err := rig.TryStart(t, rig.Config{DiskDir: t.TempDir(), Env: map[string]string{
		"PERSISTENT_DIR": missing, "VOLUMES_LISTEN": "127.0.0.1:0"}})
	require.ErrorContains(t, err, "does not exist")
	require.NoDirExists(t, missing)
}
