package registry

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	inmemory "github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// memory is a registry in memory. A test may answer in its place.
type memory struct {
	host    string
	handler http.Handler

	mu   sync.Mutex
	said []string // guarded by mu
	came int64    // bytes of requests; guarded by mu
	went int64    // bytes of answers; guarded by mu
	// answers in its place; guarded by mu
	fault func(w http.ResponseWriter, r *http.Request) (ok bool)
}

func newMemory(t testing.TB) *memory {
	m := new(memory)
	m.handler = inmemory.New(inmemory.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m.mu.Lock()
		m.said = append(m.said, r.Method+" "+r.URL.RequestURI())
		fault := m.fault
		m.mu.Unlock()
		if fault == nil || !fault(w, r) {
			r.Body = &countedBody{r.Body, m}
			m.handler.ServeHTTP(&countedAnswer{w, m}, r)
		}
	}))
	t.Cleanup(server.Close)
	m.host = strings.TrimPrefix(server.URL, "http://")
	return m
}

// countedBody counts the bytes of a request, and countedAnswer those of an answer.
type (
	countedBody struct {
		io.ReadCloser
		m *memory
	}
	countedAnswer struct {
		http.ResponseWriter
		m *memory
	}
)

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.m.mu.Lock()
	defer b.m.mu.Unlock()
	b.m.came += int64(n)
	return n, err
}

func (a *countedAnswer) Write(p []byte) (int, error) {
	n, err := a.ResponseWriter.Write(p)
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	a.m.went += int64(n)
	return n, err
}

// traffic is how many bytes came and went since the last call.
func (m *memory) traffic() (came, went int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	came, went = m.came, m.went
	m.came, m.went = 0, 0
	return came, went
}

func (m *memory) requests(method, part string) (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.said {
		if strings.HasPrefix(s, method+" ") && strings.Contains(s, part) {
			n++
		}
	}
	m.said = nil
	return n
}

func (m *memory) ref(t testing.TB, name string) transport.Reference {
	return parsed(t, m.host+"/"+name)
}

// pushes pushes files, which must work, and returns the image's digest.
func pushes(t testing.TB, c *Client, files []string, ref transport.Reference,
	opt PushOptions) (digest string) {
	t.Helper()
	return testtool.Must(c.Push(t.Context(), files, ref, opt))(t)
}

func resolves(t testing.TB, c *Client, ref transport.Reference) *transport.Image {
	t.Helper()
	return testtool.Must(c.Resolve(t.Context(), ref))(t)
}

func (m *memory) client(t testing.TB) *Client {
	return newClient(t, transport.Options{Insecure: []string{m.host}, Timeout: 20 * time.Second})
}

// newBase is a base image for two platforms, as docker makes it.
func newBase(t testing.TB) (ref transport.Reference, layer []byte) {
	s := store{}
	layer = gzipped(t,
		tarOf(t, tarFile{Name: "disk/", Kind: tar.TypeDir},
			tarFile{Name: "kubevirt-disk", Content: noise(30, 5000)}))
	index := v1.IndexManifest{SchemaVersion: 2, MediaType: types.DockerManifestList}
	for _, arch := range []string{"amd64", "arm64"} {
		config := s.Add(fmt.Appendf(nil, `{"architecture":%q,"os":"linux",`+
			`"config":{"Entrypoint":["/kubevirt-disk"],"X-Own":1},`+
			`"history":[{"created_by":"base"}],`+
			`"rootfs":{"type":"layers","diff_ids":["sha256:%064d"]}}`, arch, 7))
		config.MediaType = types.DockerConfigJSON
		l := s.Add(layer)
		l.MediaType = types.DockerLayer
		desc := s.Manifest(t,
			v1.Manifest{SchemaVersion: 2, MediaType: types.DockerManifestSchema2, Config: config,
				Layers: []v1.Descriptor{l}})
		desc.MediaType, desc.Platform = types.DockerManifestSchema2, platformOf(arch)
		index.Manifests = append(index.Manifests, desc)
	}
	desc := s.Manifest(t, index)
	desc.MediaType = types.DockerManifestList
	return layoutOf(t, s, desc), layer
}

