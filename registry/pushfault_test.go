package registry

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// TestPushGoesOn: a push survives broken connections, answers that ask to wait, uploads that the
// registry has forgotten, and a proxy that says yes for it.
func TestPushGoesOn(t *testing.T) {
	accepted := make(map[string]bool)
	for name, fault := range map[string]func(n int, w http.ResponseWriter, r *http.Request) bool{
		"429": func(n int, w http.ResponseWriter, r *http.Request) bool {
			if n%5 == 0 {
				w.Header().Set("Retry-After", "0")
				w.WriteHeader(http.StatusTooManyRequests)
			}
			return n%5 == 0
		},
		"cut": func(n int, w http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodPatch && n%5 == 0 {
				_, _ = io.CopyN(io.Discard, r.Body, 10)
				panic(http.ErrAbortHandler)
			}
			return false
		},
		"cut behind": func(n int, w http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodPut && n%5 == 0 {
				panic(http.ErrAbortHandler)
			}
			return false
		},
		"accepted by a proxy": func(_ int, w http.ResponseWriter, r *http.Request) bool {
			put := r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/manifests/")
			if !put || accepted[r.URL.Path] {
				return false
			}
			accepted[r.URL.Path] = true
			w.WriteHeader(http.StatusAccepted)
			return true
		},
		"forgotten": func(n int, w http.ResponseWriter, r *http.Request) bool {
			gone := strings.Contains(r.URL.Path, "/uploads/") &&
				(r.Method == http.MethodPatch && n < 9 || r.Method == http.MethodGet)
			if gone && r.Method == http.MethodPatch {
				w.WriteHeader(http.StatusInternalServerError)
			} else if gone {
				w.WriteHeader(http.StatusNotFound)
			}
			return gone
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMemory(t)
			_, files, contents := diskFiles(t)
			n := 0
			m.fault = func(w http.ResponseWriter, r *http.Request) bool {
				m.mu.Lock()
				n++
				now := n
				m.mu.Unlock()
				return fault(now, w, r)
			}
			base, _ := newBase(t)
			require.NoError(t, testtool.Err(m.client(t).
				Push(context.Background(), files, m.ref(t, "vm/a:1"),
					PushOptions{Base: base.String()})))
			m.fault = nil
			dir := t.TempDir()
			require.NoError(t, testtool.Err2(m.client(t).
				Pull(context.Background(), m.ref(t, "vm/a:1"), dir, PullOptions{})))
			for name, want := range contents {
				require.True(t, bytes.Equal(want, bytesOf(t, filepath.Join(dir, name))), name)
			}
		})
	}
}

// TestPushInterrupted: the tag appears when everything is there, and the same push goes on.
func TestPushInterrupted(t *testing.T) {
	m := newMemory(t)
	_, files, _ := diskFiles(t)
	ctx, cancel := context.WithCancel(context.Background())
	patches := 0
	m.fault = func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodPatch {
			if patches++; patches == 3 {
				cancel()
				panic(http.ErrAbortHandler)
			}
		}
		return false
	}
	_, err := m.client(t).Push(ctx, files, m.ref(t, "vm/a:1"), PushOptions{Base: BaseNone})
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, m.requests("PUT", "/manifests/"))
	m.fault = nil
	require.NoError(t, testtool.Err(m.client(t).
		Push(context.Background(), files, m.ref(t, "vm/a:1"), PushOptions{Base: BaseNone})))
	require.Equal(t, 4, m.requests("PATCH", ""), "two layers, and two configurations")
}

// TestPushMountRefused: blobs that the registry does not let us mount are sent, whatever it says.
func TestPushMountRefused(t *testing.T) {
	for _, status := range []int{400, 401, 403, 404, 405, 500} {
		t.Run(http.StatusText(status), func(t *testing.T) {
			m := newMemory(t)
			u := newUploads(m)
			mounts := 0
			m.fault = func(w http.ResponseWriter, r *http.Request) bool {
				if r.Method == http.MethodPost && r.URL.Query().Has("mount") {
					mounts++
					w.WriteHeader(status)
					return true
				}
				return u.serve(w, r)
			}
			content := noise(71, 1<<20)
			h, _ := testtool.Must2(v1.SHA256(bytes.NewReader(content)))(t)
			desc := v1.Descriptor{Digest: h, Size: int64(len(content))}
			up := testtool.Must(m.client(t).Uploader(m.ref(t, "vm/a:1"), m.ref(t, "vm/base:1"),
				new(atomic.Int64), ""))(t)
			require.NoError(t, up.Blob(t.Context(), desc, bytes.NewReader(content)))
			require.Equal(t, 1, mounts)
			src := testtool.Must(m.client(t).Source(m.ref(t, "vm/a:1"), ""))(t)
			b := testtool.Must(src.Blob(desc))(t)
			require.NoError(t, b.Fill(t.Context(), make([]byte, len(content)), 0))
		})
	}
}

