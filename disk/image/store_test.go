package image

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/durable"
)

var compressions = []qcow2.Compression{
	qcow2.CompressionZstd, qcow2.CompressionZlib, qcow2.CompressionNone,
}

// TestConvert makes the same files from the same disk, however the disk is stored.
func TestConvert(t *testing.T) {
	t.Cleanup(func() { goleak.VerifyNone(t) })
	dir := t.TempDir()
	want := filetest.Sample(9<<20+512, 1)
	sources := []string{filetest.Put(t, dir, "in.raw", want, 0)}
	for name, args := range map[string][]string{
		"plain": nil,
		"old":   {"-o", "compat=0.10"},
		"small": {"-o", "cluster_size=512"},
		"large": {"-c", "-o", "cluster_size=2M"},
		"zlib":  {"-c"},
		"zstd":  {"-c", "-o", "compression_type=zstd"},
		"sub":   {"-o", "extended_l2=on,cluster_size=128k"},
	} {
		args = append([]string{"convert", "-f", "raw", "-O", "qcow2"}, args...)
		filetest.QemuImg(t, dir, append(args, "in.raw", name+".qcow2")...)
		sources = append(sources, filepath.Join(dir, name+".qcow2"))
	}
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "zlib.qcow2",
		"over.qcow2")
	sources = append(sources, filepath.Join(dir, "over.qcow2"))
	out := filepath.Join(dir, "out")
	whole := func(p *Progress) {
		t.Helper()
		require.NoFileExists(t, out+durable.PartialSuffix)
		require.True(t, p.Finished())
		require.EqualValues(t, len(want), p.Done())
		require.EqualValues(t, len(want), p.Total())
	}
	for _, source := range sources {
		img := openImage(t, source)
		var file, streamed Progress
		require.NoError(t, Convert(t.Context(), img, out, true, &file), source)
		whole(&file)
		require.True(t, bytes.Equal(want, filetest.Content(t, out)), source)
		require.Less(t, filetest.Allocated(t, out), int64(len(want))*9/10, "zeros are holes")
		var stream bytes.Buffer
		require.NoError(t, Stream(t.Context(), img, &stream, &streamed), source)
		whole(&streamed)
		require.True(t, bytes.Equal(want, stream.Bytes()), source)
	}
	for _, c := range compressions {
		var first []byte
		for _, source := range sources {
			img := openImage(t, source)
			var p Progress
			require.NoError(t, ConvertQcow2(t.Context(), img, out, true, c, &p))
			whole(&p)
			done, data := p.Data()
			require.Equal(t, img.DataSize(), data)
			require.Equal(t, data, done)

			image := filetest.Content(t, out)
			if first == nil {
				first = image
				stored := openImage(t, out)
				require.True(t, bytes.Equal(want, filetest.ReadAll(t, stored, stored.Size())))
				require.Equal(t, FormatQcow2, stored.Format())
				require.Less(t, int64(len(image)), int64(len(want))*9/10, "zeros take no space")
				filetest.QemuImg(t, dir, "check", "-q", "out")
				filetest.QemuImg(t, dir, "compare", "-q", "-F", "raw", "out", "in.raw")
			}
			require.True(t, bytes.Equal(first, image), "%s of %s", c, source)
		}
	}
}

