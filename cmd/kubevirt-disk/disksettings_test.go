package main

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
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
  boot.qcow2: {access-mode: read-shared}
  plain.raw: {read-only: true}
`))
	common := options.DiskSettings{
		CopyMode: instance.CopyOnWrite, CopyModeSource: "--copy-mode",
		AccessMode: serving.AccessWriteExclusive, Size: 1 << 30,
	}
	require.Equal(t, common, c.Settings.Disk)
	boot, plain := common, common
	boot.AccessMode, plain.ReadOnly = serving.AccessReadShared, true
	data := c.Settings.Disks["data.raw"]
	require.Contains(t, data.CopyModeSource, `"data.raw"`)
	require.Equal(t, options.DiskSettings{
		LUN: 7, CopyMode: instance.CopyNone, CopyModeSource: data.CopyModeSource,
		AccessMode: serving.AccessWriteShared, Size: 20 << 30,
		Identity: disk.Identity{Serial: "DATA-1", NAA: [8]byte{0x30, 7: 0x42}},
	}, data.DiskSettings)
	require.Equal(t, boot, c.Settings.Disks["boot.qcow2"].DiskSettings)
	require.Equal(t, plain, c.Settings.Disks["plain.raw"].DiskSettings)
	require.Len(t, c.Settings.Disks, 3)
	for name, d := range c.Settings.Disks {
		require.Contains(t, d.Source, strconv.Quote(name))
		require.False(t, d.FormatOnly)
	}
}

func TestWrongSettingsOfSingleDisks(t *testing.T) {
	for text, want := range map[string]string{
		"a.raw: {lun: 0}":           "1 to 16383",
		"a.raw: {lun: x}":           "1 to 16383",
		"a.raw: {lun: 16384}":       "1 to 16383",
		"a.raw: {lun: 65537}":       "1 to 16383",
		"a.raw: {copy-mode: cow}":   "copy-on-write",
		"a.raw: {access-mode: all}": "write-shared",
		"a.raw: {size: much}":       "is not a size",
		"a.raw: {size: -1}":         "is not a size",
		"a.raw: {size: 0}":          "is not a size: use",
		"a.raw: {size: 1GB}":        "is not a size: write",
		"a.raw: {size: 9999999Ti}":  "is not a size",
		"a.raw: {serial: 'a b'}":    "not a serial",
		"a.raw: {serial: ''}":       "not a serial",
		"a.raw: {serial: Größe}":    "not a serial",
		"a.raw: {serial: 0123456789abcdef0123456789abcdef01234}": "not a serial",
		"a.raw: {naa: 5000000000000042}":                         "the first is 3",
		"a.raw: {naa: 30}":                                       "16 hexadecimal digits",
		"a.raw: {read-only: perhaps}":                            "neither true nor false",
		"a.raw: {removable: true}":                               "removable",
		"a.raw: {format: vmdk}":                                  "use raw or qcow2",
		"a.raw: {format: ''}":                                    "use raw or qcow2",
	} {
		t.Run(text, func(t *testing.T) {
			cleanEnv(t)
			_, err := tryConfig("--config=" + yamlFile(t, "disks:\n  "+text+"\n"))
			require.ErrorContains(t, err, want)
			require.ErrorContains(t, err, `"a.raw"`)
			var wrong *problems.Error
			require.ErrorAs(t, err, &wrong)
		})
	}
}

// TestFormatsOfSingleDisks: only the format of a backing file can be set.
func TestFormatsOfSingleDisks(t *testing.T) {
	cleanEnv(t)
	c := mustConfig(t, "--config="+yamlFile(t, `disks:
  a.raw: {format: raw}
  b.img: {format: qcow2, lun: 9}
  c: {lun: 4}
