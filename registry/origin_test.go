package registry

import (
	"bytes"
	"context"
	"io"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
)

// countedDisk is a disk as the bytes of an image, which counts what is read.
type countedDisk struct {
	content []byte
	read    *atomic.Int64
}

func (d countedDisk) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	d.read.Add(int64(len(p)))
	n := copy(p, d.content[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (d countedDisk) Extent(off, length int64) (disk.Extent, error) {
	return disk.Extent{Length: min(length, d.Size()-off), Data: true}, nil
}

func (d countedDisk) Size() int64              { return int64(len(d.content)) }
func (d countedDisk) Identity() image.Identity { return image.Identity{} }
func (d countedDisk) Parallel() int            { return 1 }
func (d countedDisk) WillRead(int64, int64)    {}
func (d countedDisk) Check() error             { return nil }
func (d countedDisk) Close() error             { return nil }

// TestPushOntoOrigin: of a disk that came from an image, only what has changed since is read, and
// the result is the same as if all was. That is true for the versions that others were made of,
// too. Of a disk that came from elsewhere, all is read.
func TestPushOntoOrigin(t *testing.T) {
	o := newOnto(t)
	first := likeADisk(7, 24<<20)
	second := bytes.Clone(first)
	copy(second[3<<20:], noise(370, 200<<10))
	clear(second[9<<20 : 9<<20+128<<10])
	third := bytes.Clone(second)
	copy(third[3<<20+64<<10:3<<20+200<<10], first[3<<20+64<<10:]) // as it was once
	copy(third[17<<20+512:], noise(371, 1000))
	third = append(third, noise(372, 300<<10)...)
	copy(third[len(third)-100<<10:], make([]byte, 100<<10))
	o.push(t, o.file(t, "vm.raw", first), "vm/a:1", "")

	s := newStreaming(t, o.c, t.TempDir(), t.TempDir())
	img := s.disk(t, s.open(t, o.m.ref(t, "vm/a:1")), "vm.qcow2")
	files := image.Contents(img.Unhashed())
	require.Len(t, files, 1)

	// since is what a disk has written since the first version, in blocks of 4 KiB. It has written
	// some as they were.
	since := func(content []byte) func(off, length int64) (bool, int64, error) {
		return func(off, length int64) (bool, int64, error) {
			end := min(off/4096*4096+4096, off+length)
			was := make([]byte, end-off)
			if off < int64(len(first)) {
				copy(was, first[off:])
			}
			return !bytes.Equal(was, content[off:end]) || off/4096 == 5000, end - off, nil
		}
	}
	commit := func(content []byte, ref, onto string, squash bool, origins ...Origin) (
		digest string, read int64) {
		d := countedDisk{content, new(atomic.Int64)}
		opt := PushOptions{CompressRaw: qcow2.CompressionZstd, Progress: new(Progress),
			Onto: Onto{Image: o.m.ref(t, onto).String(), Squash: squash, Origins: origins},
			Open: func(name string) (*image.Image, error) {
				return image.OpenSource(t.Context(), name,
					func(context.Context, string) (image.Source, error) { return d, nil },
					image.Options{Formats: map[string]image.Format{name: image.FormatRaw}})
			}}
		digest = pushes(t, o.c, []string{filepath.Join(o.dir, "vm.raw")}, o.m.ref(t, ref), opt)
		require.Equal(t, opt.Progress.Total(), opt.Progress.Done())
		return digest, d.read.Load()
	}
	for _, c := range []struct {
		content   []byte
		ref, onto string
		squash    bool
	}{{second, "vm/a:2", "vm/a:1", false}, {third, "vm/a:3", "vm/a:2", false},
		{third, "vm/b:3", "vm/a:2", true}, {third, "vm/c:3", "vm/a:1", false}} {
		want, all := commit(c.content, c.ref, c.onto, c.squash)
		require.Greater(t, all, int64(len(c.content)))
		origin := Origin{Files: files, Changed: since(c.content)}
		got, read := commit(c.content, c.ref, c.onto, c.squash, origin)
		require.Equal(t, want, got, c.ref)
		require.Less(t, read, all/4, c.ref)
		origin.Files = []string{files[0][:len(files[0])-1] + "x"}
		got, read = commit(c.content, c.ref, c.onto, c.squash, origin)
		require.Equal(t, want, got, c.ref)
		require.Equal(t, all, read, c.ref)
	}
	o.requireDisk(t, "vm/a:3", "vm.2.qcow2", third, true)

	// An image that has the content of an earlier time is known by its digest.
	was := bytes.Clone(third)
	copy(third[12<<20:], noise(373, 5000))
	digest, _ := commit(was, "vm/a:3", "vm/a:2", false)
	want, all := commit(third, "vm/a:4", "vm/a:3", false)
	origin := Origin{Digest: digest, Changed: func(off, length int64) (bool, int64, error) {
		end := min(off/4096*4096+4096, off+length)
		return !bytes.Equal(was[off:end], third[off:end]), end - off, nil
	}}
	got, read := commit(third, "vm/a:4", "vm/a:3", false, Origin{Files: files,
		Changed: since(third)}, origin)
	require.Equal(t, want, got)
	require.Less(t, read, all/8)
	origin.Digest = want
	got, read = commit(third, "vm/a:4", "vm/a:3", false, origin)
	require.Equal(t, want, got)
	require.Equal(t, all, read)
}
