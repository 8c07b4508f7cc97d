package registry

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// likeADisk is content as disks have it: noise that does not compress, text that does, and zeros.
func likeADisk(seed uint64, size int) []byte {
	r := rand.New(rand.NewPCG(seed, 36))
	b := make([]byte, size)
	for off := 0; off < size; {
		end := min(size, off+4096*(1+r.IntN(64)))
		switch p := b[off:end]; r.IntN(4) {
		case 0:
		case 1:
			for i := 0; i+8 <= len(p); i += 8 {
				binary.LittleEndian.PutUint64(p[i:], r.Uint64())
			}
		default:
			for i := 0; i+8 <= len(p); i += 8 {
				binary.LittleEndian.PutUint64(p[i:], uint64(r.IntN(1000))<<24)
			}
		}
		off = end
	}
	return b
}

// ontoCase is a disk in a registry, and what comes next.
type ontoCase struct {
	m    *memory
	c    *Client
	dir  string
	base transport.Reference
	said []string // warnings
}

func newOnto(t *testing.T) *ontoCase {
	o := &ontoCase{m: newMemory(t), dir: t.TempDir()}
	o.base, _ = newBase(t)
	o.c = newClient(t, transport.Options{Insecure: []string{o.m.host},
		Warn: func(text string) { o.said = append(o.said, text) }})
	return o
}

// file writes a raw file of that name.
func (o *ontoCase) file(t *testing.T, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(o.dir, name)
	require.NoError(t, os.WriteFile(path, content, 0o644))
	return path
}

// push stores a disk, onto another image unless that is "".
func (o *ontoCase) push(t *testing.T, file, ref, onto string) string {
	t.Helper()
	opt := PushOptions{Base: o.base.String(), CompressRaw: qcow2.CompressionZstd,
		Progress: new(Progress)}
	if onto != "" {
		opt.Base, opt.Onto.Image = "", o.m.ref(t, onto).String()
	}
	digest := pushes(t, o.c, []string{file}, o.m.ref(t, ref), opt)
	require.Equal(t, opt.Progress.Total(), opt.Progress.Done())
	return digest
}

// requireDisk fails unless the image has only that disk, pulled and streamed. A streamed one has an
// index.
func (o *ontoCase) requireDisk(t *testing.T, ref, name string, want []byte, indexed bool) {
	t.Helper()
	to := filepath.Join(t.TempDir(), "disk.raw")
	require.NoError(t, testtool.Err2(o.c.Pull(t.Context(), o.m.ref(t, ref), to, PullOptions{})))
	onlyFile(t, filepath.Dir(to), "disk.raw", want)
	s := newStreaming(t, o.c, t.TempDir(), t.TempDir())
	st := s.open(t, o.m.ref(t, ref))
	require.Equal(t, indexed, st.index != nil)
	require.Equal(t, []string{name}, namesOfDisks(st.Disks()))
	require.True(t, bytes.Equal(want, contentOf(t, s.disk(t, st, name))), "streamed")
}

// changed is a copy of a disk of which about one percent is different: pieces that are rewritten,
// one that becomes zeros, and zeros that become something.
func changed(content []byte) []byte {
	now := bytes.Clone(content)
	copy(now[5<<20+123:], noise(360, 100<<10))
	copy(now[11<<20:], "a few bytes")
	clear(now[20<<20 : 20<<20+64<<10])
	copy(now[len(now)-512:], "the end")
	return now
}

