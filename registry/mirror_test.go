package registry

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// mirrored is a registry with a mirror. Both have the same content.
func mirrored(t testing.TB) (registry, mirror *lying, opt transport.Options) {
	registry, mirror = newLying(t), newLying(t)
	return registry, mirror, transport.Options{
		Insecure: []string{registry.Host(), mirror.Host()},
		Mirrors:  []string{registry.Host() + "=" + mirror.Host()},
	}
}

// TestMirrorLies: after a mirror that has sent wrong content, the registry is asked.
func TestMirrorLies(t *testing.T) {
	content := noise(90, 2<<20)
	plain := tarOf(t, tarFile{Name: "disk/a.img", Content: content})
	packed, inside := gzipped(t, content), qcow2Of(t, content)
	for what, layer := range map[string][]byte{"plain": plain, "gzip": gzipped(t, plain),
		"artifact": content, "packed artifact": packed, "qcow2 artifact": inside,
		"packed file": zstandard(t, tarOf(t, tarFile{Name: "disk/a.img.gz", Content: packed}))} {
		t.Run(what, func(t *testing.T) {
			registry, mirror, opt := mirrored(t)
			for _, l := range []*lying{registry, mirror} {
				if l.Tags["1"] = l.Image(t, layer); strings.HasSuffix(what, "artifact") {
					desc := orasLayer(l.Store, "a.img", layer)
					l.Tags["1"] = artifactOf(t, l.Store, desc)
				}
			}
			at := len(layer) / 2
			if what == "qcow2 artifact" {
				at = 6 // in its header
			}
			mirror.Replace(digestOf(layer), flipped(layer, at))
			brings(t, newClient(t, opt), registry.ref(t, "vm/a:1"), PullOptions{}, content)
			require.Positive(t, mirror.Requests("/blobs/"))
			require.Equal(t, 1, registry.Requests("/blobs/"+digestOf(layer)))

			s := newStreaming(t, newClient(t, opt), t.TempDir(), t.TempDir())
			st := s.open(t, registry.ref(t, "vm/a:1"))
			img := s.disk(t, st, st.Disks()[0].Name)
			require.True(t, bytes.Equal(content, contentOf(t, img)))
		})
	}
}

// TestMirrorLiesInACopy: a layer that a mirror has changed is sent on from the registry.
func TestMirrorLiesInACopy(t *testing.T) {
	for what, size := range map[string]int{"one piece": 1 << 20, "pieces": 20 << 20} {
		t.Run(what, func(t *testing.T) {
			registry, mirror, opt := mirrored(t)
			lay := tarOf(t, tarFile{Name: "kubevirt-disk", Content: noise(91, size)})
			for _, l := range []*lying{registry, mirror} {
				config := l.Add(fmt.Appendf(nil, `{"architecture":"amd64","os":"linux",`+
					`"rootfs":{"type":"layers","diff_ids":[%q]}}`, digestOf(lay)))
				config.MediaType = types.OCIConfigJSON
				from := l.Add(lay)
				from.MediaType = types.OCIUncompressedLayer
				l.Tags["1"] = l.Manifest(t, v1.Manifest{SchemaVersion: 2, Config: config,
					MediaType: types.OCIManifestSchema1, Layers: []v1.Descriptor{from}})
			}
			reads := 0
			for range 9 {
				mirror.Faults = append(mirror.Faults, func(w http.ResponseWriter, r *http.Request,
					content []byte) bool {
					if !strings.Contains(r.URL.Path, digestOf(lay)) {
						return false
					}
					if reads++; reads == 1 {
						return false // push looks for disks in it
					}
					http.ServeContent(w, r, "", time.Time{},
						bytes.NewReader(flipped(content, len(content)/3)))
					return true
				})
			}
			p := newPushTry(t)
			opt.Insecure = append(opt.Insecure, p.m.host)
			progress := new(Progress)
			require.NoError(t, testtool.Err(newClient(t, opt).Push(t.Context(), []string{p.file},
				p.m.ref(t, "vm/a:1"), PushOptions{Base: registry.ref(t, "vm/a:1").String(),
					Uploads: p.dir, Progress: progress})))
			require.Equal(t, progress.Total(), progress.Done())
			require.Equal(t, 2, reads)
			p.whole(t)
		})
	}
}

// TestMirrorIsNotReadForNothing: a file that is in the way is told at once, and not after the rest
// of the layer, which would show that the mirror lies.
func TestMirrorIsNotReadForNothing(t *testing.T) {
	registry, mirror, opt := mirrored(t)
	content := tarOf(t, tarFile{Name: "disk/a.img", Content: noise(95, 1<<20)})
	for _, l := range []*lying{registry, mirror} {
		l.Tags["1"] = l.Image(t, content)
	}
	mirror.Replace(digestOf(content), flipped(content, len(content)/2))
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a.img"), nil, 0o600))
	_, _, err := newClient(t, opt).Pull(t.Context(), registry.ref(t, "vm/a:1"), dir, PullOptions{})
	require.ErrorContains(t, err, "exists already")
	require.Zero(t, registry.Requests("/blobs/"))
}

