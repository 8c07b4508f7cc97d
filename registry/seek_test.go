package registry

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
)

// removeFetched removes fetched images to make room, but keeps the files for reading them by
// ranges. With all set, it removes those, too.
func removeFetched(t testing.TB, cacheDir string, all bool) {
	t.Helper()
	others, err := Others(cacheDir)()
	require.NoError(t, err)
	n := 0
	for _, o := range others {
		if all || !strings.HasSuffix(o.Name, seekSuffix) {
			require.NoError(t, o.Remove())
			n++
		}
	}
	require.Positive(t, n)
}

// once serves all disks of an image, passes them to look, and stops serving.
func (s *streaming) once(t testing.TB, ref Reference,
	look func(name string, img *image.Image)) (disks []StreamDisk) {
	t.Helper()
	st, err := s.client.Stream(t.Context(), ref, s.opt)
	require.NoError(t, err)
	for _, d := range st.Disks() {
		img, err := st.Open(t.Context(), d.Name, image.Options{})
		require.NoError(t, err)
		look(d.Name, img)
		require.NoError(t, img.Close())
	}
	disks = st.Disks()
	require.NoError(t, st.Close())
	return disks
}

// seekImage is an image as other tools build it, with layers that are compressed by gzip.
func seekImage(t testing.TB) (l *lying, ref Reference, layer []byte, want map[string][]byte) {
	raw := bytes.Join([][]byte{noise(91, 3<<20), make([]byte, 5<<20),
		bytes.Repeat([]byte("many words, "), 1<<18), noise(92, 2<<20+512)}, nil)
	base := noise(93, 4<<20)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "base.img"), base, 0o644))
	qemuImg(t, dir, "create", "-f", "qcow2", "-b", "base.img", "-F", "raw", "top.qcow2", "5M")
	top, err := os.ReadFile(filepath.Join(dir, "top.qcow2"))
	require.NoError(t, err)
	packed := qcow2Of(t, raw, "-c")
	l = newLying(t)
	layer = gzipped(t, tarOf(t, tarFile{name: "disk/odd.img", content: raw},
		tarFile{name: "disk/b.qcow2", content: packed},
		tarFile{name: "disk/top.qcow2", content: top},
		tarFile{name: "disk/linked.img", kind: '1', link: "disk/odd.img"},
		tarFile{name: "etc/other", content: noise(94, 1<<20)}))
	l.tags["1"] = l.image(t, gzipped(t, tarOf(t, tarFile{name: "etc/passwd", content: []byte("x")},
		tarFile{name: "disk/base.img", content: base},
		tarFile{name: "disk/odd.img", content: []byte("hidden")})), layer)
	grown := append(bytes.Clone(base), make([]byte, 1<<20)...)
	return l, l.ref(t, "vm/a:1"), layer, map[string][]byte{"odd.img": raw, "linked.img": raw,
		"b.raw": raw, "top.raw": grown}
}

// TestSeek serves disks of gzip layers by ranges. They were fetched once and have been removed
// since. The disks are the same, and only the parts that are read are fetched.
func TestSeek(t *testing.T) {
	l, ref, layer, want := seekImage(t)
	dir, keep := t.TempDir(), t.TempDir()
	same := func(name string, img *image.Image) {
		require.True(t, bytes.Equal(want[name], contentOf(t, img)), name)
	}
	s := newStreaming(t, newClient(t, l.options()), dir, keep)
	first := s.once(t, ref, same)
	require.Len(t, first, len(want))
	require.GreaterOrEqual(t, l.sentSince(), int64(len(layer)))

	removeFetched(t, dir, false)
	for _, keep := range []string{keep, t.TempDir()} { // the same daemon, and another one
		s = newStreaming(t, newClient(t, l.options()), dir, keep)
		again := s.once(t, ref, func(_ string, img *image.Image) {
			require.Equal(t, farReads, img.Parallel())
			require.False(t, img.Unverified())
		})
		require.Equal(t, first, again, "disks that were made of it are still of the same image")
		require.Less(t, l.sentSince(), int64(len(layer))/2)
	}
	s = newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	s.opt.CacheDir = dir // another cache, which is empty
	p := make([]byte, 4096)
	s.once(t, ref, func(name string, img *image.Image) {
		l.sentSince()
		if name == "odd.img" {
			_, err := img.ReadAt(p, 2<<20+100)
			require.NoError(t, err)
			require.True(t, bytes.Equal(want[name][2<<20+100:][:4096], p))
			require.LessOrEqual(t, l.sentSince(), int64(2*seekChunk))
			_, err = img.ReadAt(p, 5<<20)
			require.NoError(t, err)
			require.Zero(t, l.sentSince(), "zeros are not fetched")
			e, err := img.Extent(t.Context(), 5<<20, 8<<20)
			require.NoError(t, err)
			require.False(t, e.Data)
		}
		same(name, img)
	})
	require.NoDirExists(t, filepath.Join(dir, pulledDir, keptName(l.tags["1"].Digest.String())))
}

