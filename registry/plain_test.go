package registry

import (
	"bytes"
	"context"
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
			_, _, err := newClient(t, transport.Options{}).Pull(context.Background(), ref, "-",
				PullOptions{Stdout: &out})
			require.NoError(t, err)
			require.True(t, bytes.Equal(c.want, out.Bytes()))

			stream := newStreaming(t, newClient(t, transport.Options{}), t.TempDir(), t.TempDir())
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
			stream := newStreaming(t, newClient(t, transport.Options{}), t.TempDir(), t.TempDir())
			_, err = stream.client.Stream(t.Context(), ref, stream.opt)
			require.ErrorContains(t, err, c.want)
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
		desc := s.Manifest(t, v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex,
			Manifests: m})
		desc.MediaType = types.OCIImageIndex
		return layoutOf(t, s, desc)
	}
	for _, all := range [][]v1.Descriptor{{foreign, a}, {a, attested}, {blank, foreign}} {
		brings(t, newClient(t, transport.Options{}), index(all...), PullOptions{}, content)
	}
	_, err := pull(t, index(a, b, foreign), PullOptions{})
	require.ErrorContains(t, err, "2 images and does not say for which platforms")
	require.ErrorContains(t, err, "NAME@"+a.Digest.String())
	require.ErrorContains(t, testtool.Err(pull(t, index(attested), PullOptions{})), "has no image")
}
