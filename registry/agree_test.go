package registry

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// madeIndex is an image whose index a test has written.
type madeIndex struct {
	layers  [][]byte // the lowest first; the index is above them
	plain   bool     // they are no archives
	files   []indexFile
	content []byte // of all files, for the digests
	tables  []byte // of all files; nil: there are none
	above   []byte // a layer above the index; nil: none
}

func (x madeIndex) push(t *testing.T, l *lying) {
	t.Helper()
	config := l.Add([]byte("{}"))
	config.MediaType = types.OCIConfigJSON
	m := v1.Manifest{SchemaVersion: 2, Config: config, MediaType: types.OCIManifestSchema1}
	for _, content := range x.layers {
		desc := l.Add(content)
		desc.MediaType = types.OCIUncompressedLayer
		if x.plain {
			desc.MediaType = layer.MediaDisk + "raw"
			desc.Annotations = map[string]string{layer.AnnotationTitle: "a.raw"}
		}
		m.Layers = append(m.Layers, desc)
	}
	made := &index{Version: indexVersion, ChunkSize: indexChunk,
		Digests: sectionOf(chunkDigests(x.content)), Files: x.files}
	if x.tables != nil {
		z := testtool.Must(zstd.NewWriter(nil, zstd.WithWindowSize(64<<10)))(t)
		made.Packed = sectionOf(z.EncodeAll(x.tables, nil))
	}
	desc := l.Add(testtool.Must(made.Layer(false))(t))
	desc.MediaType, desc.Annotations = types.OCIUncompressedLayer,
		map[string]string{annotationIndex: "1"}
	m.Layers = append(m.Layers, desc)
	if x.above != nil {
		desc := l.Add(x.above)
		desc.MediaType = types.OCIUncompressedLayer
		m.Layers = append(m.Layers, desc)
	}
	l.Tags["1"] = l.Manifest(t, m)
}

// fileIn is a file of an index: the first of these bytes in the layer.
func fileIn(name string, layer, content []byte) indexFile {
	return indexFile{Name: name, Size: int64(len(content)), Layer: digestOf(layer),
		Offset: int64(bytes.Index(layer, content))}
}