// diskFiles are a raw disk, and a qcow2 one with a backing file in a subdirectory.
func diskFiles(t testing.TB) (dir string, files []string, contents map[string][]byte) {
	dir = t.TempDir()
	base, other := noise(31, 3<<20), noise(32, 1<<20+512)
	require.NoError(t, os.Mkdir(filepath.Join(dir, "bases"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "bases", "b.img"), base, 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "other.raw"), other, 0o600))
	qemuImg(t, dir, "create", "-q", "-f", "qcow2", "-b", "bases/b.img", "-F", "raw", "a.qcow2",
		"4M")
	top := make([]byte, 4<<20)
	copy(top, base)
	return dir, []string{filepath.Join(dir, "a.qcow2"), filepath.Join(dir, "other.raw")},
		map[string][]byte{"a.raw": top, "other.raw": other}
}

// TestPushPull pushes disks onto a base, and pulls them again.
func TestPushPull(t *testing.T) {
	ctx := context.Background()
	m := newMemory(t)
	base, baseLayer := newBase(t)
	_, files, contents := diskFiles(t)
	c, ref := m.client(t), m.ref(t, "vm/a:1")
	digest := pushes(t, c, files, ref, PushOptions{Base: base.String()})

	dir := t.TempDir()
	done, _ := testtool.Must2(c.Pull(ctx, ref, dir, PullOptions{}))(t)
	require.Len(t, done, 2)
	for name, want := range contents {
		require.True(t, bytes.Equal(want, bytesOf(t, filepath.Join(dir, name))), name)
	}

	// In another directory, later, in another order: it is the same image, and nothing of it is
	// sent.
	_, again, _ := diskFiles(t)
	m.requests("", "")
	second := testtool.Must(c.Push(ctx, []string{again[1], again[0]}, m.ref(t, "vm/a:2"),
		PushOptions{Base: base.String()}))(t)
	require.Equal(t, digest, second)
	require.Zero(t, m.requests("PATCH", ""))
	byDigest := parsed(t, m.host+"/vm/a@"+digest)

	r := resolves(t, c, byDigest)
	require.Len(t, r.Manifest.Layers, 5)
	require.Equal(t, digestOf(baseLayer), r.Manifest.Layers[0].Digest.String())
	require.Equal(t, types.OCILayer, r.Manifest.Layers[0].MediaType)
	config := testtool.Must(r.Small(ctx, r.Manifest.Config, transport.MaxManifest))(t)
	var parsed v1.ConfigFile
	require.NoError(t, json.Unmarshal(config, &parsed))
	require.Len(t, parsed.RootFS.DiffIDs, 5)
	require.Len(t, parsed.History, 5)
	require.Equal(t, []string{"/kubevirt-disk"}, parsed.Config.Entrypoint)
	require.Contains(t, string(config), "X-Own", "what is not known is kept")

	x := fullIndex(t, r)
	require.Len(t, x.Files, 3)
	var names []string
	for i, l := range r.Manifest.Layers[2:] {
		require.Equal(t, types.OCIUncompressedLayer, l.MediaType)
		require.Equal(t, l.Digest, parsed.RootFS.DiffIDs[i+2], "a layer that is not compressed")
		layer := testtool.Must(r.Small(ctx, l, 100<<20))(t)
		tr := tar.NewReader(bytes.NewReader(layer))
		h := testtool.Must(tr.Next())(t)
		require.Equal(t, []any{107, 107, int64(0o444), int64(0)},
			[]any{h.Uid, h.Gid, h.Mode, h.ModTime.Unix()})
		content := testtool.Must(io.ReadAll(tr))(t)
		_, err := tr.Next()
		require.Equal(t, io.EOF, err)

		f := x.Files[i]
		names = append(names, f.Name)
		require.Equal(t, []any{h.Name, h.Size, l.Digest.String()}, []any{f.Name, f.Size, f.Layer})
		require.True(t, bytes.Equal(content, layer[f.Offset:f.Offset+f.Size]))
		require.NoError(t, testtool.Must(x.ChunksOf(&f))(t).Check(content, 0))
	}
	require.Equal(t, []string{"disk/a.qcow2", "disk/bases/b.img", "disk/other.raw"}, names)
}

