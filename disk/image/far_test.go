package image_test

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"math"
	"math/rand/v2"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/disktest/sourcetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/slots"
	"kubevirt.io/disk/internal/testtool"
)

// files are the files of an image that lies far away.
type files map[string]*sourcetest.Far

// load makes far sources of files of a directory.
func load(t testing.TB, dir string, opt sourcetest.Options, names ...string) files {
	all := files{}
	for _, name := range names {
		content := filetest.Content(t, filepath.Join(dir, name))
		all[name] = sourcetest.New(content, opt)
	}
	return all
}

func (f files) open(_ context.Context, name string) (image.Source, error) {
	if s := f[name]; s != nil {
		return s, nil
	}
	return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
}

func (f files) sum() (sum sourcetest.Stats) {
	for _, s := range f {
		stats := s.Stats()
		sum.Reads += stats.Reads
		sum.Closed += stats.Closed
		sum.Most = max(sum.Most, stats.Most)
	}
	return sum
}

func (f files) cut() {
	for _, s := range f {
		s.Cut()
	}
}

func (f files) mend() {
	for _, s := range f {
		s.Mend()
	}
}

func (f files) end(err error) {
	for _, s := range f {
		s.End(err)
	}
}

const size = 8 << 20

// images makes an image of every kind with 8 MiB in a directory: the names of its files, its own
// first.
func images(t testing.TB, dir string) map[string][]string {
	content := filetest.Sample(size, 5)
	clear(content[2<<20 : 3<<20])
	filetest.Put(t, dir, "raw.raw", content, 0)
	convert := func(name string, args ...string) {
		args = append([]string{"convert", "-f", "raw", "-O", "qcow2"}, args...)
		filetest.QemuImg(t, dir, append(args, "raw.raw", name)...)
	}
	convert("plain.qcow2")
	convert("zlib.qcow2", "-c")
	convert("zstd.qcow2", "-c", "-o", "compression_type=zstd")
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "-b", "raw.raw", "-F", "raw",
		"middle.qcow2")
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2",
		"-b", "zlib.qcow2", "-F", "qcow2", "top.qcow2")
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "-o",
		"extended_l2=on,cluster_size=128k", "-b", "middle.qcow2", "-F", "qcow2", "sub.qcow2")
	for _, name := range []string{"middle.qcow2", "top.qcow2", "sub.qcow2"} {
		filetest.QemuIO(t, dir, name, "write -P 7 1M 100k", "write -P 8 6M 4k", "discard 4M 1M")
	}
	return map[string][]string{
		"raw":        {"raw.raw"},
		"qcow2":      {"plain.qcow2"},
		"zlib":       {"zlib.qcow2"},
		"zstd":       {"zstd.qcow2"},
		"over zlib":  {"top.qcow2", "zlib.qcow2"},
		"over a raw": {"sub.qcow2", "middle.qcow2", "raw.raw"},
	}
}

// TestFarImages compares images that lie far away with the same ones of this machine.
func TestFarImages(t *testing.T) {
	dir := t.TempDir()
	for kind, names := range images(t, dir) {
		t.Run(kind, func(t *testing.T) {
			near := testtool.Must(image.Open(filepath.Join(dir, names[0]), image.Options{}))(t)
			defer near.Close()
			require.Equal(t, 1, near.Parallel())

			all := load(t, dir, sourcetest.Options{}, names...)
			far, err := image.OpenSource(t.Context(), names[0], all.open, image.Options{})
			require.NoError(t, err)
			require.Equal(t, 8, far.Parallel())
			require.Equal(t, names[0], far.Name())
			require.Empty(t, far.Path())
			if kind != "over a raw" && kind != "raw" { // of which a source knows no holes
				require.Equal(t, near.Info(), far.Info())
			}
			want := filetest.ReadAll(t, near, size)
			require.Equal(t, -1, filetest.FirstDifference(want, filetest.ReadAll(t, far, size)))
			random := rand.New(rand.NewPCG(3, 3))
			for range 100 {
				off := random.Int64N(size)
				p := filetest.Read(t, far, off, 1+random.Int64N(min(size-off, 300<<10)))
				require.True(t, bytes.Equal(want[off:off+int64(len(p))], p))
			}
			out := filepath.Join(t.TempDir(), "out.raw")
			require.NoError(t, image.Convert(t.Context(), far, out, true, nil))
			require.Equal(t, -1, filetest.FirstDifference(want, filetest.Content(t, out)))
			var stream bytes.Buffer
			require.NoError(t, image.Stream(t.Context(), far, &stream, nil))
			require.Equal(t, -1, filetest.FirstDifference(want, stream.Bytes()))

			require.NoError(t, far.Close())
			require.Equal(t, len(names), all.sum().Closed)
		})
	}
}

