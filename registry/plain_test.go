package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// TestPlainLayers: a layer that is a disk is pulled and served, whatever its media type and its
// compression.
func TestPlainLayers(t *testing.T) {
	content := noise(70, 3<<20)
	zeros := append(make([]byte, 4096), content...)
	image := qcow2Of(t, content)
	tar := types.MediaType("application/vnd.oci.image.layer.v1.tar")
	for name, c := range map[string]struct {
		layer     []byte
		mediaType types.MediaType
		title     string
		want      []byte
		file      string // the name of the disk when it is pulled
		fetched   bool   // as a whole, before it is served
	}{
		"raw":              {content, tar, "disks/fedora.img", content, "fedora.img", false},
		"begins with zero": {zeros, tar, "fedora.img", zeros, "fedora.img", false},
		"qcow2":            {image, tar, "fedora.qcow2", content, "fedora.raw", false},
		"gzip":             {gzipped(t, content), tar, "a.raw.gz", content, "a.raw", true},
		"zstd": {zstandard(t, image), "application/octet-stream", "a.qcow2.zst", content,
			"a.raw", true},
		"no title":   {image, "application/x-qcow2", "", content, "disk.raw", false},
		"layer type": {image, types.DockerLayer, "", content, "disk.raw", false},
		"KubeVirt's": {content, mediaDisk + "raw", "", content, "disk.raw", false},
		"KubeVirt's, qcow2": {image, mediaDisk + "qcow2", "", content, "disk.raw",
			false},
		"KubeVirt's, gzip": {gzipped(t, content), mediaDisk + "raw+gzip", "", content, "disk.raw",
			true},
	} {
		t.Run(name, func(t *testing.T) {
			s := store{}
			empty := s.PlainLayer([]byte("{}"), mediaEmpty, "")
			ref := layoutOf(t, s, s.Artifact(t, empty, s.PlainLayer(c.layer, c.mediaType, c.title)))
			dir := t.TempDir()
			client := newClient(t, transport.Options{})
			require.NoError(t, testtool.Err2(client.Pull(t.Context(), ref, dir, PullOptions{})))
			onlyFile(t, dir, c.file, c.want)
			var out bytes.Buffer
			_, _, err := client.Pull(t.Context(), ref, "-", PullOptions{Stdout: &out})
			require.NoError(t, err)
			require.True(t, bytes.Equal(c.want, out.Bytes()))

			stream := newStreaming(t, client, t.TempDir(), t.TempDir())
			st := stream.open(t, ref)
			require.Len(t, st.Disks(), 1)
			img := stream.disk(t, st, st.Disks()[0].Name)
			require.True(t, bytes.Equal(c.want, contentOf(t, img)))
			require.Equal(t, c.fetched, st.fetched != nil)
		})
	}
}

// TestPlainLayerIsServedAtOnce: such a layer of any size is read by ranges, where that is allowed.
func TestPlainLayerIsServedAtOnce(t *testing.T) {
	content := noise(71, smallLayer+3<<20)
	l := newLying(t)
	l.Tags["1"] = l.Artifact(t, l.PlainLayer(content, "application/octet-stream", "a.raw"))
	s := whenComplete(t, l, t.TempDir())
	st := s.open(t, l.ref(t, "vm/a:1"))
	img := s.disk(t, st, "a.raw")
	require.True(t, img.Unverified())
	require.True(t, bytes.Equal(content[20<<20:21<<20], readAt(t, img, 20<<20, 1<<20)))
	require.Less(t, s.opt.Cache.Stats().FetchedBytes, int64(len(content)/2))
	require.NoError(t, img.Verify(t.Context()))
}

// TestPlainLayersThatAreNoDisks: what is in no archive and no disk is refused with its type. Wrong
// bytes are no reason to take a layer for a disk.
func TestPlainLayersThatAreNoDisks(t *testing.T) {
	for name, c := range map[string]struct {
		layer     []byte
		mediaType types.MediaType
		want      string
	}{
		"a program": {noise(72, 8192), "application/wasm", `of the type "application/wasm"`},
		"no archive": {append(make([]byte, 512), noise(73, 8192)...), types.OCILayer,
			"tar archive cannot be read"},
		"only empty": {[]byte("{}"), mediaEmpty, "has no disk"},
	} {
		t.Run(name, func(t *testing.T) {
			s := store{}
			ref := layoutOf(t, s, s.Artifact(t, s.PlainLayer(c.layer, c.mediaType, "")))
			dir, err := pull(t, ref, PullOptions{})
			require.ErrorContains(t, err, c.want)
			emptyDir(t, dir)
			require.ErrorContains(t, opened(t, ref), c.want)
		})
	}
}

// TestIndexWithoutPlatforms: the one image of an index that does not say for which platform it is
// counts for all, unless there is one for this machine's.
func TestIndexWithoutPlatforms(t *testing.T) {
	s := store{}
	content := noise(74, 8192)
	a := s.Image(t, tarOf(t, tarFile{Name: "disk/a.img", Content: content}))
	b := s.Image(t, tarOf(t, tarFile{Name: "disk/b.img", Content: noise(75, 8192)}))
	with := func(d v1.Descriptor, change func(d *v1.Descriptor)) v1.Descriptor {
		change(&d)
		return d
	}
	foreign := with(b, func(d *v1.Descriptor) { d.Platform = platformOf(otherArch()) })
	blank := with(a, func(d *v1.Descriptor) { d.Platform = &v1.Platform{} })
	attested := with(b, func(d *v1.Descriptor) {
		d.Annotations = map[string]string{"vnd.docker.reference.type": "attestation-manifest"}
	})
	index := func(m ...v1.Descriptor) transport.Reference {
		return layoutOf(t, s, indexOf(t, s, "", m...))
	}
	for _, all := range [][]v1.Descriptor{{foreign, a}, {a, attested}, {blank, foreign}} {
		brings(t, newClient(t, transport.Options{}), index(all...), PullOptions{}, content)
	}
	_, err := pull(t, index(a, b, foreign), PullOptions{})
	require.ErrorContains(t, err, "2 images and does not say for which platforms")
	require.ErrorContains(t, err, "NAME@"+a.Digest.String())
	require.ErrorContains(t, testtool.Err(pull(t, index(attested), PullOptions{})), "has no image")
}