// TestIndexMetadata: opening an image reads only the ranges that the index calls metadata.
func TestIndexMetadata(t *testing.T) {
	ctx := context.Background()
	m := newMemory(t)
	dir := t.TempDir()
	content := noise(33, 20<<20)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "raw"), content, 0o644))
	for _, args := range [][]string{{"-o", "cluster_size=4k"}, {"-c"}, {"-o", "cluster_size=2M"}} {
		qemuImg(t, dir,
			append(append([]string{"convert", "-f", "raw", "-O", "qcow2"}, args...), "raw",
				"a.qcow2")...)
		ref := m.ref(t, "vm/meta:1")
		require.NoError(t, testtool.Err(m.client(t).
			Push(ctx, []string{filepath.Join(dir, "a.qcow2")}, ref, PushOptions{Base: BaseNone})))
		r := resolves(t, m.client(t), ref)
		x := testtool.Must(readIndex(ctx, r))(t)
		file := bytesOf(t, filepath.Join(dir, "a.qcow2"))
		only := make([]byte, len(file)) // all other bytes are wrong
		for i := range only {
			only[i] = 0xee
		}
		total := int64(0)
		for _, r := range x.Files[0].Metadata {
			copy(only[r[0]:r[0]+r[1]], file[r[0]:])
			total += r[1]
		}
		require.Less(t, total, int64(len(file))/4)
		require.NoError(t, os.WriteFile(filepath.Join(dir, "only.qcow2"), only, 0o644))
		img := testtool.Must(image.Open(filepath.Join(dir, "only.qcow2"), image.Options{}))(t)
		require.Equal(t, int64(len(content)), img.Size())
		require.NoError(t, img.Close())
	}
}

// TestPushContainerDisk: without a base, the image has the form that KubeVirt takes, one file and
// its directory.
func TestPushContainerDisk(t *testing.T) {
	ctx := context.Background()
	m := newMemory(t)
	dir := t.TempDir()
	content := noise(34, 1<<20)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a.img"), content, 0o644))
	ref := m.ref(t, "vm/cd:1")
	require.NoError(t, testtool.Err(m.client(t).
		Push(ctx, []string{filepath.Join(dir, "a.img")}, ref, PushOptions{Base: BaseNone})))
	r := resolves(t, m.client(t), ref)
	list := testtool.Must(readTarOf(ctx, r, 0))(t)
	require.Contains(t, list.Entries, "disk")
	require.Len(t, list.Entries, 1)
	list = testtool.Must(readTarOf(ctx, r, 1))(t)
	require.Contains(t, list.Entries, "disk/a.img")

	// One of several disks by itself.
	second := filepath.Join(dir, "b.img")
	require.NoError(t, os.WriteFile(second, noise(35, 1<<20), 0o644))
	require.NoError(t, testtool.Err(m.client(t).
		Push(ctx, []string{filepath.Join(dir, "a.img"), second}, ref, PushOptions{Base: BaseNone})))
	m.traffic()
	brings(t, m.client(t), ref, PullOptions{Path: "a.img"}, content)
	came, _ := m.traffic()
	require.Less(t, came, int64(1<<20+64<<10), "the layer of the other disk is not fetched")
}

func readTarOf(ctx context.Context, r *transport.Image, i int) (*layerList, error) {
	b, err := r.Source.Blob(r.Manifest.Layers[i])
	if err != nil {
		return nil, err
	}
	in, err := openLayer(ctx, b, new(atomic.Int64), 0)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	return readTar(in, diskDir, nil)
}

