package registry

import (
	"archive/tar"
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// tocStep changes a layer and its table.
type tocStep func(t *testing.T, w *registrytest.Table)

// tocCase is a layer whose table of contents may say something else than its archive.
type tocCase struct {
	make []tocStep
	// right: it says the same. late: only who reads all of the layer finds the difference.
	right, late bool
}

func tocCases(codec string, good, evil []byte) map[string]tocCase {
	a := tarFile{Name: "disk/a.img", Content: good}
	add := func(f tarFile) tocStep {
		return func(t *testing.T, w *registrytest.Table) { w.Add(t, f) }
	}
	hide := func(f tarFile) tocStep { // from the table
		return func(t *testing.T, w *registrytest.Table) {
			n := len(w.Entries)
			w.Add(t, f)
			w.Entries = w.Entries[:n]
		}
	}
	aEvil := tarFile{Name: "disk/a.img", Content: evil}
	b := tarFile{Name: "disk/b.img", Content: evil}
	list := func(e map[string]any) tocStep { // in the table alone
		return func(_ *testing.T, w *registrytest.Table) { w.Entries = append(w.Entries, e) }
	}
	link := func(name string) map[string]any {
		return map[string]any{"name": name, "type": "hardlink", "linkName": "disk/a.img"}
	}
	rename := func(_ *testing.T, w *registrytest.Table) { // everything in the table
		for _, e := range w.Entries {
			e["name"] = "disk/a.img"
		}
	}
	cases := map[string]tocCase{
		"right": {make: []tocStep{add(a)}, right: true},
		"right, among others": {make: []tocStep{add(tarFile{Name: "disk/", Kind: tar.TypeDir}),
			add(tarFile{Name: "disk/.wh.old"}), add(tarFile{Name: "disk/.wh..wh..opq"}),
			add(tarFile{Name: "etc/a", Content: evil}),
			add(tarFile{Name: "disk/b/one", Content: []byte("1")}), add(a),
			add(tarFile{Name: "disk/zero.img", Content: make([]byte, 700<<10)}),
			add(tarFile{Name: "disk/b/empty"}), add(tarFile{Name: "disk/two.img", Content: evil}),
			add(tarFile{Name: "etc/b", Content: evil}),
			add(tarFile{Name: "disk/l.img", Kind: tar.TypeLink, Link: "disk/a.img"})}, right: true},
		"right, beside a hole of an exabyte": {make: []tocStep{add(a),
			hide(tarFile{Name: "etc/notes", Content: good[:700], Hole: 1 << 59})}, right: true},
		"right, a name twice":            {make: []tocStep{add(aEvil), add(a)}, right: true},
		"a disk that it lacks":           {make: []tocStep{add(a), hide(b)}},
		"a disk before it that it lacks": {make: []tocStep{hide(b), add(a)}},
		"another file of the name behind it": {make: []tocStep{add(a),
			hide(tarFile{Name: "./disk/a.img", Content: evil})}},
		"a link that it lacks": {make: []tocStep{add(a),
			hide(tarFile{Name: "disk/b.img", Kind: tar.TypeLink, Link: "disk/a.img"})}},
		"a whiteout that it lacks": {make: []tocStep{hide(tarFile{Name: "disk/.wh.b.img"}),
			add(a)}},
		"an opaque directory that it lacks": {make: []tocStep{add(a),
			hide(tarFile{Name: "disk/.wh..wh..opq"})}},
		"a symbolic link in place of the directory": {make: []tocStep{add(a),
			hide(tarFile{Name: "disk", Kind: tar.TypeSymlink, Link: "etc"})}},
		"a whiteout that only it has": {make: []tocStep{add(a),
			list(map[string]any{"name": "disk/.wh.b.img", "type": "reg"})}},
		"a file that only it has": {make: []tocStep{add(a), list(link("disk/b.img"))}},
		"another name": {make: []tocStep{add(tarFile{Name: "disk/b.img", Content: good}),
			rename}},
		"another kind": {make: []tocStep{add(a),
			add(tarFile{Name: "disk/l", Kind: tar.TypeLink, Link: "disk/a.img"}),
			hide(tarFile{Name: "disk/m", Kind: tar.TypeDir}), list(link("disk/m"))}},
		"the place of another file": {make: []tocStep{hide(aEvil),
			add(tarFile{Name: "usr/notes", Content: good}), rename}},
		"a part of the file": {make: []tocStep{add(a), func(_ *testing.T, w *registrytest.Table) {
			w.Entries[0]["size"] = w.Chunk
			w.Entries = w.Entries[:1]
		}}},
		"a name twice, of which it has the first": {make: []tocStep{add(a), hide(aEvil)}},
	}
	if codec == registrytest.Zstd {
		zeros := func(_ *testing.T, w *registrytest.Table) { w.Entries[1]["chunkType"] = "zeros" }
		cases["zeros that are none"] = tocCase{make: []tocStep{add(a), zeros}, late: true}
	}
	return cases
}

// TestOneDigestOneTable: what pull writes of a layer with a table of contents is what a guest
// reads. A layer whose table says something else than its archive is refused by who pulls it, and
// fails the disks of who serves it, also at the next start.
func TestOneDigestOneTable(t *testing.T) {
	good, evil := noise(491, 1<<20), noise(492, 1<<20)
	for _, codec := range []string{registrytest.Gzip, registrytest.Zstd} {
		for name, c := range tocCases(codec, good, evil) {
			t.Run(codec+", "+name, func(t *testing.T) {
				w := &registrytest.Table{Codec: codec, Chunk: 256 << 10}
				if codec == registrytest.Gzip && c.right {
					w.Members = 3
				}
				for _, step := range c.make {
					step(t, w)
				}
				l, _ := withTable(t, w, w.Entries)
				ref := l.ref(t, "vm/a:1")
				client := newClient(t, l.options())
				for _, path := range []string{"", "a.img"} {
					to := t.TempDir()
					_, _, err := client.Pull(t.Context(), ref, to, PullOptions{Path: path})
					if c.right {
						require.NoError(t, err)
						continue
					}
					require.ErrorIs(t, err, disk.ErrWrongContent, "pull %q", path)
					emptyDir(t, to)
				}
				s := newStreaming(t, client, t.TempDir(), t.TempDir())
				serveTable(t, s, ref, c, good)
			})
		}
	}
}

func serveTable(t *testing.T, s *streaming, ref transport.Reference, c tocCase, good []byte) {
	st := testtool.Must(s.client.Stream(t.Context(), ref, s.opt))(t)
	img, err := st.Open(t.Context(), "a.img", image.Options{})
	require.NoError(t, err)
	switch err := img.Agree(t.Context()); {
	case c.right:
		require.NoError(t, err)
		require.NoError(t, img.Verify(t.Context()))
		require.True(t, bytes.Equal(good, contentOf(t, img)))
	case c.late:
		require.NoError(t, err)
		require.ErrorIs(t, img.Verify(t.Context()), disk.ErrWrongContent)
	default:
		require.ErrorIs(t, err, disk.ErrWrongContent)
	}
	if !c.right {
		_, err = img.ReadAt(t.Context(), make([]byte, 512), 0)
		require.ErrorIs(t, err, disk.ErrWrongContent)
	}
	require.NoError(t, img.Close())
	require.NoError(t, st.Close())
	if _, err = s.client.Stream(t.Context(), ref, s.opt); !c.right {
		require.ErrorContains(t, err, "was found wrong")
	}
}

// TestTwoTablesInALayer: that one of them agrees with the layer says nothing about the other one.
func TestTwoTablesInALayer(t *testing.T) {
	good := noise(496, 1<<20)
	w := tableOf(t, registrytest.Zstd, 256<<10, tarFile{Name: "disk/a.img", Content: good})
	lacks := len(w.Entries)
	w.Add(t, tarFile{Name: "disk/b.img", Content: noise(497, 1<<20)})
	_, lies := w.Layer(t, w.Entries[:lacks])
	layer, right := w.Layer(t, w.Entries)
	l := newLying(t)
	l.Annotated(t, layer, lies)
	l.Tags["2"] = l.Tags["1"]
	l.Annotated(t, layer, right)
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	serveTable(t, s, l.ref(t, "vm/a:1"), tocCase{right: true}, good)
	serveTable(t, s, l.ref(t, "vm/a:2"), tocCase{}, good)
}

// TestTableHeadersOnly: comparing fetches neither the content of disks nor, once it is done,
// anything.
func TestTableHeadersOnly(t *testing.T) {
	for _, codec := range []string{registrytest.Gzip, registrytest.Zstd} {
		w := tableOf(t, codec, 256<<10, tarFile{Name: "disk/a.img", Content: noise(493, 8<<20)},
			tarFile{Name: "disk/b.img", Content: noise(493, 8<<20)})
		l, content := withTable(t, w, w.Entries)
		s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
		img := s.disk(t, s.open(t, l.ref(t, "vm/a:1")), "a.img")
		l.SentSince()
		require.NoError(t, img.Agree(t.Context()))
		require.Less(t, l.SentSince(), int64(2<<20))
		require.NoError(t, img.Agree(t.Context()))
		require.Zero(t, l.SentSince())
		require.NoError(t, img.Verify(t.Context()))
		require.GreaterOrEqual(t, l.SentSince(), int64(len(content)))
		require.NoError(t, img.Verify(t.Context()))
		require.Zero(t, l.SentSince())
	}
}

// TestTableWithOtherDataBetween: where the archive has more data between two chunks than the table
// says, no guest sees what the table says: also if the cache has the same chunks of another image.
func TestTableWithOtherDataBetween(t *testing.T) {
	const chunk = 256 << 10
	good := noise(494, 4*chunk)
	for _, codec := range []string{registrytest.Gzip, registrytest.Zstd} {
		for _, between := range [][]byte{make([]byte, 3*chunk), noise(495, 3*chunk)} {
			right := tableOf(t, codec, chunk, tarFile{Name: "disk/a.img", Content: good})
			inArchive := append(bytes.Clone(good[:chunk]), between...)
			wrong := tableOf(t, codec, chunk, tarFile{Name: "disk/a.img", Content: inArchive})
			wrong.Entries = wrong.Entries[:1]
			wrong.Add(t, tarFile{Name: "usr/notes", Content: good})
			wrong.Entries = append(wrong.Entries[:1], wrong.Entries[2:]...)
			for _, e := range wrong.Entries {
				e["name"] = "disk/a.img"
			}
			delete(wrong.Entries[0], "endOffset")

			cached, seen := t.TempDir(), 0
			for _, w := range []*registrytest.Table{right, wrong} {
				l, _ := withTable(t, w, w.Entries)
				s := newStreaming(t, newClient(t, l.options()), cached, t.TempDir())
				s.opt.timeout = time.Second
				st, err := s.client.Stream(t.Context(), l.ref(t, "vm/a:1"), s.opt)
				if err != nil && strings.Contains(err.Error(), "push the image again") {
					require.Same(t, wrong, w)
					continue
				}
				require.NoError(t, err)
				img := testtool.Must(st.Open(t.Context(), "a.img", image.Options{}))(t)
				want := map[*registrytest.Table][]byte{right: good, wrong: inArchive}[w]
				require.True(t, bytes.Equal(want, contentOf(t, img)))
				seen++
				require.NoError(t, errors.Join(img.Close(), st.Close()))
			}
			require.Positive(t, seen)
		}
	}
}
