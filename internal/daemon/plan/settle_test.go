package plan

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/options/optionstest"
	"kubevirt.io/disk/serving"
)

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