// TestOneDigestOneDisk: what pull writes is what a guest reads. Images whose index says something
// else than their layers are refused by who pulls them, and fail the disks of who serves them, also
// at the next start.
func TestOneDigestOneDisk(t *testing.T) {
	good, evil := noise(481, 1<<20), noise(482, 1<<20)
	one := tarOf(t, tarFile{Name: "disk/a.raw", Content: good})
	both := tarOf(t, tarFile{Name: "disk/a.raw", Content: good},
		tarFile{Name: "usr/share/doc/notes", Content: evil})
	other := tarOf(t, tarFile{Name: "disk/a.raw", Content: evil})
	hidden := tarOf(t, tarFile{Name: "disk/.wh.a.raw"})
	second := tarOf(t, tarFile{Name: "disk/b.raw", Content: evil})
	tables := func(from []byte) []byte {
		return bytes.Join([][]byte{from[:64<<10], from[900<<10 : 910<<10]}, nil)
	}
	with := func(f indexFile) indexFile {
		f.Metadata = [][2]int64{{0, 64 << 10}, {900 << 10, 10 << 10}}
		return f
	}
	packed := gzipped(t, other)
	links := bytes.Clone(one)
	copy(links[len(links)-1024:], linkHeader(t, "disk/b.raw", "disk/a.raw"))
	links = append(links, make([]byte, 1024)...)
	for name, c := range map[string]struct {
		madeIndex
		right bool
	}{
		"right": {madeIndex{layers: [][]byte{one}, files: []indexFile{with(fileIn("disk/a.raw",
			one, good))}, content: good, tables: tables(good)}, true},
		"right, among others": {madeIndex{layers: [][]byte{both},
			files: []indexFile{fileIn("disk/a.raw", both, good)}, content: good}, true},
		"right, an artifact": {madeIndex{layers: [][]byte{good}, plain: true,
			files: []indexFile{fileIn("disk/a.raw", good, good)}, content: good}, true},
		"right, of what a layer above replaces": {madeIndex{layers: [][]byte{other},
			files: []indexFile{fileIn("disk/a.raw", other, evil)}, content: evil, above: one},
			true},
		"the place of another file": {madeIndex{layers: [][]byte{both},
			files: []indexFile{fileIn("disk/a.raw", both, evil)}, content: evil}, false},
		"another name": {madeIndex{layers: [][]byte{one},
			files: []indexFile{fileIn("disk/b.raw", one, good)}, content: good}, false},
		"another name in an artifact": {madeIndex{layers: [][]byte{good}, plain: true,
			files: []indexFile{fileIn("disk/b.raw", good, good)}, content: good}, false},
		"a part of the file": {madeIndex{layers: [][]byte{one},
			files: []indexFile{fileIn("disk/a.raw", one, good[:512<<10])}, content: good[:512<<10]},
			false},
		"hidden by a layer": {madeIndex{layers: [][]byte{one, other},
			files: []indexFile{fileIn("disk/a.raw", one, good)}, content: good}, false},
		"removed by a layer": {madeIndex{layers: [][]byte{one, hidden},
			files: []indexFile{fileIn("disk/a.raw", one, good)}, content: good}, false},
		"a disk that it lacks": {madeIndex{layers: [][]byte{one, second},
			files: []indexFile{fileIn("disk/a.raw", one, good)}, content: good}, false},
		"a disk in the same layer that it lacks": {madeIndex{layers: [][]byte{links},
			files: []indexFile{fileIn("disk/a.raw", links, good)}, content: good}, false},
		"a compressed layer": {madeIndex{layers: [][]byte{packed},
			files:   []indexFile{fileIn("disk/a.raw", packed, packed[20:][:512<<10])},
			content: packed[20:][:512<<10]}, false},
		"other tables": {madeIndex{layers: [][]byte{one}, files: []indexFile{with(
			fileIn("disk/a.raw", one, good))}, content: good,
			tables: flipped(tables(good), 70<<10)}, false},
		"tables where there are zeros": {madeIndex{layers: [][]byte{tarOf(t,
			tarFile{Name: "disk/a.raw", Content: make([]byte, 1<<20)})}, files: []indexFile{with(
			indexFile{Name: "disk/a.raw", Size: 1 << 20, Offset: 512, Layer: digestOf(tarOf(t,
				tarFile{Name: "disk/a.raw", Content: make([]byte, 1<<20)}))})},
			content: make([]byte, 1<<20), tables: tables(evil)}, false},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLying(t)
			c.push(t, l)
			ref := l.ref(t, "vm/a:1")
			for _, path := range []string{"", "a.raw"} {
				to := t.TempDir()
				_, _, err := newClient(t, l.options()).Pull(t.Context(), ref,
					filepath.Join(to, "disk.raw"), PullOptions{Path: path})
				if c.right {
					require.NoError(t, err)
					onlyFile(t, to, "disk.raw", good)
					continue
				}
				require.ErrorIs(t, err, disk.ErrWrongContent, "pull %q", path)
				emptyDir(t, to)
			}
			s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
			st := testtool.Must(s.client.Stream(t.Context(), ref, s.opt))(t)
			img, err := st.Open(t.Context(), st.Disks()[0].Name, image.Options{})
			switch {
			case c.right:
				require.NoError(t, err)
				require.NoError(t, img.Agree(t.Context()))
				require.NoError(t, img.Agree(t.Context()), "once more")
				require.True(t, bytes.Equal(good, contentOf(t, img)))
				require.NoError(t, img.Close())
			case err != nil: // opening has read it
				require.ErrorIs(t, err, disk.ErrWrongContent)
			default:
				require.ErrorIs(t, img.Agree(t.Context()), disk.ErrWrongContent)
				_, err = img.ReadAt(t.Context(), make([]byte, 512), 100<<10)
				require.ErrorIs(t, err, disk.ErrWrongContent)
				require.NoError(t, img.Close())
			}
			require.NoError(t, st.Close())
			_, err = s.client.Stream(t.Context(), ref, s.opt)
			if c.right {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, "was found wrong")
			}
		})
	}
}

// linkHeader is the entry of a hard link in an archive.
func linkHeader(t *testing.T, name, to string) []byte {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "disk"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, to), nil, 0o644))
	require.NoError(t, os.Link(filepath.Join(dir, to), filepath.Join(dir, name)))
	b := testtool.Must(exec.Command("tar", "--format=ustar", "-C", dir, "-c", to, name).Output())(t)
	return b[512:1024]
}

