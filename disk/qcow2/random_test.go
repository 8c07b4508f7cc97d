package qcow2_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/testtool"
)

func runTool(t testing.TB, name string, args ...string) {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	require.NoError(t, err, "%s %s: %s", name, strings.Join(args, " "), out)
}

// near is what is read without a context.
type near struct{ io.ReaderAt }

func (n near) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	return n.ReaderAt.ReadAt(p, off)
}

// openFile opens an image and, by the names in it, its backing files, all in one directory.
func openFile(t testing.TB, path string) *qcow2.Image {
	t.Helper()
	f := testtool.Must(os.Open(path))(t)
	t.Cleanup(func() { _ = f.Close() })
	st := testtool.Must(f.Stat())(t)
	im := testtool.Must(qcow2.Open(t.Context(), near{f}, st.Size(), qcow2.Options{}))(t, path)
	if name := im.Info().BackingFile; name != "" {
		base := filepath.Join(filepath.Dir(path), filepath.Base(name))
		if im.Info().BackingFormat == "raw" {
			b := testtool.Must(os.Open(base))(t)
			t.Cleanup(func() { _ = b.Close() })
			im.SetBacking(near{b}, testtool.Must(b.Stat())(t).Size())
		} else {
			b := openFile(t, base)
			im.SetBacking(b, b.Size())
		}
	}
	return im
}

// TestRandomImages makes random images of every kind that qemu-img can make, and compares every
// byte with what qemu-img reads from them.
func TestRandomImages(t *testing.T) {
	testtool.Need(t, "qemu-img", "qemu-io")
	count := testtool.Rounds(24, 240)
	if n, err := strconv.Atoi(os.Getenv("QCOW2_RANDOM_IMAGES")); err == nil {
		count = n
	}
	const seed = 20171107
	t.Logf("%d images from seed %d", count, seed)
	dir := t.TempDir()
	var wg sync.WaitGroup
	next := make(chan int)
	for range 2 {
		wg.Go(func() {
			for i := range next {
				t.Run(strconv.Itoa(i), func(t *testing.T) {
					sub := filepath.Join(dir, strconv.Itoa(i))
					require.NoError(t, os.Mkdir(sub, 0o755))
					randomImage(t, rand.New(rand.NewPCG(seed, uint64(i))), sub)
					require.NoError(t, os.RemoveAll(sub))
				})
			}
		})
	}
	for i := range count {
		next <- i
	}
	close(next)
	wg.Wait()
}

