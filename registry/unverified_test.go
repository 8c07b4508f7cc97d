package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// plainImage is a registry with an image of one plain layer. The layer is too large to be fetched
// only to look into it.
func plainImage(t testing.TB) (l *lying, ref transport.Reference, layer, content []byte) {
	content = noise(60, smallLayer+3<<20)
	layer = tarOf(t, tarFile{Name: "etc/passwd", Content: []byte("x")},
		tarFile{Name: "disk/a.img", Content: content})
	l = newLying(t)
	l.Tags["1"] = l.Image(t, tarOf(t, tarFile{Name: "disk/b.img", Content: noise(61, 1<<20)},
		tarFile{Name: "disk/a.img", Content: noise(62, 1<<20)}), layer)
	return l, l.ref(t, "vm/a:1"), layer, content
}

// whenComplete streams with KeepDir keep and a cache of its own.
func whenComplete(t testing.TB, l *lying, keep string) *streaming {
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), keep)
	s.opt.WhenComplete = true
	return s
}

func flipped(p []byte, at int) []byte {
	p = bytes.Clone(p)
	p[at] ^= 1
	return p
}

// TestWhenComplete serves a plain layer at once and verifies it when it is complete. From then on
// nothing unverified is trusted.
func TestWhenComplete(t *testing.T) {
	l, ref, layer, content := plainImage(t)
	keep := t.TempDir()
	s := whenComplete(t, l, keep)
	st := s.open(t, ref)
	require.Equal(t, []string{"a.img", "b.img"}, namesOfDisks(st.Disks()))
	img := s.disk(t, st, "a.img")
	require.Equal(t, transport.Reads, img.Parallel())
	require.True(t, img.Unverified())
	p := readAt(t, img, 20<<20, 1<<20)
	require.True(t, bytes.Equal(content[20<<20:21<<20], p))
	require.Less(t, s.opt.Cache.Stats().FetchedBytes, int64(len(layer)/2))

	// The file of the lower layer is not trusted either, because the upper one might hide it.
	below := s.disk(t, st, "b.img")
	require.True(t, below.Unverified())

	require.NoError(t, img.Verify(t.Context()))
	require.False(t, img.Unverified())
	require.False(t, below.Unverified())
	require.True(t, bytes.Equal(content, contentOf(t, img)))

	// Later every chunk is checked against its digest, also with the setting that verifies
	// everything.
	again := newStreaming(t, newClient(t, l.options()), t.TempDir(), keep)
	st2 := again.open(t, ref)
	require.Equal(t, []string{"a.img", "b.img"}, namesOfDisks(st2.Disks()))
	img2 := again.disk(t, st2, "a.img")
	require.False(t, img2.Unverified())
	l.Replace(digestOf(layer), flipped(layer, 15<<20))
	again.wrongRead(t, img2, p[:4096], 15<<20)
	l.Replace(digestOf(layer), layer)
	require.True(t, bytes.Equal(content, contentOf(t, img2)))
}

// TestWhenCompleteHead: what decides which disks there are is verified, too. A registry that says
// at first that a layer is a disk by itself does not get its archive served as one.
func TestWhenCompleteHead(t *testing.T) {
	l, ref, _, _ := plainImage(t)
	l.Faults = []fault{func(w http.ResponseWriter, r *http.Request, content []byte) bool {
		first, last, _ := registrytest.RangeOf(r, len(content))
		require.Equal(t, [2]int{0, 511}, [2]int{first, last})
		w.Header().Set("Content-Range", fmt.Sprintf("bytes 0-511/%d", len(content)))
		w.WriteHeader(http.StatusPartialContent)
		_, err := w.Write(append([]byte("QFI\xfb"), make([]byte, 508)...))
		require.NoError(t, err)
		return true
	}}
	st := whenComplete(t, l, t.TempDir()).open(t, ref)
	require.Equal(t, []string{"a.img", "b.img"}, namesOfDisks(st.Disks()))
}

