package registry

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/registry/transport"
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
func (s *streaming) once(t testing.TB, ref transport.Reference,
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
func seekImage(t testing.TB) (l *lying, ref transport.Reference, layer []byte,
	want map[string][]byte) {
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
	layer = gzipped(t, tarOf(t, tarFile{Name: "disk/odd.img", Content: raw},
		tarFile{Name: "disk/b.qcow2", Content: packed},
		tarFile{Name: "disk/top.qcow2", Content: top},
		tarFile{Name: "disk/linked.img", Kind: '1', Link: "disk/odd.img"},
		tarFile{Name: "etc/other", Content: noise(94, 1<<20)}))
	l.Tags["1"] = l.Image(t, gzipped(t, tarOf(t, tarFile{Name: "etc/passwd", Content: []byte("x")},
		tarFile{Name: "disk/base.img", Content: base},
		tarFile{Name: "disk/odd.img", Content: []byte("hidden")})), layer)
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
	require.GreaterOrEqual(t, l.SentSince(), int64(len(layer)))

	removeFetched(t, dir, false)
	for _, keep := range []string{keep, t.TempDir()} { // the same daemon, and another one
		s = newStreaming(t, newClient(t, l.options()), dir, keep)
		again := s.once(t, ref, func(_ string, img *image.Image) {
			require.Equal(t, transport.Reads, img.Parallel())
			require.False(t, img.Unverified())
		})
		require.Equal(t, first, again, "disks that were made of it are still of the same image")
		require.Less(t, l.SentSince(), int64(len(layer))/2)
	}
	s = newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	s.opt.CacheDir = dir // another cache, which is empty
	p := make([]byte, 4096)
	s.once(t, ref, func(name string, img *image.Image) {
		l.SentSince()
		if name == "odd.img" {
			_, err := img.ReadAt(p, 2<<20+100)
			require.NoError(t, err)
			require.True(t, bytes.Equal(want[name][2<<20+100:][:4096], p))
			require.LessOrEqual(t, l.SentSince(), int64(2<<20), "two chunks")
			_, err = img.ReadAt(p, 5<<20)
			require.NoError(t, err)
			require.Zero(t, l.SentSince(), "zeros are not fetched")
			e, err := img.Extent(t.Context(), 5<<20, 8<<20)
			require.NoError(t, err)
			require.False(t, e.Data)
		}
		same(name, img)
	})
	require.NoDirExists(t, filepath.Join(dir, pulledDir, keptName(l.Tags["1"].Digest.String())))
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
	l.Replace(digest, flipped(layer, 1<<20))
	s.wrongRead(t, img, make([]byte, 1<<20), 1<<20-1<<19)
	l.Replace(digest, layer)
	require.True(t, bytes.Equal(want["odd.img"], contentOf(t, img)))
}

// TestSeekDamaged: the image is fetched again if the kept files are damaged.
func TestSeekDamaged(t *testing.T) {
	l, ref, layer, want := seekImage(t)
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	s.once(t, ref, func(string, *image.Image) {})
	seek := filepath.Join(s.opt.CacheDir, pulledDir,
		keptName(l.Tags["1"].Digest.String())+seekSuffix)
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
			l.SentSince()
			s.once(t, ref, func(name string, img *image.Image) {
				require.True(t, bytes.Equal(want[name], contentOf(t, img)), name)
			})
			require.Greater(t, l.SentSince(), int64(len(layer)))
		}
	}
	removeFetched(t, s.opt.CacheDir, true)
	require.NoDirExists(t, seek)
	s.once(t, ref, func(string, *image.Image) {})
}

// FuzzSeekContents reads anything as what is kept about the disks of a layer.
func FuzzSeekContents(f *testing.F) {
	f.Add([]byte("x"))
	f.Fuzz(func(_ *testing.T, text []byte) { _, _ = loadSeekContents(text) })
}
