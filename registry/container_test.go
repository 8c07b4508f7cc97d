package registry

import (
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
	other := digestOf([]byte("other"))
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
		{"another archive in gzip", gzipped(t, archive), other, false},
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
				require.Equal(t, other, wrong.Want)
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
