package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/internal/testtool"
)

// TestConvertToQcow2 chooses the format by the name or a flag, with each compression.
func TestConvertToQcow2(t *testing.T) {
	dir := t.TempDir()
	source := filepath.Join(dir, "disk.raw")
	content := append(bytes.Repeat([]byte("words "), 1<<18), make([]byte, 4<<20)...)
	require.NoError(t, os.WriteFile(source, content, 0o644))
	images := make(map[string][]byte)
	for name, args := range map[string][]string{
		"zstd.qcow2": nil,
		"same.QCOW2": {"--compress=zstd"},
		"zlib.qcow2": {"--compress=zlib"},
		"none.qcow2": {"--compress", "none", "--target-format", "qcow2"},
		"named":      {"--target-format=qcow2"},
	} {
		path := filepath.Join(dir, name)
		_, stderr := works(t, nil, append([]string{"convert", source, path}, args...)...)
		require.Contains(t, stderr, "disk.raw: 5.5 MiB")
		image := testtool.Must(os.ReadFile(path))(t)
		images[name] = image

		back := filepath.Join(dir, "back.raw")
		works(t, nil, "convert", "--force", path, back, "--target-format=raw")
		got := testtool.Must(os.ReadFile(back))(t)
		require.True(t, bytes.Equal(content, got), name)
	}
	for _, method := range compressions {
		stdout, _ := works(t, nil, "inspect", filepath.Join(dir, method+".qcow2"))
		require.Regexp(t, `compression +`+method+`\n`, stdout)
	}
	require.True(t, bytes.Equal(images["zstd.qcow2"], images["same.QCOW2"]))
	require.True(t, bytes.Equal(images["zstd.qcow2"], images["named"]))
	require.Greater(t, len(images["none.qcow2"]), 4*len(images["zlib.qcow2"]))

	cmd := exec.Command(binary(t), "convert", source, "-",
		"--target-format=qcow2", "--compress=zlib")
	cmd.Env = append(os.Environ(), "TMPDIR="+t.TempDir())
	got := testtool.Must(cmd.Output())(t)
	require.True(t, bytes.Equal(images["zlib.qcow2"], got))

	status, _, stderr := run(t, nil, "convert", source, filepath.Join(dir, "zstd.qcow2"))
	require.Equal(t, exitFailed, status)
	require.Contains(t, stderr, "exists already")
	for want, args := range map[string][]string{
		`"lz4" is not a compression: use zstd, zlib, none`: {"new.qcow2", "--compress=lz4"},
		`--target-format: "vmdk" is not a format`:          {"new", "--target-format=vmdk"},
		"--compress: a raw disk is not compressed":         {"new.raw", "--compress=zstd"},
		"or say --target-format=qcow2":                     {"-", "--compress=zstd"},
		"a raw disk is not compressed": {
			"new.qcow2", "--target-format=raw", "--compress=none"},
	} {
		if args[0] != "-" {
			args[0] = filepath.Join(dir, args[0])
		}
		fails(t, nil, exitUsage, want, append([]string{"convert", source}, args...)...)
		require.NoFileExists(t, args[0])
	}
}

// TestConvertToQcow2WithoutSpace: convert to standard output needs a temporary file, and that has
// no room.
func TestConvertToQcow2WithoutSpace(t *testing.T) {
	t.Setenv("TMPDIR", filetest.TinyFS(t, "1m"))
	source := filepath.Join(t.TempDir(), "a.raw")
	require.NoError(t, os.WriteFile(source, bytes.Repeat([]byte("data"), 1<<20), 0o644))
	var out bytes.Buffer
	a := &app{stderr: io.Discard, stdout: &out}
	o := convertOptions{targetFormat: "qcow2", compression: "none"}
	err := a.convert(t.Context(), source, "-", o)
	require.ErrorIs(t, err, disk.ErrNoSpace)
	require.ErrorContains(t, err, "TMPDIR")
	require.Zero(t, out.Len())
	o.compression = "zstd"
	require.NoError(t, a.convert(t.Context(), source, "-", o))
	require.NotZero(t, out.Len())
}

// vhdxOf is a VHDX image of a disk.
func vhdxOf(t *testing.T, raw []byte) []byte {
	testtool.Need(t, "qemu-img")
	from, to := filepath.Join(t.TempDir(), "raw"), filepath.Join(t.TempDir(), "vhdx")
	require.NoError(t, os.WriteFile(from, raw, 0o600))
	out, err := exec.CommandContext(t.Context(), "qemu-img", "convert", "-f", "raw", "-O", "vhdx",
		from, to).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return testtool.Must(os.ReadFile(to))(t)
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
