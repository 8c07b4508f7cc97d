package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/internal/testtool"
)

// vhdxOf is a VHDX image of a disk.
func vhdxOf(t *testing.T, raw []byte) []byte {
	testtool.Need(t, "qemu-img")
	from, to := filepath.Join(t.TempDir(), "raw"), filepath.Join(t.TempDir(), "vhdx")
	require.NoError(t, os.WriteFile(from, raw, 0o600))
	out, err := exec.CommandContext(t.Context(), "qemu-img", "convert", "-f", "raw", "-O", "vhdx",
		from, to).CombinedOutput()
	require.NoError(t, err, "%s", out)
	image := testtool.Must(os.ReadFile(to))(t)
	return image
}

// TestConvertWrapped takes a disk out of what wraps it, or out of an image of another program, and
// serve and inspect say to do so.
func TestConvertWrapped(t *testing.T) {
	dir, tmp := t.TempDir(), t.TempDir()
	raw := append(bytes.Repeat([]byte("\x00\x01words "), 1<<17), make([]byte, 4<<20)...)
	env := append(os.Environ(), "TMPDIR="+tmp)
	path := func(name string) string { return filepath.Join(dir, name) }
	vhdx := vhdxOf(t, raw)
	for name, content := range map[string][]byte{
		"d.vhdx": vhdx, "e.vhdx.gz": packtest.Gzip(t, vhdx),
		"a.raw.gz": packtest.Gzip(t, raw),
		"b.tar.xz": packtest.Xz(packtest.Tar(t, packtest.File{Name: "SUMS", Data: []byte("x\n")},
			packtest.File{Name: "b.raw", Data: raw})),
		"c.img.xz": packtest.XzNeeding(raw, 28), // as "xz -9" does
	} {
		source := path(name)
		require.NoError(t, os.WriteFile(source, content, 0o644))
		out := path("out.raw")
		works(t, env, "convert", "--force", source, out)
		got := testtool.Must(os.ReadFile(out))(t)
		require.True(t, bytes.Equal(raw, got), name)
		image := path("out.qcow2")
		works(t, env, "convert", "--force", source, image)
		for _, from := range []string{image, source} {
			cmd := exec.CommandContext(t.Context(), binary(t), "convert", from, "-")
			cmd.Env = env
			stdout := testtool.Must(cmd.Output())(t)
			require.True(t, bytes.Equal(raw, stdout), name)
		}
		require.Empty(t, testtool.Must(os.ReadDir(tmp))(t))
	}
	fails(t, env, exitFailed, "--unpack-memory", "convert", "--unpack-memory=16Mi",
		path("c.img.xz"), path("no.raw"))
	require.NoFileExists(t, path("no.raw"))
	fails(t, env, exitUsage, "96Mi", "convert", "--unpack-memory=1Gi", path("c.img.xz"),
		path("no.raw"))
	two := packtest.Tar(t, packtest.File{Name: "a.raw", Data: raw}, // converted in place, the
		packtest.File{Name: "notes", Data: []byte("kept")}) // rest of it would be lost
	require.NoError(t, os.WriteFile(path("f.img"), two, 0o644))
	require.NoError(t, os.Link(path("f.img"), path("g.img")))
	for _, to := range []string{"f.img", "g.img"} {
		fails(t, env, exitFailed, "is the image itself", "convert", "--force", path("f.img"),
			path(to))
	}

	require.NoError(t, os.WriteFile(path("disk.img"), raw, 0o644))
	require.NoError(t, os.WriteFile(path("disk.img.map"), []byte("KVDMAP1\n..."), 0o644))
	for _, args := range [][]string{{"convert", path("disk.img"), path("no.raw")},
		{"upload", path("disk.img"), "http://127.0.0.1:1/volume/vm1"}} {
		fails(t, env, exitFailed, "is only a part of a disk", args...)
	}

	for name, want := range map[string]string{
		"a.raw.gz": `"kubevirt-disk convert a.raw.gz a.raw" first`,
		"d.vhdx":   `"kubevirt-disk convert d.vhdx d.qcow2"`,
		"b.tar.xz": `"kubevirt-disk convert b.tar.xz b.qcow2" first`} {
		status, stdout, stderr := run(t, env, "serve", "--log-format=console", "--metrics-listen=",
			"--listen=127.0.0.1:0", "--work-dir="+tmp, path(name))
		require.NotEqual(t, exitDone, status)
		require.Contains(t, stdout+stderr, want)
	}
}