`))
	for name, want := range map[string]struct {
		format image.Format
		only   bool
	}{"a.raw": {image.FormatRaw, true}, "b.img": {image.FormatQcow2, false}, "c": {"", false}} {
		require.Equal(t, want.format, c.Settings.Disks[name].Format)
		require.Equal(t, want.only, c.Settings.Disks[name].FormatOnly)
	}
}

// TestExtremeSettingsOfSingleDisks checks that the bounds in the messages are themselves valid.
func TestExtremeSettingsOfSingleDisks(t *testing.T) {
	cleanEnv(t)
	const serial = "!~23456789abcdef0123456789abcdef0123"
	c := mustConfig(t, "--config="+yamlFile(t, "disks: {a.raw: {lun: 16383, serial: '"+serial+
		"', naa: '0X3FFFFFFFFFFFFFFF'}, b.raw: {lun: 1}}"))
	require.EqualValues(t, 16383, c.Settings.Disks["a.raw"].LUN)
	require.EqualValues(t, 1, c.Settings.Disks["b.raw"].LUN)
	naa := [8]byte{0x3f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	require.Equal(t, disk.Identity{Serial: serial, NAA: naa}, c.Settings.Disks["a.raw"].Identity)
}

// TestSettingsOfNamedImages: these settings override what serve sets for a person at a terminal.
func TestSettingsOfNamedImages(t *testing.T) {
	cleanEnv(t)
	path := filepath.Join(t.TempDir(), "a.raw")
	require.NoError(t, os.WriteFile(path, make([]byte, 4096), 0o600))
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	settings.AddFlags(flags, newConfig().settings())
	require.NoError(t, flags.Parse([]string{"--config=" + yamlFile(t, "disks: {a.raw: {lun: 9}}")}))
	c := testtool.Must(loadConfig(flags, osfile.ReadText, path))(t)
	require.Equal(t, instance.CopyOnWrite, c.Settings.Disk.CopyMode)
	require.Equal(t, instance.CopyOnWrite, c.Settings.Disks["a.raw"].CopyMode)
}

func TestParseSize(t *testing.T) {
	for text, want := range map[string]int64{"512": 512, "1Ki": 1 << 10, "3Mi": 3 << 20,
		"20Gi": 20 << 30, "16Ti": 16 << 40,
		"512k": 512 << 10, "512K": 512 << 10, "8M": 8 << 20, "2G": 2 << 30,
		"1T": 1 << 40} {
		require.Equal(t, want, testtool.Must(parseSize(text))(t), text)
	}
	for _, text := range []string{"", "Gi", "0", "1.5Gi", "10GB", "1 Gi", "513", "-1", "+", "i",
		"1i",
		"8388608T", "99999999999999999999"} {
		require.ErrorContains(t, testtool.Err(parseSize(text)), "is not a", text)
	}
	require.ErrorContains(t, testtool.Err(parseSize("20GB")), `: write "20G": use`)
}

// TestServeDisksOfSetFormats checks that a signature in its content does not make serve refuse an
// image that is set to raw, also as a backing file.
func TestServeDisksOfSetFormats(t *testing.T) {
	l := newPlace(t, "a.raw", "b.raw")
	people := append(l.env, "LOG_FORMAT=console")
	path := filepath.Join(l.dir, "disk", "a.raw")
	content := append([]byte("LUKS\xba\xbe"), make([]byte, 4090)...)
	require.NoError(t, os.WriteFile(path, content, 0o644))
	fails(t, people, exitFailed, `set "format: raw" for it under "disks" in the configuration file`,
		"serve")

	env := func(disks string) []string {
		return append(l.env, "KUBEVIRT_DISK_CONFIG="+yamlFile(t, "disks: "+disks))
	}
	p := launch(t, binary(t), env("{a.raw: {format: raw}}"), "serve")
	p.untilReady(l)
	const message = "an image is served in its known format, although its content looks like " +
		"another one"
	require.Equal(t, "luks", p.logged(message, "looks_like"))
	require.Equal(t, exitDone, p.terminate())
	for disks, want := range map[string]string{
		"{a.raw: {format: raww}}":  `format "raww" is unknown: use raw or qcow2`,
		"{a.raw: {format: qcow2}}": "is said to be qcow2, and is a LUKS encrypted volume",
	} {
		_, _, stderr := run(t, append(env(disks), "LOG_FORMAT=console"), "serve")
		require.Contains(t, stderr, want)
	}

	require.NoError(t, os.Remove(path))
	require.NoError(t, os.Remove(filepath.Join(l.dir, "disk", "b.raw")))
	volume := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(volume, "disk.img"), make([]byte, 4096), 0o644))
	onVolume := append(env("{disk.img: {format: qcow2}}"),
		"PERSISTENT_DIR="+volume, "LOG_FORMAT=console")
	fails(t, onVolume, exitUsage, "the disk of a volume is always raw", "serve")
}
