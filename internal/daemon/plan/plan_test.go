package plan

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/options/optionstest"
	"kubevirt.io/disk/serving"
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

// TestFilesBesideImages: the daemon makes nothing where a start takes each file for an image.
func TestFilesBesideImages(t *testing.T) {
	for name, set := range map[string]func(opt *options.Options, dir string){
		"NBD": func(opt *options.Options, dir string) {
			opt.NBD = []options.NBDPortal{{Socket: filepath.Join(dir, "nbd.sock")}}
		},
		"vhost-user": func(opt *options.Options, dir string) { opt.VhostUserDir = dir },
		"control": func(opt *options.Options, dir string) {
			opt.ControlSocket = filepath.Join(dir, "control.sock")
		},
		"record": func(opt *options.Options, dir string) {
			opt.RecordBoot = filepath.Join(dir, "order")
		},
		"volumes": func(opt *options.Options, dir string) {
			require.NoError(t, os.MkdirAll(dir, 0o700))
			opt.Volumes = &options.Volumes{Dir: dir}
		},
	} {
		opt := planOf(t).opt
		set(opt, filepath.Join(opt.Images.Dir, "below"))
		require.NoError(t, Check(opt), name)
		set(opt, opt.Images.Dir)
		require.ErrorContains(t, Check(opt), "is in the directory of the images", name)
		opt.Images.Paths = []string{filepath.Join(t.TempDir(), "a.raw")}
		require.NoError(t, Check(opt), name)
	}
}

// TestImageNamedAsAVolume: a volume keeps its name when an image of that name comes.
func TestImageNamedAsAVolume(t *testing.T) {
	opt := planOf(t).opt
	path := filepath.Join(opt.Images.Dir, "vm1.raw")
	require.NoError(t, os.WriteFile(path, make([]byte, 4096), 0o600))
	found := []Disk{{Name: "vm1.raw", Image: openImage(t, path)}}
	volumes := Volumes{Names: []string{"vm1.raw"}}
	_, err := Make(t.Context(), opt, found, volumes)
	require.ErrorContains(t, err, `a volume has the name of the disk "vm1.raw" already`)
	require.ErrorContains(t, err, "rename the image")
	CloseImages(found)
	_, err = Make(t.Context(), opt, []Disk{{Name: "vm1.raw", AlreadyOpen: &instance.Instance{}}},
		volumes)
	require.ErrorContains(t, err, "name that server's export by its number")
}

// TestTwoServersWithOneName: two servers may call their disks the same. A reload finds the numbers
// of the start.
func TestTwoServersWithOneName(t *testing.T) {
	opt, other := planOf(t).opt, &instance.Instance{BlockSize: disk.SectorSize}
	path := filepath.Join(opt.Images.Dir, "a.raw")
	require.NoError(t, os.WriteFile(path, make([]byte, 4096), 0o600))
	p, err := Make(t.Context(), opt, []Disk{{Name: "a.raw", Image: openImage(t, path)},
		{Name: "1", AlreadyOpen: other}, {Name: "1", AlreadyOpen: other}}, Volumes{})
	require.NoError(t, err)
	defer p.Disks[0].Image.Close()
	again, err := p.Settle(opt.Settings)
	require.NoError(t, err)
	for i, d := range p.Disks {
		require.EqualValues(t, i+1, d.LUN)
		require.Equal(t, d.DiskSettings, again[i])
	}
}

// TestChooseNumbers: an image does not get the number of a volume, and two disks with one number,
// as of a copied directory, do not stop the start.
func TestChooseNumbers(t *testing.T) {
	clash := func(lun uint16, a, b string) { t.Errorf("LUN %d: %s and %s", lun, a, b) }
	n := numbers{byImage: map[string]uint16{"m": 1}, taken: map[uint16]string{2: "the volume v"}}
	require.Equal(t, []uint16{3, 1, 4}, n.choose(named("a", "m", "z"), []uint16{0, 0, 0}, clash))
	require.Equal(t, []uint16{1, 2}, numbers{}.choose(named("a", "m"), []uint16{0, 0}, clash))
	require.Equal(t, []uint16{2, 7, 3}, numbers{byImage: map[string]uint16{"a": 2, "c": 3}}.choose(
		named("a", "b", "c"), []uint16{0, 7, 0}, clash))
	clashes := 0
	n.choose(named("a", "m"), []uint16{1, 0}, func(uint16, string, string) { clashes++ })
	require.Equal(t, 1, clashes, "the number of m was set for a")
}

func TestVolatilePlace(t *testing.T) {
	require.Contains(t, volatilePlace(unix.OVERLAYFS_SUPER_MAGIC), "layer")
	require.Contains(t, volatilePlace(unix.TMPFS_MAGIC), "memory")
	require.Contains(t, volatilePlace(unix.RAMFS_MAGIC), "memory")
	for _, lasting := range []int64{
		unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.NFS_SUPER_MAGIC,
		unix.FUSE_SUPER_MAGIC,
	} {
		require.Empty(t, volatilePlace(lasting))
	}
}

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

// named returns disks without images, of these names.
func named(names ...string) (disks []Disk) {
	for _, name := range names {
		disks = append(disks, Disk{Name: name})
	}
	return disks
}

// planOf returns a plan in the making.
func planOf(t *testing.T, disks ...Disk) *Plan {
	t.Helper()
	opt := &options.Options{Images: options.Images{Dir: t.TempDir()}, WorkDir: t.TempDir(),
		Portals: []options.Address{optionstest.Loopback()}, Table: optionstest.Table}
	require.NoError(t, opt.Resolve())
	return &Plan{opt: opt, Disks: disks}
}

