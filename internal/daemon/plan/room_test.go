package plan

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
)

// checkRooms checks whether there is room for the disks of images, with a work directory in tiny.
func checkRooms(t *testing.T, tiny, images string, disks ...Disk) error {
	t.Helper()
	p := planOf(t, disks...)
	p.opt.Images.Dir, p.opt.WorkDir = images, filepath.Join(tiny, "work")
	p.opt.UsageTypes = options.UsageTypes{"elsewhere": t.TempDir()}
	for i := range disks {
		disks[i].Image = openImage(t, filepath.Join(images, disks[i].Name))
		defer disks[i].Image.Close()
		disks[i].DiskSettings = disks[i].DiskSettings.Resolved()
	}
	return p.CheckRoom(t.Context())
}

func openImage(t *testing.T, path string) *image.Image {
	t.Helper()
	img, err := image.Open(path, image.Options{})
	require.NoError(t, err)
	return img
}

// TestRoomForAllDisks: new disks that do not fit together on one file system are refused, and the
// message names them. A disk does not count if it exists, needs no copy, is elsewhere, or reads as
// zeros.
func TestRoomForAllDisks(t *testing.T) {
	const size = 4 << 20 // one disk fits, and two do not
	tiny, images := filetest.TinyFS(t, "6m"), t.TempDir()
	filetest.Put(t, images, "a.raw", filetest.Block(1, size), 0)
	filetest.Put(t, images, "b.raw", filetest.Block(2, size), 0)
	filetest.Put(t, images, "zeros.raw", filetest.Block(0, size), 0)
	filetest.Put(t, images, "small.raw", filetest.Block(3, 4096), 0)
	check := func(t *testing.T, disks ...Disk) error {
		return checkRooms(t, tiny, images, disks...)
	}
	err := check(t, Disk{Name: "a.raw"}, Disk{Name: "small.raw"}, Disk{Name: "b.raw"})
	require.ErrorIs(t, err, disk.ErrNoSpace)
	require.ErrorContains(t, err, `"a.raw", "small.raw", "b.raw" together needs up to`)
	require.ErrorContains(t, err, tiny)
	require.ErrorContains(t, err, "--copy-mode=copy-on-write")
	err = check(t, Disk{Name: "a.raw", Dir: filepath.Join(tiny, "claim", "a")}, Disk{Name: "b.raw"})
	require.ErrorIs(t, err, disk.ErrNoSpace, "a persistent disk and an ephemeral one")

	for name, second := range map[string]Disk{
		"small": {Name: "small.raw"},
		"zeros": {Name: "zeros.raw"},
		"copy on write": {Name: "b.raw",
			DiskSettings: options.DiskSettings{CopyMode: instance.CopyOnWrite}},
		"elsewhere": {Name: "b.raw", DiskSettings: options.DiskSettings{UsageType: "elsewhere"}},
	} {
		require.NoError(t, check(t, Disk{Name: "a.raw"}, second), name)
	}
	filetest.Put(t, filepath.Join(tiny, "work"), "b.raw/disk.raw", nil, size)
	require.NoError(t, check(t, Disk{Name: "a.raw"}, Disk{Name: "b.raw"}), "it is there already")
}

// TestTooLittleSpaceIsExplained checks that the message names smaller copy modes if a copy of the
// image does not fit, and only then.
func TestTooLittleSpaceIsExplained(t *testing.T) {
	p := planOf(t)
	explained := func(err error, mode instance.CopyMode) error {
		return p.MakeRoom(t.Context(), mode, func() error { return err })
	}
	short := &image.SpaceError{Dir: "/work", What: "the expanded disk of a.raw",
		Needed: 2 << 30, Available: 1 << 30}
	clone := explained(short, instance.CopyClone)
	require.ErrorContains(t, clone,
		"or copy only what the guest writes, with --copy-mode=copy-on-write (COPY_MODE)")
	require.ErrorIs(t, clone, disk.ErrNoSpace)
	require.Equal(t, error(short), explained(short, instance.CopyOnWrite))
	tooLarge := &image.SpaceError{FileSize: 1 << 40}
	require.Equal(t, error(tooLarge), explained(tooLarge, instance.CopyClone))
}