// TestTablesWhenTheirChunkArrives: a guest's read of a chunk whose tables the index has otherwise
// fails the disk at once.
func TestTablesWhenTheirChunkArrives(t *testing.T) {
	good := noise(483, 1<<20)
	one := tarOf(t, tarFile{Name: "disk/a.raw", Content: good})
	f := fileIn("disk/a.raw", one, good)
	f.Metadata = [][2]int64{{300 << 10, 64 << 10}}
	l := newLying(t)
	madeIndex{layers: [][]byte{one}, files: []indexFile{f}, content: good,
		tables: flipped(good[300<<10:364<<10], 5)}.push(t, l)
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	img := s.disk(t, s.open(t, l.ref(t, "vm/a:1")), "a.raw")
	p := readAt(t, img, 800<<10, 512)
	require.ErrorIs(t, testtool.Err(img.ReadAt(t.Context(), p, 500<<10)), disk.ErrWrongContent)
	require.ErrorIs(t, testtool.Err(img.ReadAt(t.Context(), p, 800<<10)), disk.ErrWrongContent)
}

// TestWrongHeadersOnTheirWay: a registry that sends wrong bytes once does not condemn the image.
func TestWrongHeadersOnTheirWay(t *testing.T) {
	good := noise(484, 1<<20)
	one := tarOf(t, tarFile{Name: "disk/a.raw", Content: good})
	l := newLying(t)
	madeIndex{layers: [][]byte{one}, files: []indexFile{fileIn("disk/a.raw", one, good)},
		content: good}.push(t, l)
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	st := s.open(t, l.ref(t, "vm/a:1"))
	img := s.disk(t, st, "a.raw")
	for what, wrong := range map[string][]byte{
		"another disk": tarOf(t, tarFile{Name: "disk/b.raw", Content: good}),
		"no disk":      tarOf(t, tarFile{Name: "etc/a.raw", Content: good}),
		"zeros":        make([]byte, len(one)),
		"a hidden directory": tarOf(t, tarFile{Name: ".wh.disk"},
			tarFile{Name: "x", Content: good[512:]}),
	} {
		l.Replace(digestOf(one), wrong)
		err := agree(t.Context(), st.image.Source, st.image.Manifest.Layers, st.index)
		require.ErrorAs(t, err, new(*transport.DigestError), what)
		require.NotErrorIs(t, err, disk.ErrWrongContent, what)
	}
	l.Replace(digestOf(one), one)
	require.NoError(t, img.Agree(t.Context()))
}

// TestComparisonThatCannotBeNoted: a disk can be completed although storage had no room for the
// note that its image was compared.
func TestComparisonThatCannotBeNoted(t *testing.T) {
	good := noise(485, 1<<20)
	one := tarOf(t, tarFile{Name: "disk/a.raw", Content: good})
	l := newLying(t)
	madeIndex{layers: [][]byte{one}, files: []indexFile{fileIn("disk/a.raw", one, good)},
		content: good}.push(t, l)
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	st := s.open(t, l.ref(t, "vm/a:1"))
	img := s.disk(t, st, "a.raw")
	note := filepath.Join(s.opt.KeepDir, comparedName(st.image.Digest))
	inTheWay := filepath.Join(note+durable.PartialSuffix, "x")
	require.NoError(t, os.MkdirAll(inTheWay, 0o700))
	require.NoError(t, img.Agree(t.Context()))
	require.NoFileExists(t, note)
	require.NoError(t, os.RemoveAll(filepath.Dir(inTheWay)))
	require.NoError(t, img.Agree(t.Context()))
	require.FileExists(t, note)
}

// TestVerdictThatCannotBeRead: an image that may have been found wrong is not served.
func TestVerdictThatCannotBeRead(t *testing.T) {
	good := noise(486, 1<<20)
	one := tarOf(t, tarFile{Name: "disk/a.raw", Content: good})
	l := newLying(t)
	madeIndex{layers: [][]byte{one}, files: []indexFile{fileIn("disk/a.raw", one, good)},
		content: good}.push(t, l)
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	ref := l.ref(t, "vm/a:1")
	st := testtool.Must(s.client.Stream(t.Context(), ref, s.opt))(t)
	verdict := filepath.Join(s.opt.KeepDir, wrongName(st.image.Digest))
	require.NoError(t, st.Close())
	require.NoError(t, os.Mkdir(verdict, 0o700))
	_, err := s.client.Stream(t.Context(), ref, s.opt)
	require.ErrorContains(t, err, "whether the image sha256:")
	require.ErrorContains(t, err, filepath.Base(verdict))
	require.NoError(t, os.Remove(verdict))
	st = testtool.Must(s.client.Stream(t.Context(), ref, s.opt))(t)
	require.NoError(t, st.Close())
}

