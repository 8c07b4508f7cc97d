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
		`--compress: "" is not a compression`:              {"new.qcow2", "--compress="},
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