// TestWhenCompleteCannotBeNoted: while storage takes no note, nothing is served, and nobody is said
// to have sent something wrong.
func TestWhenCompleteCannotBeNoted(t *testing.T) {
	l, ref, layer, content := plainImage(t)
	mirror := newLying(t)
	mirror.Store, mirror.Tags = l.Store, l.Tags
	opt := l.options()
	opt.Insecure = append(opt.Insecure, mirror.Host())
	opt.Mirrors = []string{l.Host() + "=" + mirror.Host()}
	var told warnings
	opt.Warn = told.add
	said := func(what string) bool { return strings.Contains(strings.Join(told.all(), "\n"), what) }
	s := newStreaming(t, newClient(t, opt), t.TempDir(), t.TempDir())
	s.opt.WhenComplete = true
	st := s.open(t, ref)
	img := s.disk(t, st, "a.img")
	notes := int(st.unsure[digestOf(layer)].notes.file.Fd())
	good := testtool.Must(unix.Dup(notes))(t)
	full := testtool.Must(os.Open(fmt.Sprintf("/proc/self/fd/%d", notes)))(t) // it takes nothing
	defer full.Close()
	require.NoError(t, unix.Dup3(int(full.Fd()), notes, 0))
	ctx, cancel := context.WithCancel(t.Context())
	ended := testtool.Go(func() error {
		return testtool.Err(img.ReadAt(ctx, make([]byte, 4096), 20<<20))
	})
	testtool.Within(t, time.Minute, func() bool { return said("a read waits") })
	cancel()
	require.ErrorIs(t, <-ended, disk.ErrNotNow)
	require.Zero(t, s.opt.Cache.Stats().Wrong)
	require.False(t, said("wrong content"))
	require.NoError(t, errors.Join(unix.Dup3(good, notes, 0), unix.Close(good)))
	require.True(t, bytes.Equal(content[20<<20:21<<20], readAt(t, img, 20<<20, 1<<20)))
}

// TestWhenCompleteWrong condemns a layer with one wrong bit, and keeps nothing of it.
func TestWhenCompleteWrong(t *testing.T) {
	l, ref, layer, _ := plainImage(t)
	l.Replace(digestOf(layer), flipped(layer, 9<<20))
	keep := t.TempDir()
	s := whenComplete(t, l, keep)
	st := s.open(t, ref)
	img := s.disk(t, st, "a.img")
	p := readAt(t, img, 1<<20, 4096)
	require.DirExists(t, filepath.Join(s.opt.CacheDir, "v1",
		keptName(unverifiedName(st.kept.Source.Origin(), digestOf(layer)))))
	err := img.Verify(t.Context())
	require.ErrorIs(t, err, disk.ErrWrongContent)
	require.ErrorContains(t, err, digestOf(layer))
	require.ErrorIs(t, img.Verify(t.Context()), disk.ErrWrongContent)
	_, err = img.ReadAt(t.Context(), p, 1<<20)
	require.ErrorIs(t, err, disk.ErrWrongContent)
	var medium *disk.MediumError
	require.ErrorAs(t, err, &medium)
	emptyCache(t, s.opt.CacheDir, st, digestOf(layer))

	// The next start does not use the disk that was made from it.
	st2 := testtool.Must(s.client.Stream(t.Context(), ref, s.opt))(t)
	require.ErrorContains(t, testtool.Err(st2.Open(t.Context(), "a.img", image.Options{})), keep)
	require.NoError(t, st2.Close())
}

// emptyCache checks that the cache has no chunk of an unverified layer.
func emptyCache(t testing.TB, dir string, st *Stream, layer string) {
	require.NoDirExists(t, filepath.Join(dir, "v1",
		keptName(unverifiedName(st.kept.Source.Origin(), layer))))
}