// TestPushOnto: the next version of a disk is an image with the layers of the last one, and one
// with what differs. Not much is sent, and of a raw disk, not much is fetched.
func TestPushOnto(t *testing.T) {
	old := likeADisk(1, 32<<20+512)
	now := changed(old)
	for _, c := range []qcow2.Compression{
		qcow2.CompressionZstd, qcow2.CompressionZlib, qcow2.CompressionNone, "",
	} {
		t.Run("compressed by "+string(c), func(t *testing.T) {
			o := newOnto(t)
			opt := PushOptions{Base: o.base.String(), CompressRaw: c}
			pushes(t, o.c, []string{o.file(t, "vm.raw", old)}, o.m.ref(t, "vm/a:1"), opt)
			whole, _ := o.m.traffic()

			file := o.file(t, "vm.raw", now)
			o.m.requests("", "")
			digest := o.push(t, file, "vm/a:2", "vm/a:1")
			came, went := o.m.traffic()
			require.Less(t, came, whole/10, "of %d bytes", whole)
			if c == "" {
				require.Less(t, went, whole/5, "of %d bytes: chunks with changes", whole)
				require.Empty(t, o.said)
			} else {
				require.Contains(t, strings.Join(o.said, ""), "had to be fetched")
			}
			names := []string{"vm.qcow2", "vm.1.qcow2", "vm.2.qcow2", "vm.3.qcow2"}
			if c == "" {
				names = append([]string{"vm.raw"}, names...)
			}
			o.requireDisk(t, "vm/a:2", names[1], now, true)
			o.requireDisk(t, "vm/a:1", names[0], old, true)

			was := resolves(t, o.c, o.m.ref(t, "vm/a:1"))
			is := resolves(t, o.c, o.m.ref(t, "vm/a:2"))
			require.Len(t, is.Manifest.Layers, len(was.Manifest.Layers)+2)
			for i, l := range was.Manifest.Layers {
				require.Equal(t, l.Digest, is.Manifest.Layers[i].Digest)
			}
			config, err := is.Small(t.Context(), is.Manifest.Config, transport.MaxManifest)
			require.NoError(t, err)
			require.Contains(t, string(config), "X-Own", "what is not known is kept")

			require.Equal(t, digest, o.push(t, file, "vm/other:2", "vm/a:1"), "reproducible")
			chain := changed(now[:30<<20])
			copy(chain[7<<20:], noise(361, 3000))
			o.push(t, o.file(t, "vm.raw", chain), "vm/a:3", "vm/a:2")
			o.requireDisk(t, "vm/a:3", names[2], chain, true)
			grown := append(bytes.Clone(chain), noise(362, 5<<20)...)
			o.push(t, o.file(t, "vm.raw", grown), "vm/a:4", "vm/a:3")
			o.requireDisk(t, "vm/a:4", names[3], grown, true)
		})
	}
}

// TestPushOntoOthers: a copy of the old file saves fetching it. Images without an index are fetched
// as a whole.
func TestPushOntoOthers(t *testing.T) {
	old := likeADisk(2, 24<<20)
	now := changed(old)
	t.Run("compressed by qemu-img", func(t *testing.T) {
		o := newOnto(t)
		path := o.file(t, "vm.qcow2", qcow2Of(t, old, "-c"))
		o.push(t, path, "vm/a:1", "")
		o.m.traffic()
		opt := PushOptions{CompressRaw: qcow2.CompressionZstd,
			Onto: Onto{Image: o.m.ref(t, "vm/a:1").String(), File: path}}
		pushes(t, o.c, []string{o.file(t, "vm.raw", now)}, o.m.ref(t, "vm/a:3"), opt)
		came, went := o.m.traffic()
		require.Less(t, came, int64(len(old)/10), "the old file is here")
		require.Less(t, went, int64(len(old)/10))
		o.requireDisk(t, "vm/a:3", "vm.1.qcow2", now, true)
	})
	for name, l := range map[string][]byte{
		"qcow2": tarOf(t, tarFile{Name: "disk/vm.qcow2", Content: qcow2Of(t, old)}),
		"raw":   tarOf(t, tarFile{Name: "disk/vm.img", Content: old}),
	} {
		t.Run("built by docker, "+name, func(t *testing.T) {
			o := newOnto(t)
			ref := baseOf(t, gzipped(t, l))
			opt := PushOptions{CompressRaw: qcow2.CompressionZstd, Onto: Onto{Image: ref.String()}}
			pushes(t, o.c, []string{o.file(t, "vm.raw", now)}, o.m.ref(t, "vm/a:2"), opt)
			require.Contains(t, strings.Join(o.said, "\n"), "has no index")
			brings(t, o.c, o.m.ref(t, "vm/a:2"), PullOptions{}, now)
		})
	}
}