func pick[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

// randomImage makes one chain of one to three images, and compares.
func randomImage(t *testing.T, r *rand.Rand, dir string) {
	size := int64(r.IntN(8<<20/512)+128) * 512
	backing, backingFormat := "", ""
	var script []string
	depth := 1 + r.IntN(3)
	if r.IntN(4) == 0 { // a raw base, of another size
		backing, backingFormat = "base.raw", "raw"
		b := make([]byte, max(512, size/512*int64(r.IntN(3))/2*512))
		for i := 0; i < len(b); i += 4096 {
			if r.IntN(2) == 0 {
				b[i] = byte(i>>12) | 1
			}
		}
		require.NoError(t, os.WriteFile(filepath.Join(dir, backing), b, 0o644))
	}
	for level := range depth {
		name := fmt.Sprintf("%d.qcow2", level)
		path := filepath.Join(dir, name)
		opts := randomOptions(r, backing != "")
		args := []string{"create", "-q", "-f", "qcow2", "-o", opts}
		if backing != "" {
			args = append(args, "-b", backing, "-F", backingFormat)
		}
		runTool(t, "qemu-img", append(args, path, strconv.FormatInt(size, 10))...)
		writeText(t, r, dir)
		script = randomWrites(r, size, !strings.Contains(opts, "preallocation"),
			filepath.Join(dir, "text"))
		if len(script) > 0 {
			runTool(t, "qemu-io", append([]string{"-f", "qcow2", path}, script...)...)
		}
		snapshot := r.IntN(8) == 0
		if snapshot {
			runTool(t, "qemu-img", "snapshot", "-c", "s", path)
			runTool(t, "qemu-io",
				append([]string{"-f", "qcow2", path},
					randomWrites(r, size, false, filepath.Join(dir, "text"))...)...)
		}
		// version 2 with a snapshot cannot be resized
		if r.IntN(6) == 0 && level == depth-1 && !snapshot {
			size += int64(r.IntN(2048)+1) * 512
			runTool(t, "qemu-img", "resize", "-q", "-f", "qcow2", path, strconv.FormatInt(size, 10))
		}
		backing, backingFormat = name, "qcow2"
	}
	top := filepath.Join(dir, backing)
	if r.IntN(3) == 0 { // what qemu-img convert writes looks different from what a guest does
		flat := filepath.Join(dir, "flat.qcow2")
		opts := "cluster_size=" + pick(r, "512", "4k", "64k", "2M") + ",compression_type=" +
			pick(r, "zlib", "zstd")
		runTool(t, "qemu-img", "convert", "-c", "-O", "qcow2", "-o", opts, top, flat)
		top = flat
	}
	raw := filepath.Join(dir, "raw")
	runTool(t, "qemu-img", "convert", "-f", "qcow2", "-O", "raw", top, raw)
	want := testtool.Must(os.ReadFile(raw))(t)
	compareImage(t, r, openFile(t, top), want)
	compareArrival(t, top, want)
}

func randomOptions(r *rand.Rand, backing bool) string {
	cluster := pick(r, 512, 1024, 4096, 16384, 65536, 65536, 262144, 2<<20)
	o := []string{"cluster_size=" + strconv.Itoa(cluster)}
	if r.IntN(4) == 0 {
		return strings.Join(append(o, "compat=0.10"), ",")
	}
	o = append(o, "compat=1.1", "compression_type="+pick(r, "zlib", "zstd"))
	if r.IntN(4) == 0 {
		o = append(o, "lazy_refcounts=on")
	}
	extended := cluster >= 16384 && r.IntN(3) == 0
	if extended {
		o = append(o, "extended_l2=on")
	}
	if r.IntN(5) == 0 && !backing {
		o = append(o, "preallocation="+pick(r, "metadata", "falloc"))
	}
	return strings.Join(o, ",")
}

// writeText writes content that is compressed with literals, matches and codes of its own: words,
// numbers and noise. A pattern of one byte is nothing but a run.
func writeText(t *testing.T, r *rand.Rand, dir string) {
	t.Helper()
	const size = 256 << 10 // qemu-io repeats it
	var b bytes.Buffer
	words := strings.Fields("the quick brown fox jumps over a lazy dog 0123 0x7f == " +
		"/usr/lib/libc.so.6 \x00\x00\x01 \xff\xfe kubevirt")
	words = words[:1+r.IntN(len(words))]
	for b.Len() < size {
		b.WriteString(words[r.IntN(len(words))])
		switch r.IntN(16) {
		case 0:
			b.WriteString(strconv.FormatUint(r.Uint64(), 36))
		case 1:
			b.Write(make([]byte, r.IntN(300)))
		default:
			b.WriteByte(byte(r.IntN(1 + r.IntN(256))))
		}
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "text"), b.Bytes()[:size], 0o644))
}

// randomWrites is a script for qemu-io; some of what it writes is the start of a file. Clusters can
// be written compressed only while they are not allocated.
func randomWrites(r *rand.Rand, size int64, compress bool, file string) []string {
	var s []string
	add := func(format string, args ...any) { s = append(s, "-c", fmt.Sprintf(format, args...)) }
	for off := int64(0); compress && off < size; off += 2 << 20 {
		switch r.IntN(3) {
		case 0:
			add("write -q -c -P %d %d %d", r.IntN(255)+1, off, min(size-off, 2<<20))
		case 1:
			add("write -q -c -s %s %d %d", file, off, min(size-off, 2<<20))
		}
	}
	for range r.IntN(24) + 1 {
		off := r.Int64N(size/512) * 512
		n := min(size-off, (r.Int64N(pick(r, int64(8), 256, 4096))+1)*512)
		switch r.IntN(7) {
		case 0:
			add("write -q -z %d %d", off, n)
		case 1:
			add("write -q -z -u %d %d", off, n)
		case 2:
			add("discard -q %d %d", off, n)
		case 3:
			add("write -q -s %s %d %d", file, off, min(n, 2<<20))
		default:
			add("write -q -P %d %d %d", r.IntN(255)+1, off, n)
		}
	}
	return s
}