// TestWhenCompleteOrigin has a registry that claims a layer of another one, with other content.
// Nothing that it sends is served as the other's, and it condemns only its own image.
func TestWhenCompleteOrigin(t *testing.T) {
	right, ref, layer, content := plainImage(t)
	wrong, wrongRef, _, _ := plainImage(t)
	moved := tarOf(t, tarFile{Name: "etc/passwd", Content: []byte("x")},
		tarFile{Name: "disk/c.img", Content: content})
	wrong.Replace(digestOf(layer), flipped(moved, 9<<20))
	keep := t.TempDir()
	first := whenComplete(t, wrong, keep)
	opened := func(l *lying, ref transport.Reference) (*Stream, error) {
		s := first
		s.client = newClient(t, l.options())
		return s.client.Stream(t.Context(), ref, s.opt)
	}
	st := testtool.Must(opened(wrong, wrongRef))(t)
	for _, d := range st.Disks() {
		img := testtool.Must(st.Open(t.Context(), d.Name, image.Options{}))(t)
		contentOf(t, img)
		require.NoError(t, img.Close())
	}
	st2 := testtool.Must(opened(right, ref))(t)
	img := testtool.Must(st2.Open(t.Context(), "a.img", image.Options{}))(t)
	require.True(t, bytes.Equal(content, contentOf(t, img)))
	require.NoError(t, img.Verify(t.Context()))
	require.NoError(t, img.Close())
	require.NoError(t, st2.Close())

	bad := testtool.Must(st.Open(t.Context(), "c.img", image.Options{}))(t)
	require.ErrorIs(t, bad.Verify(t.Context()), disk.ErrWrongContent)
	require.NoError(t, bad.Close())
	require.NoError(t, st.Close())
	st3 := testtool.Must(opened(right, ref))(t)
	img = testtool.Must(st3.Open(t.Context(), "a.img", image.Options{}))(t)
	require.True(t, bytes.Equal(content, contentOf(t, img)))
	require.NoError(t, img.Close())
	require.NoError(t, st3.Close())
}

// TestWhenCompleteSharedNotes finds the notes that were kept before they belonged to a repository.
func TestWhenCompleteSharedNotes(t *testing.T) {
	l, ref, layer, _ := plainImage(t)
	keep := t.TempDir()
	st := whenComplete(t, l, keep).open(t, ref)
	name, own := st.notesLocked(digestOf(layer))
	require.NotEqual(t, digestOf(layer), name)
	shared := "notes-" + keptName(digestOf(layer))
	require.NoError(t, os.Rename(filepath.Join(keep, own), filepath.Join(keep, shared)))
	name, file := st.notesLocked(digestOf(layer))
	require.Equal(t, []string{digestOf(layer), shared}, []string{name, file})
	st.record.Unverified = false
	_, file = st.notesLocked(digestOf(layer))
	require.Equal(t, own, file)
}

// TestWhenCompleteChanged has the registry send a wrong chunk once, which is served, and right ones
// later. When the cache has lost the chunk, the digest of the layer alone would be right.
func TestWhenCompleteChanged(t *testing.T) {
	l, ref, layer, content := plainImage(t)
	keep := t.TempDir()
	l.Replace(digestOf(layer), flipped(layer, 9<<20))
	s := whenComplete(t, l, keep)
	img := s.disk(t, s.open(t, ref), "a.img")
	require.False(t, bytes.Equal(content[8<<20:12<<20], readAt(t, img, 8<<20, 4<<20)))

	// A kill, and a cache that is gone.
	l.Replace(digestOf(layer), layer)
	again := whenComplete(t, l, keep)
	st := again.open(t, ref)
	img2 := again.disk(t, st, "a.img")
	for _, u := range st.unsure {
		u.timeout = 100 * time.Millisecond
	}
	require.ErrorIs(t, img2.Verify(t.Context()), disk.ErrWrongContent)
	require.Positive(t, again.opt.Cache.Stats().Wrong)
	emptyCache(t, again.opt.CacheDir, st, digestOf(layer))
}

// TestWhenCompleteWaits verifies only when the registry has sent everything, and goes on where it
// was.
func TestWhenCompleteWaits(t *testing.T) {
	l, ref, layer, _ := plainImage(t)
	s := whenComplete(t, l, t.TempDir())
	opt := l.options()
	opt.Timeout = time.Second
	s.client = newClient(t, opt)
	img := s.disk(t, s.open(t, ref), "a.img")
	l.Mu.Lock()
	for range 20 {
		l.Faults = append(l.Faults, says(503))
	}
	l.Mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, img.Verify(ctx), context.DeadlineExceeded)
	require.True(t, img.Unverified())
	require.NoError(t, img.Verify(t.Context()))
	require.Less(t, s.opt.Cache.Stats().FetchedBytes, int64(len(layer)*5/4),
		"nothing is fetched a second time")
}

