package main

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/problems"
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
	var wrong problems.List
	got := c.settingsFor([]string{"boot.qcow2", "data.raw", "plain.raw", "zero.raw"}, &wrong)
	require.NoError(t, wrong.Err())
	require.Equal(t, []diskSettings{
		{lun: 1, copyMode: instance.CopyOnWrite, copyModeSource: "--copy-mode", accessMode: target.AccessReadShared, size: 1 << 30, readOnly: true},
		{lun: 7, copyMode: instance.CopyNone, copyModeSource: got[1].copyModeSource, accessMode: target.AccessWriteShared, size: 20 << 30,
			identity: disk.Identity{Serial: "DATA-1", NAA: [8]byte{0x30, 0, 0, 0, 0, 0, 0, 0x42}}, removable: true},
		{lun: 3, copyMode: instance.CopyOnWrite, copyModeSource: "--copy-mode", accessMode: target.AccessWriteExclusive, size: 1 << 30, readOnly: true},
		{lun: 4, copyMode: instance.CopyOnWrite, copyModeSource: "--copy-mode", accessMode: target.AccessWriteExclusive, size: 1 << 30},
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
			var wrong problems.List
			c.settingsFor([]string{"a.raw", "b.raw"}, &wrong)
			require.ErrorContains(t, wrong.Err(), want)
		})
	}
}

// The formats are needed before the images are opened; of a backing file nothing else can be set.
func TestFormatsOfSingleDisks(t *testing.T) {
	cleanEnv(t)
	c := mustConfig(t, "--config="+yamlFile(t, `disks:
  a.raw: {format: raw}
  b.img: {format: qcow2, lun: 9}
  base: {format: raw}
  c: {lun: 4}
`))
	var wrong problems.List
	want := map[string]image.Format{
		"a.raw": image.FormatRaw, "b.img": image.FormatQcow2, "base": image.FormatRaw,
	}
	require.Equal(t, want, c.formats(&wrong))
	got := c.settingsFor([]string{"a.raw", "b.img", "c"}, &wrong, "base")
	require.NoError(t, wrong.Err())
	for i, format := range []image.Format{image.FormatRaw, image.FormatQcow2, ""} {
		require.Equal(t, format, got[i].setFormat)
	}
	c.settingsFor([]string{"a.raw", "b.img"}, &wrong, "base", "c")
	require.ErrorContains(t, wrong.Err(), `no disk of its own: nothing but its "format" can be set`)

	for _, format := range []string{"vmdk", "''"} {
		c = mustConfig(t, "--config="+yamlFile(t, "disks: {a.raw: {format: "+format+"}}"))
		wrong = problems.List{}
		c.formats(&wrong)
		require.ErrorContains(t, wrong.Err(), "use raw or qcow2")
		require.ErrorContains(t, wrong.Err(), `"a.raw"`)
	}
}

// TestExtremeSettingsOfSingleDisks: what the messages name as the bounds is taken.
func TestExtremeSettingsOfSingleDisks(t *testing.T) {
	cleanEnv(t)
	const serial = "!~23456789abcdef0123456789abcdef0123"
	c := mustConfig(t, "--config="+yamlFile(t, "disks: {a.raw: {lun: 16383, serial: '"+serial+"', naa: '0X3FFFFFFFFFFFFFFF'}, b.raw: {lun: 1}}"))
	var wrong problems.List
	got := c.settingsFor([]string{"a.raw", "b.raw"}, &wrong)
	require.NoError(t, wrong.Err())
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
	var wrong problems.List
	all := c.settingsFor(images[1:], &wrong)
	require.NoError(t, wrong.Err())
	require.EqualValues(t, maxLUN, all[maxLUN-1].lun)
	c.settingsFor(images, &wrong)
	require.ErrorContains(t, wrong.Err(), "16384 images are too many: a target has LUNs for 16383")
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

// TestServeDisksOfSetFormats: a signature at the beginning is no reason to refuse what is said to
// be raw, also below another image.
func TestServeDisksOfSetFormats(t *testing.T) {
	l := newPlace(t, "a.raw", "b.raw")
	people := append(l.env, "LOG_FORMAT=console")
	path := filepath.Join(l.dir, "disk", "a.raw")
	content := append([]byte("LUKS\xba\xbe"), make([]byte, 4090)...)
	require.NoError(t, os.WriteFile(path, content, 0o644))
	status, _, stderr := run(t, people, "serve")
	require.Equal(t, exitFailed, status)
	require.Contains(t, stderr, `set "format: raw" for it under "disks" in the configuration file`)

	env := func(disks string) []string {
		return append(l.env, "KUBEVIRT_DISK_CONFIG="+yamlFile(t, "disks: "+disks))
	}
	p := launch(t, binary(t), env("{a.raw: {format: raw}}"), "serve")
	p.untilReady(l)
	const message = "an image is served as what it is, whatever it looks like by now"
	require.Equal(t, "luks", p.logged(message, "looks_like"))
	require.Equal(t, exitDone, p.terminate())
	for disks, want := range map[string]string{
		"{a.raw: {format: raww}}":  `format "raww" is unknown: use raw or qcow2`,
		"{a.raw: {format: qcow2}}": "is said to be qcow2, and is a LUKS encrypted volume",
	} {
		_, _, stderr = run(t, append(env(disks), "LOG_FORMAT=console"), "serve")
		require.Contains(t, stderr, want)
	}

	require.NoError(t, os.Remove(path))
	require.NoError(t, os.Remove(filepath.Join(l.dir, "disk", "b.raw")))
	volume := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(volume, "disk.img"), make([]byte, 4096), 0o644))
	onVolume := append(env("{disk.img: {format: qcow2}}"),
		"PERSISTENT_DIR="+volume, "LOG_FORMAT=console")
	status, _, stderr = run(t, onVolume, "serve")
	require.Equal(t, exitUsage, status)
	require.Contains(t, stderr, "the disk of a volume is always raw")
}