// containerOf makes an image of layers, whose configuration names the digests of their archives.
func containerOf(t testing.TB, s store, system string, diffIDs []string,
	layers ...[]byte) transport.Reference {
	t.Helper()
	config := v1.ConfigFile{OS: system}
	for _, id := range diffIDs {
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, testtool.Must(v1.NewHash(id))(t))
	}
	text := testtool.Must(json.Marshal(config))(t)
	m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Config: s.Add(text)}
	m.Config.MediaType = types.OCIConfigJSON
	for _, l := range layers {
		desc := s.Add(l)
		desc.MediaType = types.OCILayer
		m.Layers = append(m.Layers, desc)
	}
	return layoutOf(t, s, s.Manifest(t, m))
}

func openContainer(t testing.TB, ref transport.Reference) (*Container, error) {
	t.Helper()
	client := testtool.Must(New(transport.Options{}))(t)
	t.Cleanup(client.Close)
	c, err := client.Container(context.Background(), ref, "")
	if err == nil {
		t.Cleanup(func() { require.NoError(t, c.Close()) })
	}
	return c, err
}

func TestContainerLayersAreReadAndVerified(t *testing.T) {
	archive := tarOf(t, tarFile{Name: "a", Content: make([]byte, 1<<20)})
	id := digestOf(archive)
	other, packed := digestOf([]byte("other")), gzipped(t, archive)
	for _, c := range []struct {
		name   string
		layer  []byte
		diffID string
		right  bool
	}{
		{"plain", archive, id, true},
		{"gzip", gzipped(t, archive), id, true},
		{"zstd", zstandard(t, archive), id, true},
		{"another plain archive", archive, other, false},
		{"another archive in gzip", packed, other, false},
		{"the digest of what is packed", packed, digestOf(packed), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			image := testtool.Must(openContainer(t,
				containerOf(t, store{}, "linux", []string{c.diffID}, c.layer)))(t)
			require.Equal(t, []ContainerLayer{{Digest: digestOf(c.layer), DiffID: c.diffID,
				Size: int64(len(c.layer))}}, image.Layers())
			var progress Progress
			in := testtool.Must(image.OpenLayer(context.Background(), 0, &progress))(t)
			defer in.Close()
			content, err := io.ReadAll(in)
			var wrong *transport.DigestError
			if !c.right {
				require.ErrorAs(t, err, &wrong)
				require.Equal(t, c.diffID, wrong.Want)
				return
			}
			require.NoError(t, err)
			require.Equal(t, archive, content)
			require.Equal(t, int64(len(c.layer)), progress.Done())
		})
	}
}

func TestContainerWhoseLayerWasChanged(t *testing.T) {
	archive := tarOf(t, tarFile{Name: "a", Content: []byte("content")})
	layer := gzipped(t, archive)
	ref := containerOf(t, store{}, "linux", []string{digestOf(archive)}, layer)
	changed := append([]byte(nil), layer...)
	changed[len(changed)-1] ^= 1 // the length in gzip's trailer
	h := testtool.Must(v1.NewHash(digestOf(layer)))(t)
	require.NoError(t, os.WriteFile(filepath.Join(dirOf(ref), "blobs", "sha256", h.Hex),
		changed, 0o644))
	image := testtool.Must(openContainer(t, ref))(t)
	in := testtool.Must(image.OpenLayer(context.Background(), 0, nil))(t)
	defer in.Close()
	_, err := io.ReadAll(in)
	require.True(t, errors.As(err, new(*transport.DigestError)), "%v", err)
}

func TestContainerIsRefused(t *testing.T) {
	archive := tarOf(t, tarFile{Name: "a", Content: []byte("content")})
	_, err := openContainer(t, containerOf(t, store{}, "linux", nil, archive))
	require.ErrorContains(t, err, "it has 1 layers, and its configuration names 0")
	_, err = openContainer(t, containerOf(t, store{}, "windows", []string{digestOf(archive)},
		archive))
	require.ErrorContains(t, err, `it is made for "windows", not for linux`)
}

// TestContainerTagIsResolvedOnce: with a directory for kept data, a tag names the image that it
// named at first, and nothing that was read is requested again.
func TestContainerTagIsResolvedOnce(t *testing.T) {
	archive := tarOf(t, tarFile{Name: "a", Content: []byte("content")})
	ref := containerOf(t, store{}, "linux", []string{digestOf(archive)}, archive)
	client := testtool.Must(New(transport.Options{}))(t)
	defer client.Close()
	keep := filepath.Join(t.TempDir(), "kept")
	open := func(dir string) (digest string, config []byte) {
		t.Helper()
		c := testtool.Must(client.Container(context.Background(), ref, dir))(t)
		require.NoError(t, c.Close())
		digest, _ = c.Digests()
		return digest, c.Config()
	}
	first, config := open(keep)

	other := containerOf(t, store{}, "", []string{digestOf(archive)}, archive)
	require.NoError(t, os.RemoveAll(dirOf(ref)))
	require.NoError(t, os.Rename(dirOf(other), dirOf(ref)))
	now, _ := open("")
	require.NotEqual(t, first, now)
	again, kept := open(keep)
	require.Equal(t, first, again)
	require.Equal(t, config, kept)
}