// TestMirrorLiesInChunks has a mirror send wrong chunks of an image with an index. Each is fetched
// from the registry, and the mirror is no longer asked.
func TestMirrorLiesInChunks(t *testing.T) {
	content := noise(91, 8<<20)
	registry, mirror, opt := mirrored(t)
	w := tableOf(t, registrytest.Zstd, 256<<10, tarFile{Name: "disk/a.img", Content: content})
	layer, annotations := w.Layer(t, w.Entries)
	for _, l := range []*lying{registry, mirror} {
		l.Annotated(t, layer, annotations)
	}
	s := newStreaming(t, newClient(t, opt), t.TempDir(), t.TempDir())
	img := s.disk(t, s.open(t, registry.ref(t, "vm/a:1")), "a.img")
	bad := bytes.Clone(layer)
	for at := 1 << 20; at < len(bad)-100<<10; at += 100 << 10 {
		bad[at] ^= 1
	}
	mirror.Replace(digestOf(layer), bad)
	before := registry.Requests("/blobs/")
	require.True(t, bytes.Equal(content, contentOf(t, img)))
	require.Greater(t, registry.Requests("/blobs/"), before)
	require.Positive(t, s.opt.Cache.Stats().Wrong)
	require.LessOrEqual(t, s.opt.Cache.Stats().Wrong, int64(fetchesAtOnce))
}

// TestMirrorLiesInTables: a mirror sends a wrong table of contents.
func TestMirrorLiesInTables(t *testing.T) {
	content := noise(95, 1<<20)
	for _, codec := range []string{registrytest.Zstd, registrytest.Gzip} {
		registry, mirror, opt := mirrored(t)
		w := tableOf(t, codec, 256<<10, tarFile{Name: "disk/a.img", Content: content})
		layer, annotations := w.Layer(t, w.Entries)
		for _, l := range []*lying{registry, mirror} {
			l.Annotated(t, layer, annotations)
		}
		at := len(layer) - 60 // before the footer
		for key, place := range annotations {
			if strings.HasSuffix(key, "manifest-position") {
				at = testtool.Must(strconv.Atoi(strings.Split(place, ":")[0]))(t) + 10
			}
		}
		mirror.Replace(digestOf(layer), flipped(layer, at))
		ref := registry.ref(t, "vm/a:1")
		s := newStreaming(t, newClient(t, opt), t.TempDir(), t.TempDir())
		st := s.open(t, ref)
		require.NotNil(t, st.parts, "streamed")
		require.True(t, bytes.Equal(content, contentOf(t, s.disk(t, st, "a.img"))))
		brings(t, newClient(t, opt), ref, PullOptions{}, content)
		require.Positive(t, mirror.Requests("/blobs/"))
	}
}

// TestMirrorLiesInHeaders: a mirror sends a wrong header, or content, of a file that an index
// describes.
func TestMirrorLiesInHeaders(t *testing.T) {
	content := noise(94, 1<<20)
	m, mirror := newMemory(t), newLying(t)
	pushed(t, m, "a.raw", content, PushOptions{})
	r := resolves(t, m.client(t), m.ref(t, "vm/a:1"))
	text, _, err := r.Source.Manifest(t.Context(), r.Digest)
	require.NoError(t, err)
	mirror.Add(text)
	for _, desc := range append(r.Manifest.Layers, r.Manifest.Config) {
		mirror.Add(testtool.Must(r.Small(t.Context(), desc, 2<<20))(t))
	}
	last := r.Manifest.Layers[len(r.Manifest.Layers)-1].Digest.String()
	mirrors := []string{m.host + "=" + mirror.Host()}
	ref, right := parsed(t, m.host+"/vm/a@"+r.Digest), mirror.Store[last]
	for at, opt := range map[int]PullOptions{6: {Path: "a.raw"}, len(right) / 2: {}} {
		mirror.Replace(last, flipped(right, at))
		before := mirror.Requests("/blobs/" + last)
		brings(t, newClient(t, transport.Options{Insecure: []string{m.host, mirror.Host()},
			Mirrors: mirrors}), ref, opt, content)
		require.Greater(t, mirror.Requests("/blobs/"+last), before)
	}
	// Without another one to ask, the error says that the content is wrong, and not the index.
	mirror.Replace(last, flipped(right, len(right)/2))
	mirror.Tags["1"] = v1.Descriptor{Digest: testtool.Must(v1.NewHash(r.Digest))(t)}
	_, _, err = newClient(t, mirror.options()).Pull(t.Context(), mirror.ref(t, "vm/a:1"),
		filepath.Join(t.TempDir(), "a.raw"), PullOptions{})
	require.ErrorContains(t, err, "changed on its way")
}