func TestConvertLeavesNothingBehind(t *testing.T) {
	for name, f := range map[string]func(ctx context.Context, img *Image, dst string) error{
		"raw": func(ctx context.Context, img *Image, dst string) error {
			return Convert(ctx, img, dst, true, nil)
		},
		"qcow2": func(ctx context.Context, img *Image, dst string) error {
			return ConvertQcow2(ctx, img, dst, true, qcow2.CompressionNone, nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Cleanup(func() { goleak.VerifyNone(t) })
			dir := t.TempDir()
			out := filepath.Join(dir, "out")
			convert := func(ctx context.Context, img *Image, dst string) error {
				err := f(ctx, img, dst)
				require.NoFileExists(t, out)
				require.NoFileExists(t, out+durable.PartialSuffix)
				return err
			}
			img := openImage(t, filetest.Put(t, dir, "disk.raw", filetest.Block(1, 4<<20), 0))
			ended, cancel := context.WithCancel(t.Context())
			cancel()
			require.ErrorIs(t, convert(ended, img, out), context.Canceled)
			require.ErrorContains(t, convert(t.Context(), img, img.Path()),
				`image "disk.raw" itself`)
			require.ErrorContains(t, convert(t.Context(), img, dir), "is a directory")
			require.Error(t, convert(t.Context(), img, filepath.Join(dir, "none", "out")))

			// What is missing would otherwise become zeros.
			require.NoError(t, os.Truncate(img.Path(), 2<<20))
			require.ErrorContains(t, convert(t.Context(), img, out), `"disk.raw" was changed`)

			filetest.Put(t, dir, "in.raw", filetest.Block(1, 8<<20), 0)
			filetest.QemuImg(t, dir, "convert", "-f", "raw", "-O", "qcow2", "in.raw", "in.qcow2")
			img = openImage(t, filepath.Join(dir, "in.qcow2"))
			require.NoError(t, os.Truncate(img.Path(), img.Info().FileSize/2))
			var medium *disk.MediumError
			require.ErrorAs(t, convert(t.Context(), img, out), &medium)
		})
	}
}

func TestConvertQcow2ToAFullVolume(t *testing.T) {
	small := filetest.TinyFS(t, "1m")
	img := openImage(t, filetest.Put(t, t.TempDir(), "disk.raw", filetest.Block(5, 3<<20), 0))
	out := filepath.Join(small, "out.qcow2")
	err := ConvertQcow2(t.Context(), img, out, true, qcow2.CompressionNone, nil)
	var space *SpaceError
	require.ErrorAs(t, err, &space)
	require.ErrorIs(t, err, disk.ErrNoSpace)
	require.Equal(t, small, space.Dir)
	require.ErrorContains(t, err, `the qcow2 image of "disk.raw": `)
	filetest.Empty(t, small)

	// Compressed data has room.
	require.NoError(t, ConvertQcow2(t.Context(), img, out, true, qcow2.CompressionZstd, nil))
}

func TestStoreSaysWhatIsWrongWithItsFile(t *testing.T) {
	f := &storedFile{File: filetest.Sparse(t, 0), end: 5 << 20}
	for cause, want := range map[error]string{
		unix.EFBIG: "takes a file of 5 MiB",
		unix.EIO:   `writing the qcow2 image of "a.raw": input/output error`,
	} {
		f.err = cause
		require.ErrorContains(t, f.explain("a.raw"), want)
	}
}

// A disk that is one hole is written as zeros, so that its reader sees its size.
func TestStreamWritesHoles(t *testing.T) {
	img := openImage(t, filetest.Put(t, t.TempDir(), "disk.raw", nil, 5<<20))
	var out bytes.Buffer
	require.NoError(t, Stream(t.Context(), img, &out, nil))
	require.True(t, bytes.Equal(make([]byte, 5<<20), out.Bytes()))
}

type streamWriter func(p []byte) (int, error)

func (f streamWriter) Write(p []byte) (int, error) { return f(p) }

func TestStreamThatFails(t *testing.T) {
	t.Cleanup(func() { goleak.VerifyNone(t) })
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Block(1, 40<<20), 0)
	img := openImage(t, path)
	full := errors.New("it is full")
	require.ErrorIs(t, Stream(t.Context(), img,
		streamWriter(func([]byte) (int, error) { return 0, full }), nil), full)

	p, written := new(Progress), int64(0)
	require.NoError(t, Stream(t.Context(), img, streamWriter(func(b []byte) (int, error) {
		done, total := p.Data()
		require.Equal(t, []int64{written, 40 << 20}, []int64{done, total}, "all of it is data")
		written += int64(len(b))
		return len(b), nil
	}), p))

	ctx, cancel := context.WithCancel(t.Context())
	require.ErrorIs(t, Stream(ctx, img, streamWriter(func(p []byte) (int, error) {
		cancel()
		return len(p), nil
	}), nil), context.Canceled)

	require.NoError(t, os.Truncate(path, 20<<20))
	require.Error(t, Stream(t.Context(), img,
		streamWriter(func(p []byte) (int, error) { return len(p), nil }), p))
	require.False(t, p.Finished())
}