// TestOpeningAFarImage counts how often opening a small image waits.
func TestOpeningAFarImage(t *testing.T) {
	dir := t.TempDir()
	for kind, names := range images(t, dir) {
		synctest.Test(t, func(t *testing.T) {
			all := load(t, dir, sourcetest.Options{Delay: time.Second}, names...)
			begin := time.Now()
			img, err := image.OpenSource(t.Context(), names[0], all.open, image.Options{})
			require.NoError(t, err)
			defer img.Close()
			most := time.Duration(len(names)) * time.Second // for each file once
			if kind == "zlib" || kind == "zstd" || kind == "over zlib" {
				most += time.Second // qemu-img writes the tables of compressed images to the end
			}
			if kind == "over a raw" {
				most += 2 * time.Second // clusters with subclusters are read once more
			}
			require.LessOrEqual(t, time.Since(begin), most, "%s: %+v", kind, all.sum())
		})
	}
}

// TestFarImageOutOfReach reads an image whose source is out of reach. A waiting read ends with its
// context, and not before.
func TestFarImageOutOfReach(t *testing.T) {
	dir := t.TempDir()
	lost := errors.New("404 not found")
	for kind, names := range images(t, dir) {
		synctest.Test(t, func(t *testing.T) {
			all := load(t, dir, sourcetest.Options{Delay: time.Millisecond}, names...)
			img, err := image.OpenSource(t.Context(), names[0], all.open, image.Options{})
			require.NoError(t, err, kind)
			defer img.Close()
			const off = 5 << 20
			want, got := make([]byte, 128<<10), make([]byte, 128<<10)
			content := filetest.Content(t, filepath.Join(dir, "raw.raw"))
			copy(want, content[off:])

			all.cut()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			_, err = img.ReadAt(ctx, got, off)
			require.ErrorIs(t, err, disk.ErrNotNow, kind)
			require.False(t, errors.As(err, new(*disk.MediumError)))
			require.ErrorContains(t, err, names[0])

			read := testtool.Go(func() error {
				return testtool.Err(img.ReadAt(t.Context(), got, off))
			})
			time.Sleep(10 * time.Minute)
			all.mend()
			require.NoError(t, <-read, kind)
			require.True(t, bytes.Equal(want, got), kind)

			all.end(lost)
			_, err = img.ReadAt(t.Context(), got, 7<<20)
			var medium *disk.MediumError
			require.ErrorAs(t, err, &medium, kind)
			require.ErrorIs(t, err, lost)
			require.NotErrorIs(t, err, disk.ErrNotNow)
			require.EqualValues(t, 7<<20, medium.Off)
		})
	}
}