// TestPushAway: a registry that is away does not refuse to mount blobs.
func TestPushAway(t *testing.T) {
	m := newMemory(t)
	m.fault = func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusInternalServerError)
		return true
	}
	var told warnings
	c := newClient(t, transport.Options{Insecure: []string{m.ref(t, "vm/a:1").Host()},
		Timeout: time.Second, Warn: told.add})
	up := testtool.Must(c.Uploader(m.ref(t, "vm/a:1"), m.ref(t, "vm/base:1"),
		new(atomic.Int64), ""))(t)
	h, _ := testtool.Must2(v1.SHA256(strings.NewReader("a")))(t)
	err := up.Blob(t.Context(), v1.Descriptor{Digest: h, Size: 1}, strings.NewReader("a"))
	require.True(t, transport.GaveUp(err), err)
	require.NotContains(t, strings.Join(told.all(), "\n"), "instead of mounted")
}

// TestPushForgottenForEver: a registry that takes the first piece of a blob, breaks off at the next
// one, and knows nothing of either then, is not asked for ever.
func TestPushForgottenForEver(t *testing.T) {
	m := newMemory(t)
	u := newUploads(m)
	m.fault = func(w http.ResponseWriter, r *http.Request) bool {
		switch r.Method {
		case http.MethodPatch:
			if !strings.HasPrefix(r.Header.Get("Content-Range"), "0-") {
				panic(http.ErrAbortHandler)
			}
		case http.MethodGet:
			u.forget(true)
		}
		return u.serve(w, r)
	}
	content := make([]byte, 65<<20) // more than the largest piece
	h, _ := testtool.Must2(v1.SHA256(bytes.NewReader(content)))(t)
	up := testtool.Must(m.client(t).Uploader(m.ref(t, "vm/a:1"), m.ref(t, "vm/a:1"),
		new(atomic.Int64), ""))(t)
	err := up.Blob(t.Context(), v1.Descriptor{Digest: h, Size: int64(len(content))},
		bytes.NewReader(content))
	require.ErrorContains(t, err, "404")
	require.Equal(t, 5, m.requests("POST", "/uploads/"))
}

// failing has only its first bytes, and then an error.
type failing struct {
	*bytes.Reader
	size int64
}

func (f failing) Size() int64 { return f.size }

func (f failing) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.Reader.ReadAt(p, off)
	if err != nil {
		err = unix.EIO
	}
	return n, err
}

// TestPushUnreadable: what cannot be read is the error, and not what the registry makes of the part
// that came.
func TestPushUnreadable(t *testing.T) {
	m := newMemory(t)
	m.fault = newUploads(m).serve
	content := noise(72, 9_000_000)
	h, _ := testtool.Must2(v1.SHA256(bytes.NewReader(content)))(t)
	up := testtool.Must(m.client(t).Uploader(m.ref(t, "vm/a:1"), m.ref(t, "vm/a:1"),
		new(atomic.Int64), ""))(t)
	err := up.Blob(t.Context(), v1.Descriptor{Digest: h, Size: 20_000_000},
		failing{bytes.NewReader(content), 20_000_000})
	require.EqualError(t, err, "sending "+h.String()+": input/output error")
	require.Equal(t, 1, m.requests("POST", "/uploads/"))
}

// TestPushChanges: a push whose file is changed, or whose blobs are removed, says so. A registry is
// believed if it names the digest of what it has accepted.
func TestPushChanges(t *testing.T) {
	resize := func(size int64) func(string) error {
		return func(file string) error { return os.Truncate(file, size) }
	}
	for name, test := range map[string]struct {
		change   func(file string) error
		manifest func(w http.ResponseWriter, r *http.Request) bool
		want     string
	}{
		"shorter": {change: resize(4096), want: "was changed while it was sent"},
		"longer":  {change: resize(9 << 20), want: "was changed while it was sent"},
		"other content": {change: func(file string) error {
			return os.WriteFile(file, noise(74, 3<<20), 0o644)
		}, want: "was changed while it was sent"},
		"blobs removed": {manifest: func(w http.ResponseWriter, _ *http.Request) bool {
			w.WriteHeader(http.StatusBadRequest)
			_, _ = io.WriteString(w, `{"errors":[{"code":"MANIFEST_BLOB_UNKNOWN"}]}`)
			return true
		}, want: "/vm/a was removed meanwhile: try again"},
		"accepted, and not to be read": {manifest: func(w http.ResponseWriter,
			r *http.Request) bool {
			if r.Method == http.MethodGet {
				w.WriteHeader(http.StatusForbidden)
				return true
			}
			text, _ := io.ReadAll(r.Body)
			w.Header().Set("Docker-Content-Digest", digestOf(text))
			w.WriteHeader(http.StatusAccepted)
			return true
		}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMemory(t)
			file := filepath.Join(t.TempDir(), "a.raw")
			require.NoError(t, os.WriteFile(file, noise(73, 3<<20), 0o644))
			m.fault = func(w http.ResponseWriter, r *http.Request) bool {
				if r.Method == http.MethodPost && test.change != nil {
					require.NoError(t, test.change(file))
				}
				return test.manifest != nil && strings.Contains(r.URL.Path, "/manifests/") &&
					test.manifest(w, r)
			}
			_, err := m.client(t).Push(t.Context(), []string{file}, m.ref(t, "vm/a:1"),
				PushOptions{Base: BaseNone})
			if test.want == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, test.want)
		})
	}
}

