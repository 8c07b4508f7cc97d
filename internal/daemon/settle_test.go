package daemon

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/target"
)

// foundNames returns empty images of these names.
func foundNames(names ...string) (found []foundImage) {
	for _, name := range names {
		found = append(found, foundImage{name: name})
	}
	return found
}

func single(s DiskSettings) SingleDisk {
	return SingleDisk{DiskSettings: s, Source: "the source"}
}

// TestSettle checks that a disk gets the settings for all disks or its own ones, and its place as
// its LUN.
func TestSettle(t *testing.T) {
	d := newTestDaemon(t, &brokenDisk{})
	common := DiskSettings{CopyMode: instance.CopyOnWrite, Size: 1 << 30}
	s := Settings{Disk: common, Disks: map[string]SingleDisk{
		"b": single(DiskSettings{LUN: 7, AccessMode: target.AccessReadShared, Removable: true}),
		"d": single(DiskSettings{ReadOnly: true}),
	}}
	got, err := d.settle(s, foundNames("a", "b", "c", "d"))
	require.NoError(t, err)
	ofAll := func(lun uint16) DiskSettings {
		return DiskSettings{LUN: lun, CopyMode: instance.CopyOnWrite, Size: 1 << 30,
			AccessMode: target.AccessWriteExclusive}
	}
	require.Equal(t, []DiskSettings{
		ofAll(1),
		{LUN: 7, CopyMode: instance.CopyClone, AccessMode: target.AccessReadShared, ReadOnly: true,
			Removable: true},
		ofAll(3),
		{LUN: 4, CopyMode: instance.CopyClone, AccessMode: target.AccessWriteExclusive,
			ReadOnly: true},
	}, got)
}

// TestSettleRefuses checks that settings that clash are errors.
func TestSettleRefuses(t *testing.T) {
	d := newTestDaemon(t, &brokenDisk{})
	serial := DiskSettings{Identity: disk.Identity{Serial: "s"}}
	naa := DiskSettings{Identity: disk.Identity{NAA: [8]byte{0x30, 7: 1}}}
	for name, c := range map[string]struct {
		disks map[string]SingleDisk
		want  string
	}{
		"a LUN that is another one's place": {
			map[string]SingleDisk{"a": single(DiskSettings{LUN: 2})},
			`LUN 2: is wanted by "a" and "b": give one of them another number ` +
				`under "disks" in the file`},
		"one LUN twice": {map[string]SingleDisk{
			"a": single(DiskSettings{LUN: 3}), "b": single(DiskSettings{LUN: 3}),
		}, "LUN 3: is wanted by"},
		"no image": {map[string]SingleDisk{"c": single(DiskSettings{})},
			"the source: there is no such image: the images are a, b"},
		"one serial number": {map[string]SingleDisk{"a": single(serial), "b": single(serial)},
			`LUN 1 ("a") and LUN 2 ("b") have the same serial number, s,`},
		"one NAA identifier": {map[string]SingleDisk{"a": single(naa), "b": single(naa)},
			`have the same NAA identifier, 3000000000000001,`},
		"a qcow2 disk of a volume": {
			map[string]SingleDisk{"a": single(DiskSettings{Format: image.FormatQcow2})},
			`"disks" of "a": key "format": the disk of a volume is always raw`},
	} {
		_, err := d.settle(Settings{Disks: c.disks}, foundNames("a", "b"))
		require.ErrorContains(t, err, c.want, name)
	}
}

// TestSettleBackingFiles: only the format can be set for a backing file that is not a disk itself.
func TestSettleBackingFiles(t *testing.T) {
	d := newTestDaemon(t, &brokenDisk{})
	found := []foundImage{{name: "top", backing: []string{"base"}}}
	base := single(DiskSettings{Format: image.FormatRaw})
	base.FormatOnly = true
	s := Settings{Disks: map[string]SingleDisk{"base": base}}
	_, err := d.settle(s, found)
	require.NoError(t, err)
	require.Equal(t, map[string]image.Format{"base": image.FormatRaw}, s.formats())
	s.Disks["base"] = single(DiskSettings{Format: image.FormatRaw, LUN: 4})
	_, err = d.settle(s, found)
	require.ErrorContains(t, err, `not a disk of its own: only its "format" can be set`)
}

func TestMoreImagesThanLUNs(t *testing.T) {
	d := newTestDaemon(t, &brokenDisk{})
	images := make([]string, maxLUN+1)
	for i := range images {
		images[i] = strconv.Itoa(i)
	}
	all, err := d.settle(Settings{}, foundNames(images[1:]...))
	require.NoError(t, err)
	require.EqualValues(t, maxLUN, all[maxLUN-1].LUN)
	_, err = d.settle(Settings{}, foundNames(images...))
	require.ErrorContains(t, err, "16384 images are too many: a target has LUNs for 16383")
}

// TestTooLittleSpaceIsExplained checks that the message names smaller copy modes if a copy of the
// image does not fit, and only then.
func TestTooLittleSpaceIsExplained(t *testing.T) {
	d := newTestDaemon(t, &brokenDisk{})
	short := &image.SpaceError{Dir: "/work", What: "the expanded disk of a.raw",
		Needed: 2 << 30, Available: 1 << 30}
	explained := d.explainSpace(short, instance.CopyClone)
	require.ErrorContains(t, explained,
		"or copy only what the guest writes, with --copy-mode=copy-on-write (COPY_MODE)")
	require.ErrorIs(t, explained, disk.ErrNoSpace)
	require.Equal(t, error(short), d.explainSpace(short, instance.CopyOnWrite))
	tooLarge := &image.SpaceError{FileSize: 1 << 40}
	require.Equal(t, error(tooLarge), d.explainSpace(tooLarge, instance.CopyClone))
}