// TestSeekWrongBytes: bytes that the registry has changed since are never returned.
func TestSeekWrongBytes(t *testing.T) {
	l, ref, layer, want := seekImage(t)
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	s.once(t, ref, func(string, *image.Image) {})
	removeFetched(t, s.opt.CacheDir, false)
	st := s.open(t, ref)
	img := s.disk(t, st, "odd.img")
	digest := digestOf(layer)
	l.replace(digest, flipped(layer, 1<<20))
	s.wrongRead(t, img, make([]byte, 1<<20), 1<<20-1<<19)
	l.replace(digest, layer)
	require.True(t, bytes.Equal(want["odd.img"], contentOf(t, img)))
}

// TestSeekDamaged: the image is fetched again if the kept files are damaged.
func TestSeekDamaged(t *testing.T) {
	l, ref, layer, want := seekImage(t)
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	s.once(t, ref, func(string, *image.Image) {})
	seek := filepath.Join(s.opt.CacheDir, pulledDir,
		keptName(l.tags["1"].Digest.String())+seekSuffix)
	for _, name := range []string{seekName, keptName(digestOf(layer))} {
		for _, damage := range []func(p []byte) []byte{
			func(p []byte) []byte { return flipped(p, len(p)/2) },
			func(p []byte) []byte { return p[:len(p)-1] },
		} {
			path := filepath.Join(seek, name)
			good, err := os.ReadFile(path)
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(path, damage(good), 0o600))
			removeFetched(t, s.opt.CacheDir, false)
			l.sentSince()
			s.once(t, ref, func(name string, img *image.Image) {
				require.True(t, bytes.Equal(want[name], contentOf(t, img)), name)
			})
			require.Greater(t, l.sentSince(), int64(len(layer)))
		}
	}
	removeFetched(t, s.opt.CacheDir, true)
	require.NoDirExists(t, seek)
	s.once(t, ref, func(string, *image.Image) {})
}

// checkpointsOf makes the checkpoints of a layer.
func checkpointsOf(t testing.TB, layer []byte) (file, content []byte, err error) {
	f, err := os.Create(filepath.Join(t.TempDir(), "x"))
	require.NoError(t, err)
	rec := newRecorder(f, int64(len(layer)))
	defer rec.close()
	desc := store{}.add(layer)
	in, err := openLayer(t.Context(), memoryBlob(desc, layer), new(Progress), rec)
	require.NoError(t, err)
	defer in.Close()
	content, err = io.ReadAll(in)
	require.NoError(t, err)
	require.NoError(t, in.Finish())
	if err = rec.finish(desc.Size); err != nil {
		return nil, content, err
	}
	file, err = os.ReadFile(f.Name())
	require.NoError(t, err)
	return file, content, nil
}

// TestCheckpointsBounded: a layer with too much between two checkpoints gets none.
func TestCheckpointsBounded(t *testing.T) {
	layer := gzipped(t, noise(1, 2<<20))
	nothing := bytes.Repeat([]byte{0, 0, 0, 0xff, 0xff}, maxSpan/5) // stored blocks without content
	layer = bytes.Join([][]byte{layer[:10], nothing, layer[10:]}, nil)
	_, _, err := checkpointsOf(t, layer)
	require.ErrorIs(t, err, errNoCheckpoints)
}

// FuzzCheckpoints reads anything as a file of checkpoints, and decompresses from where it says. It
// takes the sum of the file for right.
func FuzzCheckpoints(f *testing.F) {
	layer := gzipped(f, append(noise(95, 2<<20), bytes.Repeat([]byte("a few words "), 1<<17)...))
	file, content, err := checkpointsOf(f, layer)
	require.NoError(f, err)
	points, err := openCheckpoints(bytes.NewReader(file), int64(len(file)), int64(len(layer)))
	require.NoError(f, err)
	require.Equal(f, int64(len(content)), points.size)
	f.Add(points.table[checkpointEntry:2*checkpointEntry], []byte("x"))
	f.Add(bytes.Repeat([]byte{0xff}, checkpointEntry), file[:200])
	f.Fuzz(func(t *testing.T, entry, states []byte) {
		table := bytes.Clone(points.table)
		copy(table[checkpointEntry:2*checkpointEntry], entry)
		all := bytes.Clone(file)
		copy(all[len(checkpointMagic):], states)
		c := &checkpoints{file: bytes.NewReader(all), table: table, size: points.size,
			layer: points.layer, chunk: points.chunk, at: points.at}
		if c.check() != nil {
			return
		}
		off, length := c.span(1)
		if off < 0 || length < 0 || off+length > c.layer {
			t.Fatalf("%d bytes at %d of %d", length, off, c.layer)
		}
		_ = c.read(bytes.NewReader(layer[off:off+length]), 1, make([]byte, 1<<20))
		_, _ = openCheckpoints(bytes.NewReader(all), int64(len(all)), c.layer)
		_, _ = loadSeekContents(states)
	})
}