// baseOf is a base image with these layers, the lowest first.
func baseOf(t testing.TB, layers ...[]byte) transport.Reference {
	s := store{}
	return layoutOf(t, s, madeBase(t, s, layers...))
}

func madeBase(t testing.TB, s store, layers ...[]byte) v1.Descriptor {
	var ids []string
	for _, l := range layers {
		ids = append(ids, digestOf(l))
	}
	text := testtool.Must(json.Marshal(map[string]any{"os": "linux",
		"rootfs": map[string]any{"type": "layers", "diff_ids": ids}}))(t)
	desc := s.Add(text)
	made := s.Image(t, layers...)
	m := testtool.Must(transport.ParseManifest(s[made.Digest.String()]))(t)
	m.Config.Digest, m.Config.Size = desc.Digest, desc.Size
	return s.Manifest(t, m)
}

// inContainer are the disks that a container of the image serves, in the order of their LUNs.
func inContainer(t testing.TB, c *Client, ref transport.Reference) (names []string) {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, testtool.Err2(c.Pull(t.Context(), ref, dir, PullOptions{Original: true})))
	for _, img := range testtool.Must(image.ScanDir(dir, image.Options{}))(t) {
		names = append(names, img.Name())
		require.NoError(t, img.Close())
	}
	return names
}

// TestPushOntoDisks: an image whose base has disks has the same LUNs by serve --image and in a
// container, and only an index that lacks none of the disks is one.
func TestPushOntoDisks(t *testing.T) {
	dir := t.TempDir()
	var files []string
	for i, name := range []string{"disk2.raw", "disk10.raw"} {
		files = append(files, filepath.Join(dir, name))
		require.NoError(t, os.WriteFile(files[i], noise(uint64(i), 1<<20), 0o644))
	}
	program := tarOf(t, tarFile{Name: "disk/", Kind: tar.TypeDir},
		tarFile{Name: "kubevirt-disk", Content: noise(7, 100)})
	lower := tarOf(t, tarFile{Name: "disk/disk1.raw", Content: noise(8, 1<<20)})
	pushedBase := newMemory(t)
	pushes(t, pushedBase.client(t), files[1:], pushedBase.ref(t, "vm/base:1"),
		PushOptions{Base: BaseNone})

	for name, test := range map[string]struct {
		base    string
		push    []string
		indexed bool
		disks   []string
	}{
		"no disks": {baseOf(t, gzipped(t, program)).String(), files, true,
			[]string{"disk2.raw", "disk10.raw"}},
		"a disk": {baseOf(t, gzipped(t, program), gzipped(t, lower)).String(), files, false,
			[]string{"disk1.raw", "disk2.raw", "disk10.raw"}},
		"a disk that is removed": {baseOf(t, program, zstandard(t, lower),
			tarOf(t, tarFile{Name: "disk/.wh.disk1.raw"})).String(), files, true,
			[]string{"disk2.raw", "disk10.raw"}},
		"a disk that is replaced": {baseOf(t, program,
			tarOf(t, tarFile{Name: "disk/disk2.raw", Content: []byte("other")})).String(), files,
			true,
			[]string{"disk2.raw", "disk10.raw"}},
		"a link": {baseOf(t, tarOf(t, tarFile{Name: "a", Content: noise(9, 1<<20)},
			tarFile{Name: "disk/disk1.raw", Kind: tar.TypeLink, Link: "a"})).String(), files,
			false,
			[]string{"disk1.raw", "disk2.raw", "disk10.raw"}},
		"an image that was pushed": {pushedBase.ref(t, "vm/base:1").String(), files[:1], false,
			[]string{"disk2.raw", "disk10.raw"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMemory(t)
			c := newClient(t, transport.Options{Insecure: []string{m.host, pushedBase.host}})
			ref := m.ref(t, "vm/a:1")
			pushes(t, c, test.push, ref, PushOptions{Base: test.base})
			s := newStreaming(t, c, t.TempDir(), t.TempDir())
			st := s.open(t, ref)
			require.Equal(t, test.disks, inContainer(t, c, ref))
			require.Equal(t, test.disks, namesOfDisks(st.Disks()))
			require.Equal(t, test.indexed, st.index != nil)
			img := s.disk(t, st, "disk2.raw")
			require.Equal(t, noise(0, 1<<20), contentOf(t, img))
		})
	}
}

