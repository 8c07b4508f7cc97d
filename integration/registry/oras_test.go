package registry

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/integration/internal/rig"
)

// oras runs it in a directory. The test is skipped if nobody has built it.
func oras(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), rig.BuiltClient(t, "oras", orasVersion), args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "HOME="+dir)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return string(out)
}

// TestOras pulls what "oras push" has stored, whatever wraps it, and has "oras pull" fetch what
// push --artifact stores.
func TestOras(t *testing.T) {
	t.Parallel()
	dir, back := t.TempDir(), t.TempDir()
	oras(t, dir, "version")
	rig.Need(t, "docker-registry", "qemu-img", "xz")
	s := rig.StartRegistry(t, false, "")
	insecure := "--insecure-registry=" + s.Address
	raw := append(bytes.Repeat([]byte("\x00words"), 1<<16*2), make([]byte, 1<<20)...)
	write := func(name string, content []byte) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), content, 0o644))
	}
	read := func(dir, name string) []byte {
		content, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		return content
	}
	write("a.raw", raw)
	out, err := exec.CommandContext(t.Context(), "qemu-img", "convert", "-f", "raw", "-O", "qcow2",
		filepath.Join(dir, "a.raw"), filepath.Join(dir, "a.qcow2")).CombinedOutput()
	require.NoError(t, err, "%s", out)
	qcow2 := read(dir, "a.qcow2")
	write("a.qcow2.xz", packtest.Tool(t, qcow2, "xz", "-9"))
	write("a.tar.gz", packtest.Gzip(t, packtest.Tar(t,
		packtest.File{Name: "README", Data: []byte("read me\n")},
		packtest.File{Name: "a.raw", Data: raw})))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "disk"), 0o755))
	write("disk/b.raw", raw)

	ref := s.Address + "/vm/oras:1"
	to := filepath.Join(back, "out")
	for _, file := range []string{"a.raw", "a.qcow2", "a.qcow2.xz", "a.tar.gz", "disk",
		"a.raw:application/x-disk"} {
		oras(t, dir, "push", "--plain-http", ref, file)
		rig.MustRun(t, nil, "pull", insecure, "--force", ref, to)
		require.True(t, bytes.Equal(raw, read(back, "out")), file)
	}
	require.NoError(t, os.Remove(to))

	rig.MustRun(t, nil, "push", "--artifact", insecure, filepath.Join(dir, "a.qcow2"),
		filepath.Join(dir, "disk", "b.raw"), s.Address+"/vm/ours:1")
	oras(t, back, "pull", "--plain-http", s.Address+"/vm/ours:1")
	require.True(t, bytes.Equal(qcow2, read(back, "a.qcow2")))
	require.True(t, bytes.Equal(raw, read(back, "b.raw")))
	entries, err := os.ReadDir(back)
	require.NoError(t, err)
	require.Len(t, entries, 2, "the index is no file")

	// A copy is the same artifact.
	oras(t, dir, "cp", "--from-plain-http", "--to-plain-http", s.Address+"/vm/ours:1",
		s.Address+"/vm/copy:1")
	rig.MustRun(t, nil, "pull", insecure, "--path=b.raw", s.Address+"/vm/copy:1", to)
	require.True(t, bytes.Equal(raw, read(back, "out")))
}
