package disk

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// needs skips a test whose tool is missing, or fails it where every tool has to be there.
func needs(t testing.TB, tool string, present bool) {
	t.Helper()
	if present {
		return
	}
	if os.Getenv("KUBEVIRT_DISK_REQUIRE_TOOLS") == "1" {
		t.Fatalf("%s is required", tool)
	}
	t.Skipf("needs %s", tool)
}

// qemuImg runs qemu-img in a directory.
func qemuImg(t testing.TB, dir string, args ...string) {
	t.Helper()
	path, err := exec.LookPath("qemu-img")
	needs(t, "qemu-img", err == nil)
	cmd := exec.Command(path, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "qemu-img %v: %s", args, out)
}

// tinyFS mounts a file system of that many bytes.
func tinyFS(t *testing.T, size string) string {
	t.Helper()
	needs(t, "root (to mount a small file system)", os.Geteuid() == 0)
	dir := t.TempDir()
	err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size)
	needs(t, "root with CAP_SYS_ADMIN (to mount a small file system)", err == nil)
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// put writes a file of the directory, sparse up to size if that is more than the content.
func put(t testing.TB, dir, name string, content []byte, size int64) string {
	t.Helper()
	path := filepath.Join(dir, name)
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, content, 0o644))
	if size > int64(len(content)) {
		require.NoError(t, os.Truncate(path, size))
	}
	return path
}

// block is n bytes that are all b.
func block(b byte, n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = b
	}
	return p
}

// scanErrors scans a directory that cannot be served, and returns what is said of each file.
func scanErrors(t *testing.T, dir string) map[string]string {
	t.Helper()
	images, err := ScanDir(dir, ImageOptions{})
	var bad *ScanError
	require.ErrorAs(t, err, &bad)
	require.Nil(t, images)
	reasons := make(map[string]string)
	for _, f := range bad.Files {
		reasons[f.Name] = f.Explain()
		require.Contains(t, err.Error(), f.Error(), "the message lists every file")
	}
	return reasons
}

// openImage opens an image that has to be good, and closes it in the end.
func openImage(t testing.TB, path string) *Image {
	t.Helper()
	img, err := OpenImage(path, ImageOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { img.Close() })
	return img
}