// TestLUNsOfBuiltImage: an image that a builder made has the same order of disks, whether its files
// are read by ranges or it is fetched first.
func TestLUNsOfBuiltImage(t *testing.T) {
	layer := tarOf(t, tarFile{Name: "disk/disk10.raw", Content: noise(1, 1<<20)},
		tarFile{Name: "disk/disk9.raw", Content: noise(2, 1<<20)})
	want := []string{"disk9.raw", "disk10.raw"}
	for name, l := range map[string][]byte{"ranges": layer, "fetched": gzipped(t, layer)} {
		t.Run(name, func(t *testing.T) {
			ref := imageOf(t, l)
			c := newClient(t, transport.Options{})
			require.Equal(t, want, inContainer(t, c, ref))
			st := newStreaming(t, c, t.TempDir(), t.TempDir()).open(t, ref)
			require.Equal(t, want, namesOfDisks(st.Disks()))
		})
	}
}

// TestPushOntoMoved: a tag may name another image before the old disk is fetched. What differs is
// told of the image whose layers are below.
func TestPushOntoMoved(t *testing.T) {
	old := likeADisk(2, 4<<20)
	now := bytes.Clone(old)
	copy(now[1<<20:], "other")
	o := newOnto(t)
	ref := baseOf(t, tarOf(t, tarFile{Name: "disk/vm.img", Content: old}))
	moved := baseOf(t, tarOf(t, tarFile{Name: "disk/vm.img", Content: now}))
	var once sync.Once
	move := func() {
		for _, name := range namesIn(t, filepath.Join(dirOf(moved), "blobs", "sha256")) {
			blob := filepath.Join("blobs", "sha256", name)
			require.NoError(t, os.Rename(filepath.Join(dirOf(moved), blob),
				filepath.Join(dirOf(ref), blob)))
		}
		require.NoError(t, os.Rename(filepath.Join(dirOf(moved), "index.json"),
			filepath.Join(dirOf(ref), "index.json")))
	}
	o.c = newClient(t, transport.Options{Insecure: []string{o.m.host},
		Warn: func(string) { once.Do(move) }})
	opt := PushOptions{CompressRaw: qcow2.CompressionZstd, Onto: Onto{Image: ref.String()}}
	pushes(t, o.c, []string{o.file(t, "vm.raw", now)}, o.m.ref(t, "vm/a:2"), opt)
	brings(t, o.c, o.m.ref(t, "vm/a:2"), PullOptions{}, now)
}

// TestPushOntoPlatforms: what differs from the disk of one platform is not put over another one's.
func TestPushOntoPlatforms(t *testing.T) {
	old := likeADisk(2, 4<<20)
	now := bytes.Clone(old)
	copy(now[1<<20:], "other")
	disk := func(content []byte) []byte {
		return tarOf(t, tarFile{Name: "disk/vm.img", Content: content})
	}
	program := func(text string) []byte {
		return tarOf(t, tarFile{Name: "disk/", Kind: tar.TypeDir},
			tarFile{Name: "program", Content: []byte(text)})
	}
	for name, c := range map[string]struct {
		other []byte
		want  string
	}{
		"the same disk": {disk(old), ""},
		"another disk":  {disk(likeADisk(3, 4<<20)), "its platforms have different disks"},
		"another way to have none": {tarOf(t, tarFile{Name: "disk/.wh.vm.img"}),
			"its platforms have different disks"},
	} {
		t.Run(name, func(t *testing.T) {
			o, s := newOnto(t), store{}
			list := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex,
				Manifests: []v1.Descriptor{
					madeBase(t, s, program("a"), disk(old)),
					madeBase(t, s, program("b"), c.other)}}
			list.Manifests[0].Platform = platformOf(runtime.GOARCH)
			list.Manifests[1].Platform = platformOf(otherArch())
			ref := layoutOf(t, s, s.Manifest(t, list))
			_, err := o.c.Push(t.Context(), []string{o.file(t, "vm.raw", now)},
				o.m.ref(t, "vm/a:2"), PushOptions{Onto: Onto{Image: ref.String()}})
			if c.want != "" {
				require.ErrorContains(t, err, c.want)
				return
			}
			require.NoError(t, err)
			brings(t, o.c, o.m.ref(t, "vm/a:2"), PullOptions{}, now)
		})
	}
}
