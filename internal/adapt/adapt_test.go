package adapt

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/adapter"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// emptyLayer is an image with one layer that has nothing, made into levels in a directory.
func emptyLayer(t *testing.T, dir, config string) *Made {
	t.Helper()
	var archive bytes.Buffer
	require.NoError(t, tar.NewWriter(&archive).Close())
	id := fmt.Sprintf("sha256:%x", sha256.Sum256(archive.Bytes()))
	d, err := adapter.Build(context.Background(), adapter.Image{Config: []byte(config),
		Layers: []adapter.Layer{{Digest: id, DiffID: id,
			Open: func(context.Context) (io.ReadCloser, error) {
				return io.NopCloser(bytes.NewReader(archive.Bytes())), nil
			}}}}, dir, adapter.Options{})
	require.NoError(t, err)
	return &Made{Disk: d}
}

// TestMirrorLies: after a mirror that has sent a wrong layer, the registry is asked.
func TestMirrorLies(t *testing.T) {
	registryAt, mirror := registrytest.NewLying(t), registrytest.NewLying(t)
	layer := registrytest.TarOf(t, registrytest.TarFile{Name: "a", Content: []byte("content")})
	for _, l := range []*registrytest.Lying{registryAt, mirror} {
		blob := l.Add(layer)
		blob.MediaType = types.OCIUncompressedLayer
		config := l.Add(fmt.Appendf(nil, `{"os":"linux","architecture":"amd64","rootfs":`+
			`{"type":"layers","diff_ids":[%q]}}`, blob.Digest))
		config.MediaType = types.OCIConfigJSON
		l.Tags["1"] = l.Manifest(t, v1.Manifest{SchemaVersion: 2,
			MediaType: types.OCIManifestSchema1, Config: config, Layers: []v1.Descriptor{blob}})
	}
	mirror.Replace(transport.DigestOf(layer), append(bytes.Clone(layer[:len(layer)-1]), 1))
	client := testtool.Must(registry.New(transport.Options{
		Insecure: []string{registryAt.Host(), mirror.Host()},
		Mirrors:  []string{registryAt.Host() + "=" + mirror.Host()}}))(t)
	defer client.Close()
	ref := testtool.Must(transport.ParseReference(registryAt.Host() + "/vm/a:1"))(t)
	made := testtool.Must(Image(t.Context(), client, ref, t.TempDir(),
		Options{KeepDir: t.TempDir()}))(t)
	require.Zero(t, made.Cached)
	require.Positive(t, mirror.Requests("/blobs/"+transport.DigestOf(layer)))
}

// TestFilesOfOthersStay: a person may keep files beside a machine, under names that are near.
func TestFilesOfOthersStay(t *testing.T) {
	dir := t.TempDir()
	disk := filepath.Join(dir, "disk.qcow2")
	for _, name := range []string{disk + ".new", filepath.Join(dir, ".film.partial")} {
		require.NoError(t, os.WriteFile(name, []byte("a person's"), 0o600))
		require.NoError(t, emptyLayer(t, dir, `{}`).WritableDisk(disk))
		text, err := os.ReadFile(name)
		require.NoError(t, err, name)
		require.Equal(t, "a person's", string(text), name)
		require.NoError(t, os.Remove(disk))
	}
	require.NoFileExists(t, disk+".partial")
}

// TestALargerDiskIsAskedFor: the command that helps can be copied.
func TestALargerDiskIsAskedFor(t *testing.T) {
	dir := t.TempDir()
	made, disk := emptyLayer(t, dir, `{}`), filepath.Join(dir, "my disk.qcow2")
	require.NoError(t, made.WritableDisk(disk))
	made.Size += 1 << 20
	require.ErrorContains(t, made.CheckWritable(disk),
		fmt.Sprintf("qemu-img resize '%s' %d", disk, made.Size))
}

