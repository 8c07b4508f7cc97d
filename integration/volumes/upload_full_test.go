package volumes

import (
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/volume/api"
)

// TestUploadOnAFullStorage: storage fills up during an upload of unknown size. The volume is as
// empty as before and no LUN appears. Others go on, even a volume on the same storage and another
// daemon.
func TestUploadOnAFullStorage(t *testing.T) {
	t.Parallel()
	rig.Need(t, "curl", "zstd", "qemu-io", "qemu-img", rig.QEMUISCSI)
	small, large := t.TempDir(), t.TempDir()
	rig.MountTmpfs(t, small, "24m")
	v := startVolumes(t, map[string]string{"USAGE_TYPES": "small=" + small + ",large=" + large})
	other := startVolumes(t, map[string]string{"VOLUMES_DIR": filepath.Join(small, "other")})
	there := []api.Volume{v.put("large", "size: 4Mi\ncopy: {usage-type: large}"),
		v.put("small", "size: 4Mi\ncopy: {usage-type: small}"), other.put("other", "size: 4Mi")}
	for _, a := range there {
		atDisk(t, volumeURL(a), "write -P 0x42 0 1M", "flush")
	}
	raw, _ := rig.MakeUpload(t, 128<<20) // 32 MiB are data
	rig.OK(t, "zstd", "-q", "-1", "-k", raw)
	image := filepath.Join(t.TempDir(), "disk.qcow2")
	rig.MakeQcow2(t, raw, image, "", false)

	const spec = "from: {upload: true}\ncopy: {usage-type: small}"
	v.json(http.StatusAccepted, "PUT", "/volume/vm", spec)
	luns := len(v.Status().LUNs)
	// The length is unknown: only writing shows that there is no room.
	for _, file := range []string{raw, raw + ".zst", image} {
		status, text := v.upload(file, "vm", "-H", "Transfer-Encoding: chunked")
		require.Equal(t, http.StatusInsufficientStorage, status, text)
		require.Contains(t, text, small)
		require.Contains(t, text, "make room")
		require.Equal(t, http.StatusAccepted, v.answers("GET", "/volume/vm"))
		require.Len(t, v.Status().LUNs, luns)
		require.NotContains(t, strings.Join(files(t, small), "\n"), "/vm/disk.img")
		for _, a := range there {
			atDisk(t, volumeURL(a), "read -P 0x42 0 1M", "write -P 0x43 2M 1M", "flush")
		}
	}
	// The length is known, so no data is received.
	before := metric(t, v.Get("/metrics"), "kubevirt_disk_upload_bytes_total")
	status, text := v.upload(raw, "vm")
	require.Equal(t, http.StatusInsufficientStorage, status, text)
	require.Contains(t, text, "are free")
	require.Equal(t, before, metric(t, v.Get("/metrics"), "kubevirt_disk_upload_bytes_total"))

	fits, _ := rig.MakeUpload(t, 4<<20)
	status, text = v.upload(fits, "vm")
	require.Equal(t, http.StatusCreated, status, text)
	rig.Same(t, fits, volumeURL(v.ready("vm")))
}