// compareImage reads everything in one piece and in random pieces, and checks that extents agree
// with the content.
func compareImage(t *testing.T, r *rand.Rand, im *qcow2.Image, want []byte) {
	require.Equal(t, int64(len(want)), im.Size())
	got := bytes.Repeat([]byte{0xa5}, len(want)) // zeros have to be written, too
	n := testtool.Must(im.ReadAt(t.Context(), got, 0))(t)
	require.Equal(t, len(want), n)
	if !bytes.Equal(got, want) {
		for i := range got {
			require.Equal(t, want[i], got[i], "byte %d", i)
		}
	}
	for range 20 {
		off := r.Int64N(im.Size())
		part := bytes.Repeat([]byte{0xa5}, int(min(im.Size()-off, r.Int64N(200<<10)+1)))
		require.NoError(t, testtool.Err(im.ReadAt(t.Context(), part, off)))
		require.True(t, bytes.Equal(want[off:off+int64(len(part))], part), "%d bytes at %d",
			len(part), off)
	}
	stored := make(map[qcow2.Kind]int64)
	for off := int64(0); off < im.Size(); {
		n, kind := testtool.Must2(im.Extent(t.Context(), off, im.Size()-off))(t)
		require.Positive(t, n)
		stored[kind] += n
		within := r.Int64N(n)
		length := r.Int64N(n-within) + 1
		part, same := testtool.Must2(im.Extent(t.Context(), off+within, length))(t)
		require.Equal(t, kind, same, "%d bytes from %d of the run of %d bytes at %d", length,
			within, n, off)
		require.Equal(t, length, part, "%d bytes from %d of the run of %d bytes at %d", length,
			within, n, off)
		if kind == qcow2.KindZero {
			require.Equal(t, -1,
				bytes.IndexFunc(want[off:off+n], func(c rune) bool { return c != 0 }),
				"zeros at %d", off)
		}
		off += n
	}
	require.Equal(t, stored[qcow2.KindData], im.Info().PlainSize)
	require.Equal(t, stored[qcow2.KindCompressed], im.Info().CompressedSize)
}

// arriveAt reads an image as it comes. written tells whether the guest got anything.
func arriveAt(t *testing.T, image []byte) (err error, written bool) {
	a, err := qcow2.NewArrival(image, int64(len(image)), qcow2.Options{})
	for err == nil && !a.Done() {
		err = a.Pass(t.Context(), bytes.NewReader(image), qcow2.Guest{
			Write: func([]byte, int64) error {
				written = true
				return nil
			}})
	}
	return err, written
}

// TestWhatQEMURefuses changes every field of the header and the lengths of its extensions, one at a
// time. What QEMU does not open is refused here, too: `inspect` would call an image servable that
// no other tool reads. The same holds when it is expanded as it comes, and then nothing is written.
// Only the place of the table of snapshots is checked, because nothing in it is served.
func TestWhatQEMURefuses(t *testing.T) {
	testtool.Need(t, "qemu-img")
	dir := t.TempDir()
	path := filepath.Join(dir, "image.qcow2")
	raw := filepath.Join(dir, "raw")
	require.NoError(t, os.WriteFile(raw, bytes.Repeat([]byte("data"), 256<<10), 0o600))
	runTool(t, "qemu-img", "convert", "-f", "raw", "-O", "qcow2", "-o",
		"cluster_size=4k,compression_type=zstd", raw, path)
	whole := testtool.Must(os.ReadFile(path))(t)
	be := binary.BigEndian
	type field struct {
		name     string
		off, len int
	}
	var fields []field
	for off := 4; off < int(be.Uint32(whole[100:])); off += 4 {
		fields = append(fields, field{fmt.Sprintf("header byte %d", off), off, 4})
	}
	for off := int(be.Uint32(whole[100:])); be.Uint32(whole[off:]) != 0; {
		n := int(be.Uint32(whole[off+4:]))
		name := fmt.Sprintf("length of extension %#x", be.Uint32(whole[off:]))
		fields = append(fields, field{name, off + 4, 4})
		off += 8 + (n+7)&^7
	}
	refused := 0
	for _, f := range fields {
		was := be.Uint32(whole[f.off:])
		for _, value := range []uint32{0, 1, was + 1, was << 1, was | 1<<31, 1<<32 - 1} {
			if value == was {
				continue
			}
			image := bytes.Clone(whole)
			be.PutUint32(image[f.off:], value)
			require.NoError(t, os.WriteFile(path, image, 0o600))
			says, err := exec.Command("qemu-img", "info", "-f", "qcow2", path).CombinedOutput()
			file, openErr := os.Open(path)
			require.NoError(t, openErr)
			_, own := qcow2.Open(t.Context(), near{file}, int64(len(image)), qcow2.Options{})
			require.NoError(t, file.Close())
			again, written := arriveAt(t, image)
			require.False(t, again != nil && written, "%s is %#x: %v", f.name, value, again)
			if err != nil {
				refused++
				if own == nil || again == nil {
					t.Errorf("%s is %#x instead of %#x: opened, and QEMU refuses it: %s", f.name,
						value, was, says)
				}
			} else if own != nil {
				t.Logf("%s is %#x instead of %#x: QEMU opens it: %v", f.name, value, was, own)
			}
		}
	}
	require.Greater(t, refused, 50)
}