func single(s options.DiskSettings) options.SingleDisk {
	return options.SingleDisk{DiskSettings: s, Source: "the source"}
}

// TestSettle checks that a disk gets the settings for all disks or its own ones, and its place as
// its LUN.
func TestSettle(t *testing.T) {
	common := options.DiskSettings{CopyMode: instance.CopyOnWrite, Size: 1 << 30}
	s := options.Settings{Disk: common, Disks: map[string]options.SingleDisk{
		"b": single(options.DiskSettings{LUN: 7, AccessMode: serving.AccessReadShared}),
		"d": single(options.DiskSettings{ReadOnly: true}),
	}}
	got, err := planOf(t, named("a", "b", "c", "d")...).Settle(s)
	require.NoError(t, err)
	ofAll := func(lun uint16) options.DiskSettings {
		return options.DiskSettings{LUN: lun, CopyMode: instance.CopyOnWrite, Size: 1 << 30,
			AccessMode: serving.AccessWriteExclusive}
	}
	require.Equal(t, []options.DiskSettings{
		ofAll(1),
		{LUN: 7, CopyMode: instance.CopyClone, AccessMode: serving.AccessReadShared,
			ReadOnly: true},
		ofAll(3),
		{LUN: 4, CopyMode: instance.CopyClone, AccessMode: serving.AccessWriteExclusive,
			ReadOnly: true},
	}, got)
}

// TestSettleRefuses checks that settings that clash are errors.
func TestSettleRefuses(t *testing.T) {
	serial := options.DiskSettings{Identity: disk.Identity{Serial: "s"}}
	naa := options.DiskSettings{Identity: disk.Identity{NAA: [8]byte{0x30, 7: 1}}}
	for name, c := range map[string]struct {
		disks map[string]options.SingleDisk
		want  string
	}{
		"a LUN that is another one's place": {
			map[string]options.SingleDisk{"a": single(options.DiskSettings{LUN: 2})},
			`LUN 2: is wanted by "a" and "b": give one of them another number ` +
				`under "disks" in the file`},
		"one LUN twice": {map[string]options.SingleDisk{
			"a": single(options.DiskSettings{LUN: 3}), "b": single(options.DiskSettings{LUN: 3}),
		}, "LUN 3: is wanted by"},
		"no image": {map[string]options.SingleDisk{"c": single(options.DiskSettings{})},
			"the source: there is no such image: the images are a, b"},
		"one serial number": {
			map[string]options.SingleDisk{"a": single(serial), "b": single(serial)},
			`LUN 1 ("a") and LUN 2 ("b") have the same serial number, s,`},
		"one NAA identifier": {map[string]options.SingleDisk{"a": single(naa), "b": single(naa)},
			`have the same NAA identifier, 3000000000000001,`},
		"a qcow2 disk of a volume": {
			map[string]options.SingleDisk{
				"a": single(options.DiskSettings{Format: image.FormatQcow2})},
			`"disks" of "a": key "format": the disk of a volume is always raw`},
	} {
		_, err := planOf(t, named("a", "b")...).Settle(options.Settings{Disks: c.disks})
		require.ErrorContains(t, err, c.want, name)
	}
}

// TestSettleOfAnotherServer: what the server of a disk decides is not ignored in silence.
func TestSettleOfAnotherServer(t *testing.T) {
	p := planOf(t, Disk{Name: "a", AlreadyOpen: &instance.Instance{BlockSize: disk.SectorSize}})
	settle := func(s options.DiskSettings) error {
		_, err := p.Settle(options.Settings{
			Disks: map[string]options.SingleDisk{"a": single(s)}})
		return err
	}
	require.NoError(t, settle(options.DiskSettings{LUN: 2, BlockSize: disk.SectorSize,
		Format: image.FormatRaw, ReadOnly: true}))
	for _, s := range []options.DiskSettings{{Size: 512}, {BlockSize: disk.LongBlock},
		{Format: image.FormatQcow2}, {UsageType: "fast"},
		{Identity: disk.Identity{Serial: "s"}}} {
		require.ErrorContains(t, settle(s), `the disk "a": is on another server`)
	}
	_, err := p.Settle(options.Settings{Disk: options.DiskSettings{BlockSize: disk.LongBlock}})
	require.NoError(t, err, "the block size of all disks is for those that are images")
}

// TestSettleBackingFiles: only the format can be set for a backing file that is not a disk itself.
func TestSettleBackingFiles(t *testing.T) {
	p := planOf(t, Disk{Name: "top", Backing: []string{"base"}})
	base := single(options.DiskSettings{Format: image.FormatRaw})
	base.FormatOnly = true
	s := options.Settings{Disks: map[string]options.SingleDisk{"base": base}}
	_, err := p.Settle(s)
	require.NoError(t, err)
	require.Equal(t, map[string]image.Format{"base": image.FormatRaw}, s.Formats())
	s.Disks["base"] = single(options.DiskSettings{Format: image.FormatRaw, LUN: 4})
	_, err = p.Settle(s)
	require.ErrorContains(t, err, `not a disk of its own: only its "format" can be set`)
}

func TestMoreImagesThanLUNs(t *testing.T) {
	images := make([]string, serving.MaxNumber+1)
	for i := range images {
		images[i] = strconv.Itoa(i)
	}
	all, err := planOf(t, named(images[1:]...)...).Settle(options.Settings{})
	require.NoError(t, err)
	require.EqualValues(t, serving.MaxNumber, all[serving.MaxNumber-1].LUN)
	_, err = planOf(t, named(images...)...).Settle(options.Settings{})
	require.ErrorContains(t, err, "16384 images are too many: a target has LUNs for 16383")
}