// TestPushCompresses: raw files are stored as qcow2, others if that is asked for. Compressed files
// stay as they are.
func TestPushCompresses(t *testing.T) {
	ctx := context.Background()
	m := newMemory(t)
	dir, files, contents := diskFiles(t)
	packed := filepath.Join(dir, "packed.qcow2")
	require.NoError(t, os.WriteFile(packed, qcow2Of(t, noise(38, 1<<20), "-c"), 0o644))
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	for _, c := range []struct {
		all, raw qcow2.Compression
		want     []string
	}{
		{"", qcow2.CompressionZstd, []string{"disk/a.qcow2", "disk/bases/b.img", "disk/other.qcow2",
			"disk/packed.qcow2"}},
		{qcow2.CompressionZlib, "",
			[]string{"disk/a.qcow2", "disk/other.qcow2", "disk/packed.qcow2"}},
		{"", "", []string{"disk/a.qcow2", "disk/bases/b.img", "disk/other.raw",
			"disk/packed.qcow2"}},
	} {
		opt := PushOptions{Base: BaseNone, Compress: c.all, CompressRaw: c.raw,
			Progress: new(Progress)}
		digest := pushes(t, m.client(t), append(files, packed), m.ref(t, "vm/c:1"), opt)
		require.Equal(t, opt.Progress.Total(), opt.Progress.Done())
		made := resolves(t, m.client(t), m.ref(t, "vm/c:1"))
		stored := 2 * made.Manifest.Config.Size // of amd64 and of arm64
		for _, l := range made.Manifest.Layers {
			stored += l.Size
		}
		require.Equal(t, stored, opt.Progress.Stored(), "each byte once")
		emptyDir(t, tmp)
		again := pushes(t, m.client(t), append(files, packed), m.ref(t, "vm/c:1"), opt)
		require.Equal(t, digest, again)
		r := resolves(t, m.client(t), m.ref(t, "vm/c:1"))
		x := testtool.Must(readIndex(ctx, r))(t)
		var names []string
		for _, f := range x.Files {
			names = append(names, f.Name)
			require.NotEmpty(t, f.Metadata, f.Name)
			if f.Name == "disk/packed.qcow2" {
				require.Equal(t, testtool.Must(os.Stat(packed))(t).Size(), f.Size)
			}
		}
		require.Equal(t, c.want, names)
		to := t.TempDir()
		_, _, err := m.client(t).Pull(ctx, m.ref(t, "vm/c:1"), to, PullOptions{})
		require.NoError(t, err)
		for name, want := range contents {
			require.True(t, bytes.Equal(want, bytesOf(t, filepath.Join(to, name))), name)
		}
	}
}

// TestPushRefuses: a disk that serve would refuse, or an option that makes no sense, is an error
// before anything is sent.
func TestPushRefuses(t *testing.T) {
	m := newMemory(t)
	dir := t.TempDir()
	file := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, content, 0o644))
		return path
	}
	good := file("a.img", noise(36, 8192))
	qemuImg(t, dir, "create", "-q", "-f", "qcow2", "0.qcow2", "1M")
	for n := range maxChain + 1 {
		qemuImg(t, dir, "create", "-q", "-f", "qcow2", "-b", fmt.Sprintf("%d.qcow2", n), "-F",
			"qcow2", fmt.Sprintf("%d.qcow2", n+1))
	}
	digest, _ := transport.ParseReference(m.host + "/vm/a@" + digestOf(nil))
	oci, _ := transport.ParseReference("oci:" + dir)
	for name, c := range map[string]struct {
		files []string
		ref   transport.Reference
		want  string
	}{
		"damaged": {[]string{good, file("b.qcow2", []byte("QFI\xfb and no more"))},
			m.ref(t, "vm/a:1"), "b.qcow2"},
		"odd size":  {[]string{file("c.img", make([]byte, 1000))}, m.ref(t, "vm/a:1"), "512"},
		"not there": {[]string{filepath.Join(dir, "none.img")}, m.ref(t, "vm/a:1"), "none.img"},
		"same names": {[]string{good, file("x/a.img", noise(37, 8192))}, m.ref(t, "vm/a:1"),
			"same name"},
		"twice": {[]string{good, filepath.Join(dir, "x", "..", "a.img")}, m.ref(t, "vm/a:1"),
			"is named twice"},
		"no UTF-8": {[]string{file("\xff.img", noise(38, 8192))}, m.ref(t, "vm/a:1"),
			`\xff.img" is no UTF-8`},
		"long chain": {[]string{filepath.Join(dir, "9.qcow2")}, m.ref(t, "vm/a:1"),
			"more than 8"},
		"to a digest": {[]string{good}, digest, "name a tag"},
		"to a layout": {[]string{good}, oci, "not in a registry"},
	} {
		require.ErrorContains(t, testtool.Err(m.client(t).
			Push(context.Background(), c.files, c.ref, PushOptions{Base: BaseNone})), c.want, name)
		require.Zero(t, m.requests("", ""), name)
	}
}