// TestPushOntoOthersAgain: without an index, too, the new file takes the name of none below it, and
// a chain that pull would refuse is not made.
func TestPushOntoOthersAgain(t *testing.T) {
	o := newOnto(t)
	content := likeADisk(2, 4<<20)
	ref := baseOf(t, gzipped(t, tarOf(t, tarFile{Name: "disk/vm.qcow2",
		Content: qcow2Of(t, content)})))
	for n := range maxChain + 1 {
		copy(content[n*64<<10:], noise(uint64(400+n), 1000))
		opt := PushOptions{CompressRaw: qcow2.CompressionZstd, Onto: Onto{Image: ref.String()}}
		files := []string{o.file(t, "vm.raw", content)}
		ref = o.m.ref(t, fmt.Sprintf("vm/a:%d", n))
		if n == maxChain {
			_, err := o.c.Push(t.Context(), files, ref, opt)
			require.ErrorContains(t, err, "could not be pulled any more")
			return
		}
		pushes(t, o.c, files, ref, opt)
		brings(t, o.c, ref, PullOptions{}, content)
	}
}

// TestPushOntoNothing: a disk that has nothing of the old one is pushed as a whole.
func TestPushOntoNothing(t *testing.T) {
	o := newOnto(t)
	o.push(t, o.file(t, "vm.raw", noise(363, 4<<20)), "vm/a:1", "")
	other := noise(364, 4<<20)
	file := o.file(t, "vm.raw", other)
	opt := PushOptions{CompressRaw: qcow2.CompressionZstd,
		Onto: Onto{Image: o.m.ref(t, "vm/a:1").String()}}
	_, err := o.c.Push(t.Context(), []string{file}, o.m.ref(t, "vm/a:2"), opt)
	require.ErrorContains(t, err, "--base")
	opt.Base = o.base.String()
	digest := pushes(t, o.c, []string{file}, o.m.ref(t, "vm/a:2"), opt)
	require.Contains(t, strings.Join(o.said, "\n"), "nothing of")
	require.Equal(t, o.push(t, file, "vm/whole:1", ""), digest)
}