// TestPushOntoOtherTables: tables are not taken over from an image that has wrong ones, neither of
// the disk that is compared, nor of another one beside it.
func TestPushOntoOtherTables(t *testing.T) {
	o := newOnto(t)
	for _, wrong := range []string{"", "a.raw", "b.raw"} {
		dir, m := t.TempDir(), newMemory(t)
		c := m.client(t)
		var files []string
		for i, name := range []string{"a.raw", "b.raw"} {
			files = append(files, filepath.Join(dir, name))
			require.NoError(t, os.WriteFile(files[i], noise(uint64(485+i), 1<<20), 0o644))
		}
		pushes(t, c, files, m.ref(t, "vm/a:1"), PushOptions{Base: o.base.String()})
		p := &pusher{client: c, ref: m.ref(t, "vm/a:2"), opt: PushOptions{Progress: new(Progress)}}
		require.NoError(t, p.findBase(t.Context(), m.ref(t, "vm/a:1").String()))
		here := testtool.Must(newLocalCopy(testtool.Must(p.open(files[0]))(t), ""))(t)
		p.old = testtool.Must(p.findOld(t.Context(), planned{name: "a.raw"}, here))(t)
		for i := range p.old.index.Files {
			if f := &p.old.index.Files[i]; f.Name == "disk/"+wrong {
				last := p.old.index.TablesOf(f)
				at := int64(0)
				for _, r := range p.old.index.Files[:i] {
					for _, m := range r.Metadata {
						at += m[1]
					}
				}
				require.NotEmpty(t, last.Ranges)
				_, err := p.old.index.Tables.WriteAt([]byte("other"), at+100)
				require.NoError(t, err)
			}
		}
		_, err := p.old.indexed(t.Context(), p.base)
		if wrong == "" {
			require.NoError(t, err)
		} else {
			require.ErrorIs(t, err, disk.ErrWrongContent)
			require.ErrorContains(t, err, wrong)
		}
		require.NoError(t, p.close())
	}
}

// contradicted is an image whose index says something else about its layer than that has.
func contradicted(t *testing.T, l *lying, content []byte, wrong int) (layer []byte) {
	layer = tarOf(t, tarFile{Name: "disk/a.img", Content: content})
	at := bytes.Index(layer, content[:4096])
	digests := chunkDigests(content)
	digests[wrong*digestSize] ^= 1
	desc := l.Add(layer)
	desc.MediaType = types.OCILayer
	x := &index{Version: indexVersion, ChunkSize: indexChunk, Digests: sectionOf(digests),
		Files: []indexFile{{Name: "disk/a.img", Size: int64(len(content)),
			Layer: desc.Digest.String(), Offset: int64(at)}}}
	second := l.Add(testtool.Must(x.Layer(true))(t))
	second.MediaType = types.OCILayer
	second.Annotations = map[string]string{annotationIndex: "1"}
	config := l.Add([]byte("{}"))
	config.MediaType = types.OCIConfigJSON
	l.Tags["1"] = l.Manifest(t, v1.Manifest{SchemaVersion: 2, Config: config,
		MediaType: types.OCIManifestSchema1, Layers: []v1.Descriptor{desc, second}})
	return layer
}

// TestIndexContradictsLayer: a read whose content stays wrong waits for a while, and ends with an
// error that says what to do. Others go on.
func TestIndexContradictsLayer(t *testing.T) {
	content := noise(84, 2<<20)
	l := newLying(t)
	contradicted(t, l, content, 5)
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	s.opt.timeout = time.Second
	img := s.disk(t, s.open(t, l.ref(t, "vm/a:1")), "a.img")
	p := make([]byte, 4096)
	_, err := img.ReadAt(t.Context(), p, 5*indexChunk+100)
	require.NotErrorIs(t, err, disk.ErrNotNow)
	require.ErrorContains(t, err, "push the image again")
	require.NoError(t, testtool.Err(img.ReadAt(t.Context(), p, 6*indexChunk)))
	require.True(t, bytes.Equal(content[6*indexChunk:][:len(p)], p))
}