// TestOpeningAnImageOutOfReach tells "not now" from an image that is no good.
func TestOpeningAnImageOutOfReach(t *testing.T) {
	dir := t.TempDir()
	for kind, names := range images(t, dir) {
		synctest.Test(t, func(t *testing.T) {
			for cut := range names {
				all := load(t, dir, sourcetest.Options{}, names...)
				all[names[cut]].Cut()
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				_, err := image.OpenSource(ctx, names[0], all.open, image.Options{})
				require.ErrorIs(t, err, disk.ErrNotNow, kind)
				require.ErrorContains(t, err, names[cut], "it says which file")
				require.False(t, errors.As(err, new(*image.Error)))
				require.Equal(t, cut+1, all.sum().Closed)
			}
		})
	}
	refused := func(ctx context.Context, _ string) (image.Source, error) {
		return nil, disk.ErrNotNow
	}
	_, err := image.OpenSource(t.Context(), "a.raw", refused, image.Options{})
	require.ErrorIs(t, err, disk.ErrNotNow)
	require.ErrorContains(t, err, "a.raw")
}

// TestFilesOfAFarImage looks for backing files only where the image is.
func TestFilesOfAFarImage(t *testing.T) {
	dir := t.TempDir()
	kinds := images(t, dir)
	all := load(t, dir, sourcetest.Options{}, kinds["over a raw"][:2]...)
	_, err := image.OpenSource(t.Context(), "none", all.open, image.Options{})
	require.ErrorAs(t, err, new(*image.Error))
	require.ErrorContains(t, err, "does not exist")
	_, err = image.OpenSource(t.Context(), "sub.qcow2", all.open, image.Options{})
	require.ErrorContains(t, err, `has the backing file "raw.raw", which does not exist`)
	require.Equal(t, 2, all.sum().Closed)

	// The end of a file may identify it.
	for _, length := range []int{100 << 10, 512 << 10, 512<<10 + 512, 2 << 20} {
		content := filetest.Sample(length, 6)
		copy(content[length-512:], "conectix")
		filetest.Put(t, dir, "fixed.raw", content, 0)
		all := load(t, dir, sourcetest.Options{}, "fixed.raw")
		_, err = image.OpenSource(t.Context(), "fixed.raw", all.open, image.Options{})
		require.ErrorContains(t, err, "is a fixed VHD image")
	}

	// A chain that comes back to the same content never ends, whatever its files are called.
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "loop.qcow2", "1M")
	filetest.QemuImg(t, dir, "rebase", "-u", "-F", "qcow2", "-b", "x/other.qcow2", "loop.qcow2")
	one := load(t, dir, sourcetest.Options{Digest: "sha256:1"}, "loop.qcow2")["loop.qcow2"]
	open := func(_ context.Context, name string) (image.Source, error) {
		require.Contains(t, []string{"loop.qcow2", "x/other.qcow2"}, name)
		return one, nil
	}
	_, err = image.OpenSource(t.Context(), "loop.qcow2", open, image.Options{})
	require.ErrorContains(t, err, "has a loop in its backing files")
}

// TestDigestInsteadOfAHash identifies an image without reading it.
func TestDigestInsteadOfAHash(t *testing.T) {
	dir := t.TempDir()
	filetest.Put(t, dir, "a.raw", filetest.Sample(3<<20, 1), 0)
	openAs := func(digest string) (*image.Image, *sourcetest.Far) {
		all := load(t, dir, sourcetest.Options{Digest: digest}, "a.raw")
		img := testtool.Must(image.OpenSource(t.Context(), "a.raw", all.open, image.Options{}))(t)
		t.Cleanup(func() { img.Close() })
		return img, all["a.raw"]
	}
	img, source := openAs("sha256:1")
	before := source.Stats().Reads
	prints := img.Unhashed()
	require.True(t, image.Identified(prints))
	same, err := img.Fingerprint(t.Context(), img.Hashes(nil), slots.New(1, slots.Options{}))
	require.NoError(t, err)
	require.Equal(t, prints, same)
	again, source2 := openAs("sha256:1")
	require.False(t, again.Touched(prints))
	reason, now := testtool.Must2(again.Compare(t.Context(), prints))(t)
	require.Empty(t, reason)
	require.Equal(t, prints, now)
	require.Equal(t, before, source.Stats().Reads)
	require.Equal(t, before, source2.Stats().Reads)

	other, _ := openAs("sha256:2")
	require.True(t, other.Touched(prints))
	reason, _ = testtool.Must2(other.Compare(t.Context(), prints))(t)
	require.Equal(t, `the image has changed: "a.raw" is sha256:2 now, and was sha256:1`, reason)

	// If only one of the two has a digest, the hash decides, if there is one.
	near := testtool.Must(image.Open(filepath.Join(dir, "a.raw"), image.Options{}))(t)
	defer near.Close()
	reason, _ = testtool.Must2(near.Compare(t.Context(), prints))(t)
	require.Contains(t, reason, "was known by its digest, sha256:1")
	hashed, err := near.Fingerprint(t.Context(), near.Hashes(nil), slots.New(1, slots.Options{}))
	require.NoError(t, err)
	reason, now = testtool.Must2(img.Compare(t.Context(), hashed))(t)
	require.Empty(t, reason)
	require.Equal(t, "sha256:1", now[0].Digest)
	_, _, err = img.Compare(t.Context(), near.Unhashed())
	require.ErrorIs(t, err, image.ErrNotIdentified)
}