// TestConfigure: the disk of a machine gets another configuration, and somebody else's disk stays
// as it is.
func TestConfigure(t *testing.T) {
	dir := t.TempDir()
	config := func(config string) []byte {
		img := testtool.Must(emptyLayer(t, dir, config).Open())(t)
		defer img.Close()
		return testtool.Must(Config(img))(t)
	}
	before, now := config(`{"a":1}`), config(`{"b":1}`)
	d := disktest.NewMemory(adapter.ConfigOffset + 2<<20)
	at := func() []byte { return filetest.Read(t, d, adapter.ConfigOffset, len(now)) }
	other := bytes.Repeat([]byte("data"), 64<<10)
	for _, content := range [][]byte{make([]byte, len(now)), other} {
		require.NoError(t, testtool.Err(d.WriteAt(t.Context(), content, adapter.ConfigOffset)))
		require.ErrorContains(t, Configure(d, now), "not made of a container image")
		require.Equal(t, content, at()[:len(content)])
	}
	require.ErrorContains(t, Configure(disktest.NewMemory(1<<20), now), "not made of")
	require.NoError(t, testtool.Err(d.WriteAt(t.Context(), before, adapter.ConfigOffset)))
	require.NoError(t, Configure(d, now))
	require.Equal(t, now, at())
}

// TestServedLevelsStay: the cache may remove the levels of a disk that nobody has open, but no
// others. A disk is known by the names of its levels, even if they were made again.
func TestServedLevelsStay(t *testing.T) {
	dir := t.TempDir()
	made := func(config string) *Made { return emptyLayer(t, dir, config) }
	served, other := made(`{"a":1}`), made(`{"a":2}`)
	img, err := served.Open()
	require.NoError(t, err)
	before := img.Unhashed()
	for _, p := range before {
		require.Equal(t, "level:"+p.Name, p.Digest)
	}
	sweep := func() (left []string) {
		t.Helper()
		all, err := Others(dir)()
		require.NoError(t, err)
		for _, o := range all {
			require.Positive(t, o.Bytes)
			require.WithinDuration(t, time.Now(), o.Used, time.Hour)
			if err := o.Remove(); err != nil {
				require.ErrorIs(t, err, cache.ErrInUse)
				left = append(left, o.Name)
			}
		}
		return left
	}
	left := sweep()
	require.Len(t, left, 2)
	require.Contains(t, left, served.Path)
	require.NoFileExists(t, other.Path)
	require.NoError(t, img.Close())
	require.Empty(t, sweep())
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, files)

	img, err = made(`{"a":1}`).Open()
	require.NoError(t, err)
	defer img.Close()
	require.Equal(t, before, img.Unhashed())
	require.Equal(t, filepath.Base(served.Path), img.Name())
}

// TestManyLayers: an image of as many layers as are accepted can be served, and its machine made
// again. One of more is refused before anything is made.
func TestManyLayers(t *testing.T) {
	var layer, archive bytes.Buffer
	require.NoError(t, tar.NewWriter(&layer).Close())
	id := fmt.Sprintf("sha256:%x", sha256.Sum256(layer.Bytes()))
	client := testtool.Must(registry.New(transport.Options{}))(t)
	defer client.Close()
	for _, n := range []int{maxLayers + 1, maxLayers} {
		archive.Reset()
		w := tar.NewWriter(&archive)
		for name, content := range map[string]string{"layer.tar": layer.String(),
			"manifest.json": fmt.Sprintf(`[{"Config":"config.json","RepoTags":["a:1"],"Layers":[%s]}]`,
				strings.TrimSuffix(strings.Repeat(`"layer.tar",`, n), ",")),
			"config.json": fmt.Sprintf(`{"os":"linux","architecture":"amd64","rootfs":`+
				`{"type":"layers","diff_ids":[%s]}}`,
				strings.TrimSuffix(strings.Repeat(`"`+id+`",`, n), ","))} {
			require.NoError(t, w.WriteHeader(&tar.Header{Name: name, Size: int64(len(content))}))
			require.NoError(t, testtool.Err(io.WriteString(w, content)))
		}
		require.NoError(t, w.Close())
		file, dir := filepath.Join(t.TempDir(), "image.tar"), filepath.Join(t.TempDir(), "levels")
		require.NoError(t, os.WriteFile(file, archive.Bytes(), 0o600))
		ref := testtool.Must(transport.ParseReference("docker-archive:" + file))(t)
		made, err := Image(t.Context(), client, ref, dir, Options{})
		if n > maxLayers {
			require.ErrorContains(t, err, fmt.Sprintf("%d layers", n))
			require.NoDirExists(t, dir)
			continue
		}
		require.NoError(t, err)
		img := testtool.Must(made.Open())(t)
		require.NoError(t, img.Close())
		disk := filepath.Join(dir, "disk.qcow2")
		require.NoError(t, made.WritableDisk(disk))
		require.NoError(t, made.CheckWritable(disk))
	}
}