// TestPushOntoOneOfSeveral: the disk of the same name is the old one, and the others stay as they
// are, with their LUNs.
func TestPushOntoOneOfSeveral(t *testing.T) {
	o := newOnto(t)
	a, b := likeADisk(3, 4<<20), likeADisk(4, 6<<20)
	opt := PushOptions{Base: o.base.String(), CompressRaw: qcow2.CompressionZstd}
	pushes(t, o.c, []string{o.file(t, "a.raw", a), o.file(t, "b.raw", b)}, o.m.ref(t, "vm/a:1"),
		opt)
	onto := PushOptions{CompressRaw: qcow2.CompressionZstd,
		Onto: Onto{Image: o.m.ref(t, "vm/a:1").String()}}
	copy(b[2<<20:], noise(365, 1000))
	_, err := o.c.Push(t.Context(), []string{o.file(t, "c.raw", b)}, o.m.ref(t, "vm/a:2"), onto)
	require.ErrorContains(t, err, "none of its disks")
	missing := onto
	missing.Onto.Image = o.m.ref(t, "vm/gone:1").String()
	_, err = o.c.Push(t.Context(), []string{o.file(t, "b.raw", b)}, o.m.ref(t, "vm/a:2"), missing)
	require.ErrorContains(t, err, "the image to push onto: ")
	require.ErrorContains(t, err, "check the name, and the tag")
	pushes(t, o.c, []string{o.file(t, "b.raw", b)}, o.m.ref(t, "vm/a:2"), onto)
	ref := o.m.ref(t, "vm/a:2")
	s := newStreaming(t, o.c, t.TempDir(), t.TempDir())
	st := s.open(t, ref)
	require.NotNil(t, st.index)
	require.Equal(t, []string{"a.qcow2", "b.1.qcow2"}, namesOfDisks(st.Disks()))
	require.True(t, bytes.Equal(a, contentOf(t, s.disk(t, st, "a.qcow2"))))
	require.True(t, bytes.Equal(b, contentOf(t, s.disk(t, st, "b.1.qcow2"))))
	dir := t.TempDir()
	require.NoError(t, testtool.Err2(o.c.Pull(t.Context(), ref, dir, PullOptions{})))
	for name, want := range map[string][]byte{"a.raw": a, "b.1.raw": b} {
		require.True(t, bytes.Equal(want, bytesOf(t, filepath.Join(dir, name))), name)
	}
	_, err = o.c.Push(t.Context(), []string{filepath.Join(o.dir, "a.raw"),
		filepath.Join(o.dir, "b.raw")}, o.m.ref(t, "vm/a:3"), onto)
	require.ErrorContains(t, err, "push one disk")

	bare := baseOf(t, gzipped(t, tarOf(t, tarFile{Name: "disk/a.img", Content: a},
		tarFile{Name: "disk/b.img", Content: b})))
	onto.Onto = Onto{Image: bare.String(), File: filepath.Join(o.dir, "a.raw")}
	_, err = o.c.Push(t.Context(), []string{filepath.Join(o.dir, "c.raw")}, o.m.ref(t, "vm/a:3"),
		onto)
	require.ErrorContains(t, err, "none of its disks")
	require.NotContains(t, err.Error(), "closed")
}

// TestPushOntoKeepsBoot: what a guest read first of the old disk is read first of the new one,
// where it is different now.
func TestPushOntoKeepsBoot(t *testing.T) {
	o := newOnto(t)
	old := likeADisk(5, 16<<20)
	now := bytes.Clone(old)
	copy(now[8<<20:], noise(366, 64<<10))
	file := o.file(t, "vm.raw", old)
	opt := PushOptions{Base: o.base.String(), CompressRaw: qcow2.CompressionZstd,
		Boot: &BootOrder{Disks: []BootDisk{{Name: "vm.raw", Size: 16 << 20,
			Blocks: []BootRun{{First: 8 << 20 / BootBlock, Count: 1}, {First: 1, Count: 2}}}}}}
	pushes(t, o.c, []string{file}, o.m.ref(t, "vm/a:1"), opt)
	o.push(t, o.file(t, "vm.raw", now), "vm/a:2", "vm/a:1")
	r := resolves(t, o.c, o.m.ref(t, "vm/a:2"))
	boots := make(map[string]int)
	for _, f := range fullIndex(t, r).Files {
		boots[f.Name] = len(f.Boot)
	}
	require.NotZero(t, boots["disk/vm.qcow2"])
	require.NotZero(t, boots["disk/vm.1.qcow2"])

	copy(now[12<<20:], "not read at boot")
	o.squash(t, o.file(t, "vm.raw", now), "vm/a:3", "vm/a:2")
	r = resolves(t, o.c, o.m.ref(t, "vm/a:3"))
	for _, f := range fullIndex(t, r).Files {
		require.Equal(t, boots[f.Name], len(f.Boot), f.Name)
	}
}

