package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// TestLocalImagesThatAreNone: if there is no such image on this machine, the error says what is
// wrong and what to write instead.
func TestLocalImagesThatAreNone(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	require.NoError(t, os.Mkdir(at("empty"), 0o755))
	require.NoError(t, os.Mkdir(at("none"), 0o755))
	require.NoError(t, os.WriteFile(at("file"), nil, 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(at("none"), "index.json"),
		[]byte(`{"schemaVersion":2,"manifests":[]}`), 0o644))
	saved := tarOf(t, tarFile{Name: "manifest.json", Content: []byte("[]")})
	require.NoError(t, os.WriteFile(at("saved"), saved, 0o644))
	require.NoError(t, os.WriteFile(at("packed"), gzipped(t, saved), 0o644))
	client := newClient(t, transport.Options{})
	for ref, want := range map[string][]string{
		"oci:" + at("missing"):            {"there is no directory", at("missing"), "skopeo copy"},
		"oci:" + at("missing") + ":web":   {"there is no directory", at("missing") + `"`},
		"oci:" + at("file"):               {"is a file", "write docker-archive:" + at("file")},
		"oci:" + at("empty"):              {"is not an OCI layout", "index.json", at("empty")},
		"oci:" + at("none"):               {"has no images", "skopeo copy", "oci:" + at("none")},
		"oci:" + at("none") + ":web":      {"has no images", "skopeo copy", "oci:" + at("none")},
		"docker-archive:" + at("missing"): {"there is no file", at("missing"), "podman save"},
		"docker-archive:" + at("none"):    {"is a directory", "write oci:" + at("none")},
		"oci-archive:" + at("missing"):    {"there is no file", at("missing"), "skopeo copy"},
		"oci-archive:" + at("none"):       {"is a directory", "write oci:" + at("none")},
		"oci-archive:" + at("file"):       {"has no container image", "index.json"},
		"oci-archive:" + at("packed"):     {"is compressed by gzip: decompress it first"},
		"docker-archive:" + at("packed"):  {"is compressed by gzip: decompress it first"},
		"oci-archive:" + at("saved") + ":web": {"has no tags",
			"write docker-archive:" + at("saved")},
	} {
		parsed := parsed(t, ref)
		_, err := client.Container(context.Background(), parsed, "")
		for _, text := range want {
			require.ErrorContains(t, err, text, ref)
		}
	}
}

// TestLocalImagesThatArePipes: a named pipe in the place of a file waits for nobody.
func TestLocalImagesThatArePipes(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	pipe := func(name string) {
		require.NoError(t, os.MkdirAll(filepath.Dir(at(name)), 0o755))
		require.NoError(t, syscall.Mkfifo(at(name), 0o644))
	}
	pipe("pipe")
	pipe("index/index.json")
	config := []byte("{}")
	manifest := testtool.Must(json.Marshal(v1.Manifest{SchemaVersion: 2,
		MediaType: types.OCIManifestSchema1, Config: descriptorOf(config),
		Layers: []v1.Descriptor{descriptorOf([]byte("layer"))}}))(t)
	for _, name := range []string{"manifest", "layer"} {
		index := testtool.Must(json.Marshal(v1.IndexManifest{SchemaVersion: 2,
			Manifests: []v1.Descriptor{descriptorOf(manifest)}}))(t)
		require.NoError(t, os.MkdirAll(at(name), 0o755))
		require.NoError(t, os.WriteFile(at(name+"/index.json"), index, 0o644))
	}
	pipe("manifest/blobs/sha256/" + descriptorOf(manifest).Digest.Hex)
	pipe("layer/blobs/sha256/" + descriptorOf([]byte("layer")).Digest.Hex)
	require.NoError(t, os.WriteFile(at("layer/blobs/sha256/"+descriptorOf(manifest).Digest.Hex),
		manifest, 0o644))
	client := newClient(t, transport.Options{})
	for ref, want := range map[string]string{
		"oci:" + at("pipe"):            "is a file",
		"oci-archive:" + at("pipe"):    "a named pipe",
		"docker-archive:" + at("pipe"): "a named pipe",
		"oci:" + at("index"):           "a named pipe",
		"oci:" + at("manifest"):        "a named pipe",
		"oci:" + at("layer"):           "a named pipe",
	} {
		parsed := parsed(t, ref)
		done := testtool.Go(func() error {
			_, _, err := client.Pull(context.Background(), parsed, at("out"), PullOptions{})
			return err
		})
		err := testtool.Await(t, done, "%s: it waits for somebody to write", ref)
		require.ErrorContains(t, err, want, ref)
	}
}

// descriptorOf describes a blob.
func descriptorOf(content []byte) v1.Descriptor {
	digest, _ := v1.NewHash(digestOf(content))
	return v1.Descriptor{MediaType: types.OCIUncompressedLayer, Size: int64(len(content)),
		Digest: digest}
}