// TestWhenCompleteFetchesFirst: the log says why an image cannot be served at once.
func TestWhenCompleteFetchesFirst(t *testing.T) {
	content := noise(63, smallLayer*3/2)
	plain := tarOf(t, tarFile{Name: "disk/a.img", Content: content})
	for what, layers := range map[string][][]byte{
		"compressed by gzip": {gzipped(t, plain)},
		"compressed by zstd": {zstandard(t, plain)},
		"cannot be read by ranges": {tarOf(t), gzipped(t, tarOf(t,
			tarFile{Name: "disk/a.img", Content: content[:1<<20]}))},
		"has no digests of its chun": {plain},
	} {
		t.Run(what, func(t *testing.T) {
			l := newLying(t)
			l.Tags["1"] = l.Image(t, layers...)
			var said strings.Builder
			opt := l.options()
			opt.Warn = func(text string) { said.WriteString(text) }
			s := newStreaming(t, newClient(t, opt), t.TempDir(), t.TempDir())
			s.opt.WhenComplete = !strings.HasPrefix(what, "has no")
			img := s.disk(t, s.open(t, l.ref(t, "vm/a:1")), "a.img")
			require.Equal(t, 1, img.Parallel())
			require.Contains(t, said.String(), what)
			got := contentOf(t, img)
			require.True(t, bytes.Equal(content[:len(got)], got))
		})
	}
}

// TestWhenCompleteChangesItsMind: if the next start wants everything verified, it serves nothing
// unverified.
func TestWhenCompleteChangesItsMind(t *testing.T) {
	l, ref, _, content := plainImage(t)
	keep := t.TempDir()
	s := whenComplete(t, l, keep)
	st := s.open(t, ref)
	one := s.disk(t, st, "a.img").Unhashed()
	s.opt.WhenComplete = false
	st2 := s.open(t, ref)
	img := s.disk(t, st2, "a.img")
	require.False(t, img.Unverified())
	require.Equal(t, 1, img.Parallel())
	require.NotEqual(t, one[0].Digest, img.Unhashed()[0].Digest, "it would be taken for the same")
	require.True(t, bytes.Equal(content, contentOf(t, img)))
}

// TestWalkHostile walks archives with false claims.
func TestWalkHostile(t *testing.T) {
	var many []tarFile
	for range 16<<10 + 1 {
		many = append(many, tarFile{Name: "x"})
	}
	padding := tarFile{Name: "padding", Content: noise(64, smallLayer)}
	whole := tarOf(t, padding, tarFile{Name: "disk/a.img", Content: noise(65, 4<<20)})
	for what, layer := range map[string][]byte{
		"ends within a file": whole[:len(whole)-3<<20],
		"cannot be read":     append(bytes.Repeat([]byte{7}, 512), whole...),
		"more than":          tarOf(t, append(many, padding)...),
	} {
		t.Run(what, func(t *testing.T) {
			l := newLying(t)
			l.Tags["1"] = l.Image(t, layer)
			s := whenComplete(t, l, t.TempDir())
			st, err := s.client.Stream(t.Context(), l.ref(t, "vm/a:1"), s.opt)
			if err == nil {
				_, err = st.Open(t.Context(), "a.img", image.Options{})
				err = errors.Join(err, st.Close())
			}
			require.Error(t, err)
			require.Less(t, s.opt.Cache.Stats().FetchedBytes, int64(24<<20))
		})
	}
}

// part answers with a range of a file, and breaks the connection after so many bytes (-1: never).
// The tag "" is none.
func part(file []byte, tag string, most int) fault {
	return func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
		if tag != "" {
			w.Header().Set("ETag", tag)
		}
		if most < 0 {
			most = len(file)
		}
		return cut(most)(w, r, file)
	}
}

// whole answers with all of a file, whatever was asked for.
func whole(file []byte) fault {
	return func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
		w.Header().Set("Content-Length", fmt.Sprint(len(file)))
		return registrytest.Whole(w, r, file)
	}
}