// TestPushOntoChains: a chain that pull would refuse is not made.
func TestPushOntoChains(t *testing.T) {
	o := newOnto(t)
	content := likeADisk(6, 4<<20)
	o.push(t, o.file(t, "vm.raw", content), "vm/a:0", "")
	for n := range maxChain {
		copy(content[n*64<<10:], noise(uint64(367+n), 1000))
		o.push(t, o.file(t, "vm.raw", content), "vm/a:"+string(rune('1'+n)),
			"vm/a:"+string(rune('0'+n)))
	}
	o.requireDisk(t, "vm/a:8", "vm.8.qcow2", content, true)
	copy(content, "once more")
	_, err := o.c.Push(t.Context(), []string{o.file(t, "vm.raw", content)}, o.m.ref(t, "vm/a:9"),
		PushOptions{Onto: Onto{Image: o.m.ref(t, "vm/a:8").String()}})
	require.ErrorContains(t, err, "could not be pulled any more: say --squash")
	require.Contains(t, o.said[len(o.said)-1], "push the next version with --squash")
	o.squash(t, filepath.Join(o.dir, "vm.raw"), "vm/a:9", "vm/a:8")
	o.requireDisk(t, "vm/a:9", "vm.1.qcow2", content, true)
}

// TestPushOntoLimits: an image that is larger than what is accepted is refused.
func TestPushOntoLimits(t *testing.T) {
	o := newOnto(t)
	o.push(t, o.file(t, "vm.raw", likeADisk(7, 4<<20)), "vm/a:1", "")
	_, err := o.c.Push(t.Context(), []string{o.file(t, "vm.raw", likeADisk(7, 1<<20))},
		o.m.ref(t, "vm/a:2"), PushOptions{Image: image.Options{MaxVirtualSize: 2 << 20},
			Onto: Onto{Image: o.m.ref(t, "vm/a:1").String()}})
	require.ErrorContains(t, err, "limit")
}

// TestPushOntoLyingIndex: the index of the old image claims digests of content that the image does
// not have. An image that is pushed onto it is not the new disk, and so it cannot be had: neither
// pulled nor read from the registry.
func TestPushOntoLyingIndex(t *testing.T) {
	o := newOnto(t)
	old := noise(380, 4<<20)
	now := bytes.Clone(old)
	copy(now[2<<20:], noise(381, 256<<10))
	copy(now[3<<20:], noise(382, 1000))
	ref := o.m.ref(t, "vm/a:1")
	pushes(t, o.c, []string{o.file(t, "vm.raw", old)}, ref, PushOptions{Base: o.base.String()})

	r := resolves(t, o.c, ref)
	x := fullIndex(t, r)
	digests := make([]byte, x.Digests.Size())
	require.NoError(t, testtool.Err(x.Digests.ReadAt(digests, 0)))
	lie := chunkDigests(now)
	copy(digests[8*digestSize:], lie[8*digestSize:9*digestSize]) // of the first change
	x.Digests, x.Packed = sectionOf(digests), nil
	forged := testtool.Must(x.Layer(false))(t)
	m := *r.Manifest
	for i, l := range m.Layers {
		if l.Annotations[annotationIndex] != "" {
			m.Layers[i] = blobOf(forged, l.MediaType)
			m.Layers[i].Annotations = l.Annotations
		}
	}
	text := testtool.Must(json.Marshal(m))(t)
	u := testtool.Must(o.c.Uploader(ref, transport.Reference{}, new(atomic.Int64), ""))(t)
	require.NoError(t, u.Blob(t.Context(), blobOf(forged, ""), bytes.NewReader(forged)))
	require.NoError(t, u.Manifest(t.Context(), "lie", string(m.MediaType), text))

	file := o.file(t, "vm.raw", now)
	o.push(t, file, "vm/a:2", "vm/a:lie")
	_, _, err := o.c.Pull(t.Context(), o.m.ref(t, "vm/a:2"), filepath.Join(t.TempDir(), "disk.raw"),
		PullOptions{})
	require.ErrorContains(t, err, "not what the index of the image says")
	s := newStreaming(t, o.c, t.TempDir(), t.TempDir())
	s.opt.timeout = time.Second
	st := s.open(t, o.m.ref(t, "vm/a:2"))
	img := s.disk(t, st, "vm.qcow2")
	_, err = img.ReadAt(t.Context(), make([]byte, 512), 2<<20)
	require.ErrorContains(t, err, "push the image again")
}

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
