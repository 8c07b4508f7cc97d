package plan

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
)

// TestMake makes a plan without a daemon: where disks lie, which numbers they get beside volumes,
// and which images are opened. It writes nothing.
func TestMake(t *testing.T) {
	opt := planOf(t).opt
	path := filepath.Join(opt.Images.Dir, "a.raw")
	require.NoError(t, os.WriteFile(path, make([]byte, 4096), 0o600))
	opt.PersistentDir, opt.UsageTypes = t.TempDir(), options.UsageTypes{"fast": t.TempDir()}
	opt.Settings.Disks = map[string]options.SingleDisk{
		"far": {DiskSettings: options.DiskSettings{UsageType: "fast", Format: image.FormatRaw}}}
	booted := make(chan struct{})
	var asked []image.Format
	found := []Disk{
		{Name: "a.raw", Image: openImage(t, path)},
		{Name: "far", Far: &Far{Digests: []string{"sha256:1"},
			Open: func(_ context.Context, as image.Format) (*image.Image, <-chan struct{}, error) {
				asked = append(asked, as)
				return openImage(t, path), booted, nil
			}}},
	}
	p, err := Make(t.Context(), opt, found, Volumes{LUNs: map[uint16]string{1: "v"}})
	require.NoError(t, err)
	defer CloseImages(p.Disks)
	require.Equal(t, []image.Format{image.FormatRaw}, asked)
	a, far := p.Disks[0], p.Disks[1]
	require.Equal(t, `LUN 2 ("a.raw")`, a.String())
	require.Equal(t, filepath.Join(opt.PersistentDir, "a.raw"), a.Dir)
	require.Equal(t, instance.CopyClone, a.CopyMode)
	require.Nil(t, a.CopyAfter)
	require.Equal(t, `LUN 3 ("far")`, far.String())
	require.Equal(t, filepath.Join(opt.UsageTypes["fast"], "far"), far.Dir)
	require.Equal(t, (<-chan struct{})(booted), far.CopyAfter)
	for _, dir := range []string{opt.WorkDir, opt.PersistentDir, opt.UsageTypes["fast"]} {
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Empty(t, entries, dir)
	}

	opt.Settings.Disk.CopyMode = instance.CopyNone
	opt.Settings.Disks = nil
	_, err = Make(t.Context(), opt, found[1:], Volumes{})
	require.ErrorContains(t, err, `"far" lies in a registry, and cannot be served in place`)
	_, err = Make(t.Context(), opt, found, Volumes{Single: true})
	require.ErrorContains(t, err, "belongs to a volume made without an image")
}

// TestImageNamedAsAVolume: a volume keeps its name when an image of that name comes.
func TestImageNamedAsAVolume(t *testing.T) {
	opt := planOf(t).opt
	path := filepath.Join(opt.Images.Dir, "vm1.raw")
	require.NoError(t, os.WriteFile(path, make([]byte, 4096), 0o600))
	found := []Disk{{Name: "vm1.raw", Image: openImage(t, path)}}
	_, err := Make(t.Context(), opt, found, Volumes{Names: []string{"vm1.raw"}})
	require.ErrorContains(t, err, `a volume has the name of the image "vm1.raw" already`)
	CloseImages(found)
}