// fetchesAtOnce is how many chunks may have been under way when the first was wrong.
const fetchesAtOnce = 16

// TestMirrorOfAnotherManifest has a mirror return another manifest for a digest. It is not
// believed.
func TestMirrorOfAnotherManifest(t *testing.T) {
	content := noise(92, 1<<20)
	registry, mirror, opt := mirrored(t)
	desc := registry.Image(t, tarOf(t, tarFile{Name: "disk/a.img", Content: content}))
	mirror.Replace(desc.Digest.String(), []byte(`{"schemaVersion":2,"layers":[]}`))
	ref := parsed(t, registry.Host()+"/vm/a@"+desc.Digest.String())
	dest := filepath.Join(t.TempDir(), "a.raw")
	require.NoError(t, testtool.Err2(newClient(t, opt).Pull(t.Context(), ref, dest, PullOptions{})))
	require.True(t, bytes.Equal(content, bytesOf(t, dest)))
}

// TestMirrorSendsNoManifest: a mirror answers for a tag with a page, or with a part of a manifest.
func TestMirrorSendsNoManifest(t *testing.T) {
	content := noise(96, 8<<10)
	for _, text := range []string{"<html>log in</html>", `{"schemaVersion":2,"layers":[`, ""} {
		registry, mirror, opt := mirrored(t)
		registry.NewImage(t, content)
		mirror.NewImage(t, content)
		mirror.Replace(mirror.Tags["1"].Digest.String(), []byte(text))
		brings(t, newClient(t, opt), registry.ref(t, "vm/a:1"), PullOptions{}, content)
		require.Positive(t, mirror.Requests("/manifests/1"))
	}
}

// TestMirrorLacksManifest: what the registry says counts, also where a mirror was asked after it.
func TestMirrorLacksManifest(t *testing.T) {
	registry, _, opt := mirrored(t)
	registry.NewImage(t, noise(93, 1<<10))
	src := testtool.Must(newClient(t, opt).Source(registry.ref(t, "vm/a:1"), ""))(t)
	defer src.Close()
	require.NoError(t, testtool.Err2(src.Manifest(t.Context(), "")))
	registry.Basic = "me:pa55word" // from now on
	err := testtool.Err2(src.Manifest(t.Context(), registry.Tags["1"].Digest.String()))
	require.ErrorContains(t, err, "401")
	require.NotContains(t, err.Error(), "does not exist")
}

// TestPullNowhere: a destination that cannot be written is an error at once, before any request.
func TestPullNowhere(t *testing.T) {
	l := newLying(t)
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for dest, want := range map[string]string{
		filepath.Join(t.TempDir(), "none", "a.raw"): "make it first",
		filepath.Join(file, "a.raw"):                "is not a directory",
		"/proc/a.raw":                               `nothing can be written to the directory "/proc"`,
		"/proc/":                                    `nothing can be written to the directory "/proc`,
	} {
		_, _, err := newClient(t, l.options()).Pull(t.Context(), l.ref(t, "vm/a:1"), dest,
			PullOptions{})
		require.ErrorContains(t, err, want)
	}
	require.Zero(t, l.Requests(""))
}

// TestMirrorComesBack: endpoints that fail in turns are asked in turns, and a mirror that comes
// back is asked again before the read fails. A mirror that does not have the blob is not asked
// twice.
func TestMirrorComesBack(t *testing.T) {
	content := noise(93, 1<<20)
	layer := tarOf(t, tarFile{Name: "disk/a.img", Content: content})
	registry, second, opt := mirrored(t)
	without := newLying(t)
	opt.Insecure = append(opt.Insecure, without.Host())
	opt.Mirrors = append([]string{registry.Host() + "=" + without.Host()}, opt.Mirrors...)
	for _, l := range []*lying{registry, second, without} {
		l.Tags["1"] = l.Image(t, layer)
	}
	delete(without.Store, digestOf(layer))
	asked := func(l *lying) int { return l.Requests("/blobs/" + digestOf(layer)) }
	away, half := says(503), cut(len(layer)/2)
	sent := 0 // halves
	for range 200 {
		second.Faults = append(second.Faults,
			func(w http.ResponseWriter, r *http.Request, p []byte) bool {
				switch n := asked(registry); {
				case n < 1+3*sent: // the registry must have been asked in vain first
					return away(w, r, p)
				case sent == 0:
					sent++
					return half(w, r, p)
				}
				return false
			})
		registry.Faults = append(registry.Faults, away)
	}
	opt.Turn = 200 * time.Millisecond
	c := newClient(t, opt)
	brings(t, c, registry.ref(t, "vm/a:1"), PullOptions{}, content)
	require.Equal(t, 1, asked(without))
}