// TestHashOfAFarImage reads several chunks at once, and waits for a source that is out of reach.
func TestHashOfAFarImage(t *testing.T) {
	dir := t.TempDir()
	filetest.Put(t, dir, "a.raw", filetest.Sample(20<<20, 1), 0)
	near := testtool.Must(image.Open(filepath.Join(dir, "a.raw"), image.Options{}))(t)
	defer near.Close()
	want, err := near.Fingerprint(t.Context(), near.Hashes(nil), slots.New(1, slots.Options{}))
	require.NoError(t, err)
	synctest.Test(t, func(t *testing.T) {
		s := slots.New(1, slots.Options{})
		all := load(t, dir, sourcetest.Options{Delay: time.Second, Parallel: 5}, "a.raw")
		img := testtool.Must(image.OpenSource(t.Context(), "a.raw", all.open, image.Options{}))(t)
		defer img.Close()
		contents := img.Hashes(nil)
		before := all.sum().Reads
		time.AfterFunc(1500*time.Millisecond, all.cut)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		_, err := img.Fingerprint(ctx, contents, s)
		require.ErrorIs(t, err, disk.ErrNotNow)
		require.False(t, errors.As(err, new(*disk.MediumError)))
		synctest.Wait()
		require.Equal(t, before+15, all.sum().Reads,
			"what was on its way arrives, and the next wait")
		all.mend()
		begin := time.Now()
		got := testtool.Must(img.Fingerprint(t.Context(), contents, s))(t)
		require.Equal(t, want[0].Hash, got[0].Hash)
		require.Equal(t, 5, all.sum().Most)
		require.Equal(t, 2*time.Second, time.Since(begin), "what was hashed is not read again")
	})
}

// TestWhatIsAtHand reads content that is already here, with a context that has ended.
func TestWhatIsAtHand(t *testing.T) {
	dir := t.TempDir()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for kind, names := range images(t, dir) {
		var reached atomic.Int64 // content before it is at hand
		reached.Store(math.MaxInt64)
		opt := sourcetest.Options{AtHand: func(off, length int64) bool {
			return off+length <= reached.Load()
		}}
		all := load(t, dir, opt, names...)
		img := testtool.Must(image.OpenSource(t.Context(), names[0], all.open, image.Options{}))(t)
		defer img.Close()
		all.cut()
		want, got := filetest.ReadAll(t, img, size), make([]byte, size)
		require.NoError(t, testtool.Err(img.ReadAt(ended, got, 0)), kind)
		require.Equal(t, -1, filetest.FirstDifference(want, got), kind)
		reached.Store(0)
		require.ErrorIs(t, testtool.Err(img.ReadAt(ended, got, 0)), disk.ErrNotNow, kind)
	}
}
