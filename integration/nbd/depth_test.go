package nbd

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

// depthRun is a part of a disk as nbdinfo lists it.
type depthRun struct {
	Offset, Length int64
	Type           int
}

// TestNBDAllocationDepth: clients see what the guest has written over an image, what the image
// stores, and where nobody has anything.
func TestNBDAllocationDepth(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", "qemu-io", "nbdinfo")
	dir := t.TempDir()
	image := filepath.Join(dir, "disk", "disk.qcow2")
	require.NoError(t, os.MkdirAll(filepath.Dir(image), 0o755))
	rig.OK(t, "qemu-img", "create", "-q", "-f", "qcow2", image, "8M")
	rig.OK(t, "qemu-io", "-c", "write -P 7 1M 2M", image)
	socket := filepath.Join(dir, "nbd.sock")
	d := rig.Start(t, rig.Config{DiskDir: filepath.Dir(image), StateDir: t.TempDir(),
		Args: []string{"--nbd=unix:" + socket, "--copy-mode=copy-on-write"}})
	defer d.Stop()
	uri := "nbd+unix:///?socket=" + socket
	rig.OK(t, "qemu-io", "-f", "raw", "-d", "unmap", "-c", "write -P 8 1M 64k", "-c",
		"discard 2M 64k", "-c", "write -P 9 4M 64k", "-c", "discard 6M 64k", uri)

	var got []depthRun
	out := rig.OK(t, "nbdinfo", "--json", "--map=qemu:allocation-depth", uri)
	require.NoError(t, json.Unmarshal([]byte(out), &got), "%s", out)
	const k, m = 1 << 10, 1 << 20
	want := []depthRun{{0, m, 0}, {m, 64 * k, 1}, {m + 64*k, m - 64*k, 2}, {2 * m, 64 * k, 1},
		{2*m + 64*k, m - 64*k, 2}, {3 * m, m, 0}, {4 * m, 64 * k, 1}, {4*m + 64*k, 4*m - 64*k, 0}}
	require.Equal(t, want, got)
	require.Contains(t, rig.OK(t, "nbdinfo", "--list", uri), "qemu:allocation-depth")

	// QEMU shows a context of another kind as if it were base:allocation: 1 is a hole, 2 is zeros.
	out = rig.OK(t, "qemu-img", "map", "--output=json", "--image-opts", fmt.Sprintf("driver=nbd,"+
		"server.type=unix,server.path=%s,x-dirty-bitmap=qemu:allocation-depth", socket))
	var runs []struct {
		Start, Length int64
		Zero, Data    bool
	}
	require.NoError(t, json.Unmarshal([]byte(out), &runs), "%s", out)
	require.Len(t, runs, len(want), "%s", out)
	for i, r := range runs {
		depth := map[[2]bool]int{{false, true}: 0, {false, false}: 1, {true, true}: 2}
		require.Equal(t, want[i], depthRun{r.Start, r.Length, depth[[2]bool{r.Zero, r.Data}]})
	}
}