// TestPushBackingFileToo: a file that another one needs is stored once, in whatever order they are
// named.
func TestPushBackingFileToo(t *testing.T) {
	m, dir := newMemory(t), t.TempDir()
	content := bytes.Repeat([]byte("what top.qcow2 has itself\n      "), 1<<20/32)
	below, top := filepath.Join(dir, "below.qcow2"), filepath.Join(dir, "top.qcow2")
	require.NoError(t, os.WriteFile(below, qcow2Of(t, noise(39, 1<<20)), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "new.raw"), content, 0o644))
	qemuImg(t, dir, "convert", "-c", "-f", "raw", "-O", "qcow2", "-B", "below.qcow2", "-F", "qcow2",
		"new.raw", "top.qcow2")
	opt := PushOptions{Base: BaseNone, Compress: qcow2.CompressionZstd}
	first := pushes(t, m.client(t), []string{below, top}, m.ref(t, "vm/a:1"), opt)
	require.Equal(t, first, pushes(t, m.client(t), []string{top, below}, m.ref(t, "vm/a:2"), opt))
	brings(t, m.client(t), m.ref(t, "vm/a:2"), PullOptions{}, content)
}

// TestPushLooksLike: a raw disk whose guest has written a header stays that disk, however it is
// stored.
func TestPushLooksLike(t *testing.T) {
	m, path := newMemory(t), filepath.Join(t.TempDir(), "a.raw")
	content := qcow2Of(t, noise(40, 1<<20))
	require.NoError(t, os.WriteFile(path, content, 0o644))
	file := testtool.Must(os.OpenFile(path, os.O_RDWR, 0))(t)
	require.NoError(t, image.MarkRaw(file, ""))
	require.NoError(t, file.Close())
	for name, opt := range map[string]PushOptions{"artifact": {Artifact: true},
		"plain": {Base: BaseNone}, "zstd": {Base: BaseNone, CompressRaw: qcow2.CompressionZstd}} {
		pushes(t, m.client(t), []string{path}, m.ref(t, "vm/"+name+":1"), opt)
		brings(t, m.client(t), m.ref(t, "vm/"+name+":1"), PullOptions{}, content)
	}
}

// TestPushOntoABaseWithTheDisk: a disk that takes the place of the base's is streamed by its own
// index, and not by that of the base.
func TestPushOntoABaseWithTheDisk(t *testing.T) {
	o := newOnto(t)
	o.push(t, o.file(t, "a.raw", noise(41, 1<<20)), "vm/a:1", "")
	o.base = o.m.ref(t, "vm/a:1")
	now := noise(42, 1<<20)
	o.push(t, o.file(t, "a.raw", now), "vm/a:2", "")
	o.requireDisk(t, "vm/a:2", "a.qcow2", now, true)
}
