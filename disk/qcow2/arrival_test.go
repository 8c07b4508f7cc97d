package qcow2_test

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/testtool"
)

// guestOf writes the image's own content into p, which has zeros or the backing file's content.
func guestOf(p []byte) qcow2.Guest {
	return qcow2.Guest{
		Write: func(data []byte, off int64) error {
			copy(p[off:off+int64(len(data))], data)
			return nil
		},
		Zero: func(off, length int64) error { clear(p[off : off+length]); return nil },
	}
}

// arrive reads a file as it comes into p, and returns how often it had to come.
func arrive(t testing.TB, file, p []byte, small bool) (passes int) {
	t.Helper()
	a := testtool.Must(qcow2.NewArrival(file[:min(len(file), qcow2.HeadSize)], int64(len(file)),
		qcow2.Options{}))(t)
	require.Equal(t, int64(len(p)), a.Size())
	for !a.Done() {
		var in io.Reader = bytes.NewReader(file)
		if small {
			in = iotest.HalfReader(in)
		}
		require.NoError(t, a.Pass(context.Background(), in, guestOf(p)))
		passes++
		require.LessOrEqual(t, passes, 4)
	}
	return passes
}

// compareArrival reads an image with its backing files as they come, and compares.
func compareArrival(t testing.TB, path string, want []byte) (passes int) {
	t.Helper()
	got := make([]byte, len(want))
	var lay func(path string)
	lay = func(path string) {
		file := filetest.Content(t, path)
		a := testtool.Must(qcow2.NewArrival(file[:min(len(file), qcow2.HeadSize)], int64(len(file)),
			qcow2.Options{}))(t)
		own := make([]byte, a.Size())
		if name, format := a.Backing(); format == "raw" {
			base := filetest.Content(t, filepath.Join(filepath.Dir(path), name))
			copy(own, base)
		} else if name != "" {
			lay(filepath.Join(filepath.Dir(path), name))
			copy(own, got)
		}
		passes = arrive(t, file, own, len(want)%1024 == 0)
		got = own
	}
	lay(path)
	for i := range got {
		if got[i] != want[i] {
			require.Equal(t, want[i], got[i], "byte %d", i)
		}
	}
	return passes
}

// TestArrivalPasses counts how often the file has to be sent: once for a file of qemu-img, and more
// often where a table lies behind what it maps.
func TestArrivalPasses(t *testing.T) {
	testtool.Need(t, "qemu-img", "qemu-io")
	dir := t.TempDir()
	raw := filepath.Join(dir, "raw")
	content := make([]byte, 12<<20)
	for i := 0; i < len(content); i += 512 {
		if i>>20%3 != 0 {
			content[i], content[i+7] = byte(i>>9), byte(i>>17)|1
		}
	}
	require.NoError(t, os.WriteFile(raw, content, 0o644))
	for _, args := range [][]string{
		{"-o", "cluster_size=64k"},
		{"-o", "cluster_size=4k"},
		{"-c", "-o", "cluster_size=64k,compression_type=zstd"},
		{"-c", "-o", "cluster_size=2M"},
		{"-c", "-W", "-m", "8", "-o", "cluster_size=4k"},
		{"-o", "extended_l2=on,cluster_size=128k"},
	} {
		path := filepath.Join(dir, "image")
		runTool(t, "qemu-img",
			append(append([]string{"convert", "-f", "raw", "-O", "qcow2"}, args...), raw, path)...)
		passes := compareArrival(t, path, content)
		if slices.Contains(args, "-W") { // out of order: some tables lie behind what they map
			require.LessOrEqual(t, passes, 2)
			continue
		}
		require.Equal(t, 1, passes, "%v", args)
	}

	// The table of a disk that was enlarged lies behind everything else.
	path := filepath.Join(dir, "grown")
	runTool(t, "qemu-img", "convert", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=4k", raw,
		path)
	runTool(t, "qemu-img", "resize", "-q", path, "64G")
	file := filetest.Content(t, path)
	got := make([]byte, 12<<20)
	guest := guestOf(got)
	a, err := qcow2.NewArrival(file[:qcow2.HeadSize], int64(len(file)), qcow2.Options{})
	require.NoError(t, err)
	passes := 0
	for ; !a.Done(); passes++ {
		require.NoError(t, a.Pass(context.Background(), bytes.NewReader(file), guest))
	}
	require.Equal(t, 2, passes)
	require.True(t, bytes.Equal(content, got))
}

// TestArrivalCut ends the file early, at any place. Each is an error.
func TestArrivalCut(t *testing.T) {
	testtool.Need(t, "qemu-img")
	dir := t.TempDir()
	raw, path := filepath.Join(dir, "raw"), filepath.Join(dir, "image")
	require.NoError(t, os.WriteFile(raw, bytes.Repeat([]byte("content."), 1<<18), 0o644))
	runTool(t, "qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, path)
	file := filetest.Content(t, path)
	for cut := 0; cut < len(file); cut += len(file)/40 + 1 {
		a := testtool.Must(qcow2.NewArrival(file, int64(len(file)), qcow2.Options{}))(t)
		require.ErrorIs(t, a.Pass(context.Background(), bytes.NewReader(file[:cut]),
			guestOf(make([]byte, 2<<20))), io.ErrUnexpectedEOF)
	}
}