// TestPullBrokenWithoutDigest: nobody knows the digest, and the connection breaks. What is there in
// the end is one file: the rest of another one never gets below its name, whoever answers, and
// whatever he says about it.
func TestPullBrokenWithoutDigest(t *testing.T) {
	file := noise(90, 1<<20)
	other := flipped(file, 900000) // the same size, and the same beginning
	early := flipped(file, 100)
	packed, packedOther := packtest.Xz(file), packtest.Xz(noise(91, 1<<20))
	size := min(len(packed), len(packedOther))
	const a, b = webFile + "?a", webFile + "?b"
	mirror := func(t *testing.T, answers ...fault) fault { // another server, which a redirect names
		w := newWeb(t, file)
		w.Fail(answers...)
		return registrytest.Redirects(w.Server.URL + webFile)
	}
	for name, c := range map[string]struct {
		faults []fault
		server func(t *testing.T) []fault // instead of faults, with other servers
		file   []byte                     // what must come; nil: an error
		again  bool                       // it is said that it begins again
	}{
		"the same validator": {file: file,
			faults: []fault{part(file, `"1"`, 300000), part(file, `"1"`, 300000)}},
		"no validator": {file: file, again: true,
			faults: []fault{part(file, "", 300000), part(file, "", 1), part(file, "", -1)}},
		"a weak validator": {file: file, again: true,
			faults: []fault{part(file, `W/"1"`, 300000), part(file, `W/"1"`, 500000),
				part(file, `W/"1"`, -1), part(file, `W/"1"`, -1)}},
		"a weak validator, another file": {again: true,
			faults: []fault{part(early, `W/"1"`, 300000), part(file, `W/"1"`, -1)}},
		"no validator, another file": {again: true,
			faults: []fault{part(early, "", 300000), part(file, "", -1), part(file, "", -1)}},
		"another file, and no ranges": {faults: []fault{part(early, `"1"`, 300000), whole(file)}},
		"the same file, and no ranges": {file: file,
			faults: []fault{part(file, `"1"`, 300000), whole(file)}},
		"an end that differs, of which nothing has come": {file: file, again: true,
			faults: []fault{part(other, `"2"`, 300000)}},
		"an end that differs, late": {again: true, faults: []fault{part(other, `"2"`, 950000)}},
		"mirrors with two files": {again: true, server: func(t *testing.T) []fault {
			return []fault{mirror(t, part(early, `"old"`, 300000)), mirror(t), mirror(t)}
		}},
		"mirrors with two files and one tag": {again: true, server: func(t *testing.T) []fault {
			return []fault{mirror(t, part(early, `"1"`, 300000)), mirror(t), mirror(t)}
		}},
		"mirrors with one file": {file: file, again: true, server: func(t *testing.T) []fault {
			return []fault{mirror(t, part(file, `"x"`, 300000)), mirror(t), mirror(t)}
		}},
		"mirrors before anything has come": {file: file, server: func(t *testing.T) []fault {
			return []fault{mirror(t, part(early, `"old"`, 0)), mirror(t)}
		}},
		"a mirror that changes and back": {file: file, again: true, server: func(
			t *testing.T) []fault {
			to := mirror(t, part(file, `"1"`, 300000), part(early, `"2"`, -1))
			return []fault{to, to, to}
		}},
		"queries that name files": {again: true,
			faults: []fault{registrytest.Redirects(a), part(early, `"1"`, 300000),
				registrytest.Redirects(b), part(file, `"1"`, -1),
				registrytest.Redirects(b), part(file, `"1"`, -1)}},
		"compressed": {again: true, faults: []fault{part(packed[:size], `"1"`, size/2),
			part(packedOther[:size], `"2"`, -1), part(packedOther[:size], `"2"`, -1)}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWeb(t, file)
			if name == "compressed" {
				w.Put(webFile, packed[:size], `"1"`)
			}
			if c.server != nil {
				c.faults = c.server(t)
			}
			w.Fail(append([]fault{nil}, c.faults...)...) // the first tells the size
			dir, digest, err := w.pull(t, w.Server.URL+webFile)
			told := strings.Join(w.told.all(), "\n")
			require.Equal(t, c.again, strings.Contains(told, "begins again"), told)
			if c.file == nil {
				require.ErrorContains(t, err, "it was replaced")
				emptyDir(t, dir)
				return
			}
			require.NoError(t, err)
			require.Equal(t, digestOf(file), digest)
			onlyFile(t, dir, "out.raw", file)
		})
	}
}
