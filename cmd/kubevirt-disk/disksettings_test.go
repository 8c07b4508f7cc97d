package main

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/target"
)

func TestSettingsOfSingleDisks(t *testing.T) {
	cleanEnv(t)
	c := mustConfig(t, "--copy-mode=copy-on-write", "--size=1Gi", "--config="+yamlFile(t, `
disks:
  data.raw:
    lun: 7
    copy-mode: none
    access-mode: write-shared
    size: 20Gi
    serial: DATA-1
    naa: 3000000000000042
    removable: true
  boot.qcow2: {access-mode: read-shared}
  plain.raw: {read-only: true}
`))
	var wrong problems
	got := c.settingsFor([]string{"boot.qcow2", "data.raw", "plain.raw", "zero.raw"}, &wrong)
	require.NoError(t, wrong.err())
	require.Equal(t, []diskSettings{
		{lun: 1, copyMode: disk.CopyOnWrite, copyModeSource: "--copy-mode", accessMode: target.AccessReadShared, size: 1 << 30, readOnly: true},
		{lun: 7, copyMode: disk.CopyNone, copyModeSource: got[1].copyModeSource, accessMode: target.AccessWriteShared, size: 20 << 30,
			identity: disk.Identity{Serial: "DATA-1", NAA: [8]byte{0x30, 0, 0, 0, 0, 0, 0, 0x42}}, removable: true},
		{lun: 3, copyMode: disk.CopyOnWrite, copyModeSource: "--copy-mode", accessMode: target.AccessWriteExclusive, size: 1 << 30, readOnly: true},
		{lun: 4, copyMode: disk.CopyOnWrite, copyModeSource: "--copy-mode", accessMode: target.AccessWriteExclusive, size: 1 << 30},
	}, got)
	require.Contains(t, got[1].copyModeSource, `"data.raw"`)
}

func TestWrongSettingsOfSingleDisks(t *testing.T) {
	for text, want := range map[string]string{
		"a.raw: {lun: 0}":           "1 to 16383",
		"a.raw: {lun: x}":           "1 to 16383",
		"a.raw: {lun: 16384}":       "1 to 16383",
		"a.raw: {lun: 65537}":       "1 to 16383",
		"a.raw: {lun: 2}":           `wanted by "a.raw" and "b.raw"`,
		"a.raw: {copy-mode: cow}":   "copy-on-write",
		"a.raw: {access-mode: all}": "write-shared",
		"a.raw: {size: much}":       "is no size",
		"a.raw: {size: -1}":         "is no size",
		"a.raw: {size: 9999999Ti}":  "is no size",
		"a.raw: {serial: 'a b'}":    "no serial",
		"a.raw: {serial: ''}":       "no serial",
		"a.raw: {serial: Größe}":    "no serial",
		"a.raw: {serial: 0123456789abcdef0123456789abcdef01234}": "no serial",
		"a.raw: {naa: 5000000000000042}":                         "the first is 3",
		"a.raw: {naa: 30}":                                       "16 hexadecimal digits",
		"a.raw: {read-only: perhaps}":                            "neither true nor false",
		"a.raw: {removable: 3}":                                  "neither true nor false",
		"c.raw: {lun: 3}":                                        "there is no such image: the images are a.raw, b.raw",
		"a.raw: {lun: 3}\n  b.raw: {lun: 3}":                     "LUN 3",
	} {
		t.Run(text, func(t *testing.T) {
			cleanEnv(t)
			c := mustConfig(t, "--config="+yamlFile(t, "disks:\n  "+text+"\n"))
			var wrong problems
			c.settingsFor([]string{"a.raw", "b.raw"}, &wrong)
			require.ErrorContains(t, wrong.err(), want)
		})
	}
}

// TestExtremeSettingsOfSingleDisks: what the messages name as the bounds is taken.
func TestExtremeSettingsOfSingleDisks(t *testing.T) {
	cleanEnv(t)
	const serial = "!~23456789abcdef0123456789abcdef0123"
	c := mustConfig(t, "--config="+yamlFile(t, "disks: {a.raw: {lun: 16383, serial: '"+serial+"', naa: '0X3FFFFFFFFFFFFFFF'}, b.raw: {lun: 1}}"))
	var wrong problems
	got := c.settingsFor([]string{"a.raw", "b.raw"}, &wrong)
	require.NoError(t, wrong.err())
	require.Equal(t, []uint16{16383, 1}, []uint16{got[0].lun, got[1].lun})
	require.Equal(t, disk.Identity{Serial: serial, NAA: [8]byte{0x3f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}}, got[0].identity)
}

func TestMoreImagesThanLUNs(t *testing.T) {
	cleanEnv(t)
	images := make([]string, maxLUN+1)
	for i := range images {
		images[i] = strconv.Itoa(i)
	}
	c := mustConfig(t)
	var wrong problems
	all := c.settingsFor(images[1:], &wrong)
	require.NoError(t, wrong.err())
	require.EqualValues(t, maxLUN, all[maxLUN-1].lun)
	c.settingsFor(images, &wrong)
	require.ErrorContains(t, wrong.err(), "16384 images are too many: a target has LUNs for 16383")
}

func TestParseSize(t *testing.T) {
	for text, want := range map[string]int64{"512": 512, "1Ki": 1 << 10, "3Mi": 3 << 20, "20Gi": 20 << 30, "16Ti": 16 << 40,
		"512k": 512e3, "512K": 512e3, "8M": 8e6, "2G": 2e9, "1T": 1e12} {
		got, err := parseSize(text)
		require.NoError(t, err)
		require.Equal(t, want, got, text)
	}
	for _, text := range []string{"", "Gi", "0", "1.5Gi", "10GB", "1 Gi", "513", "500M", "+", "99999999999999999999"} {
		_, err := parseSize(text)
		require.Error(t, err, text)
	}
}