// TestOCIArchive: an archive of an OCI layout is read as the layout is, whichever kind of archive
// the reference says that it is.
func TestOCIArchive(t *testing.T) {
	s := store{}
	content, other := noise(76, 1<<20), noise(77, 8192)
	a := s.Image(t, gzipped(t, tarOf(t, tarFile{Name: "disk/a.img", Content: content})))
	b := s.Image(t, tarOf(t, tarFile{Name: "disk/b.img", Content: other}))
	archived := func(images ...v1.Descriptor) string {
		index, err := json.Marshal(v1.IndexManifest{SchemaVersion: 2, Manifests: images})
		require.NoError(t, err)
		files := []tarFile{{Name: "./oci-layout", Content: []byte("{}")},
			{Name: "./index.json", Content: index}}
		for digest, blob := range s {
			h := testtool.Must(v1.NewHash(digest))(t)
			files = append(files, tarFile{Name: "./blobs/sha256/" + h.Hex, Content: blob})
		}
		file := filepath.Join(t.TempDir(), "vm.oci-archive")
		require.NoError(t, os.WriteFile(file, tarOf(t, files...), 0o644))
		return file
	}
	pulled := func(ref string) ([]byte, error) {
		parsed := parsed(t, ref)
		require.False(t, parsed.Remote())
		dir, err := pull(t, parsed, PullOptions{})
		if err != nil {
			return nil, err
		}
		got := bytesOf(t, filepath.Join(dir, "out.raw"))
		return got, nil
	}
	one := archived(a)
	for _, prefix := range []string{"oci-archive:", "docker-archive:"} {
		require.True(t, bytes.Equal(content, testtool.Must(pulled(prefix+one))(t)))
	}
	tagged := func(d v1.Descriptor, tag string) v1.Descriptor {
		d.Annotations = map[string]string{"org.opencontainers.image.ref.name": tag}
		return d
	}
	two := archived(tagged(a, "a"), tagged(b, "b"))
	require.True(t, bytes.Equal(other, testtool.Must(pulled("oci-archive:"+two+":b"))(t)))
	_, err := pulled("oci-archive:" + two)
	require.ErrorContains(t, err, "name one as oci-archive:"+two+":TAG")

	ref := parsed(t, "oci-archive:"+two+":a")
	stream := newStreaming(t, newClient(t, transport.Options{}), t.TempDir(), t.TempDir())
	img := stream.disk(t, stream.open(t, ref), "a.img")
	require.True(t, bytes.Equal(content, contentOf(t, img)))

	_, err = transport.ParseReference("vm.oci-archive")
	require.ErrorContains(t, err, "write oci-archive:vm.oci-archive")
	_, err = transport.ParseReference("oci-archive:")
	require.ErrorContains(t, err, "names no file")
}

// TestSavedWithCompressedLayers: crane and others compress the layers of an archive, whose
// configuration has the digests of what is inside.
func TestSavedWithCompressedLayers(t *testing.T) {
	content := noise(96, 1<<20)
	layer := tarOf(t, tarFile{Name: "disk/a.raw", Content: content})
	digest := testtool.Must(v1.NewHash(digestOf(layer)))(t)
	config := testtool.Must(json.Marshal(v1.ConfigFile{Architecture: "amd64", OS: "linux",
		RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{digest}}}))(t)
	wrong := gzipped(t, tarOf(t, tarFile{Name: "disk/a.raw", Content: flipped(content, 5)}))
	for name, c := range map[string]struct {
		layer []byte
		want  string
	}{
		"plain": {layer: layer}, "gzip": {layer: gzipped(t, layer)},
		"zstd":          {layer: zstandard(t, layer)},
		"wrong content": {wrong, "the content of " + digest.String()},
		"cut":           {gzipped(t, layer)[:1000], "unexpected EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			index := `[{"Config": "config.json", "RepoTags": ["vm:1"], "Layers": ["l.tar.gz"]}]`
			file := filepath.Join(t.TempDir(), "a.tar")
			require.NoError(t, os.WriteFile(file, tarOf(t,
				tarFile{Name: "config.json", Content: config},
				tarFile{Name: "l.tar.gz", Content: c.layer},
				tarFile{Name: "manifest.json", Content: []byte(index)}), 0o644))
			dir, err := pull(t, parsed(t, "docker-archive:"+file), PullOptions{})
			if c.want != "" {
				require.ErrorContains(t, err, c.want)
				emptyDir(t, dir)
				return
			}
			require.NoError(t, err)
			onlyFile(t, dir, "out.raw", content)
		})
	}
}

// TestManyValues: JSON of an image that somebody has saved takes no more memory than its length
// allows: values of two bytes take a hundred each as Go has them.
func TestManyValues(t *testing.T) {
	many := "[" + strings.Repeat("{},", 100_000) + "{}]"
	saved := func(manifest, config string) string {
		file := filepath.Join(t.TempDir(), "saved.tar")
		require.NoError(t, os.WriteFile(file, tarOf(t,
			tarFile{Name: "manifest.json", Content: []byte(manifest)},
			tarFile{Name: "config.json", Content: []byte(config)},
			tarFile{Name: "layer.tar", Content: tarOf(t)}), 0o600))
		return "docker-archive:" + file
	}
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "oci-layout"), []byte("{}"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "index.json"),
		fmt.Appendf(nil, `{"schemaVersion":2,"manifests":%s}`, many), 0o600))
	const one = `[{"Config":"config.json","Layers":["layer.tar"]}]`
	for name, text := range map[string]string{
		"manifest": saved(many, "{}"),
		"history":  saved(one, `{"history":`+many+`,"rootfs":{"diff_ids":[]}}`),
		"index":    "oci:" + dir,
	} {
		ref := parsed(t, text)
		_, err := pull(t, ref, PullOptions{})
		require.ErrorContains(t, err, "more than 65536 values", name)
	}
	_, err := readConfig([]byte(`{"history":`+many+`,"rootfs":{"diff_ids":[]}}`), 0)
	require.ErrorContains(t, err, "more than 65536 values")
}
