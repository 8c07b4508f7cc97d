package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target/targettest"
)

// annotations writes a file as the downward API does.
func annotations(t *testing.T, pairs ...string) string {
	t.Helper()
	var b strings.Builder
	for i := 0; i+1 < len(pairs); i += 2 {
		fmt.Fprintf(&b, "%s=%s\n", pairs[i], strconv.Quote(pairs[i+1]))
	}
	path := filepath.Join(t.TempDir(), "annotations")
	require.NoError(t, os.WriteFile(path, []byte(b.String()), 0o600))
	return path
}

func TestUsageTypesOfSettingsAndAnnotations(t *testing.T) {
	cleanEnv(t)
	ssd, rust, tape := t.TempDir(), t.TempDir(), t.TempDir()
	path := annotations(t, "example.com/other", "a\nb=\"c\"",
		"kubevirt.io/storage.usage-type.tape", tape,
		"kubevirt.io/storage.usage-type.fast", ssd)
	c := mustConfig(t, "--usage-type=fast="+ssd, "--usage-type=slow="+rust,
		"--pod-annotations="+path, "--config="+yamlFile(t, "disks:\n  a.raw: {usage-type: tape}\n"))
	require.Equal(t, options.UsageTypes{"fast": ssd, "slow": rust, "tape": tape}, c.UsageTypes)
	require.Equal(t, "tape", c.Settings.Disks["a.raw"].UsageType)

	t.Setenv("USAGE_TYPES", "fast="+ssd+", slow="+rust)
	require.Equal(t, options.UsageTypes{"fast": ssd, "slow": rust}, mustConfig(t).UsageTypes)
	c = mustConfig(t, "--config="+yamlFile(t, "usage-type: [fast="+rust+"]\n"))
	require.Equal(t, ssd, c.UsageTypes["fast"], "the environment wins over the file")
}

func TestWrongUsageTypes(t *testing.T) {
	cleanEnv(t)
	notAnnotations := filepath.Join(t.TempDir(), "annotations")
	require.NoError(t, os.WriteFile(notAnnotations, []byte("a=\"b\"\nsecret-of-somebody\n"), 0o600))
	choose := func(name string) string {
		return "--config=" + yamlFile(t, "disks:\n  a.raw: {usage-type: "+name+"}\n")
	}
	for want, args := range map[string][]string{
		"write NAME=DIRECTORY":    {"--usage-type=/storage/ssd"},
		"write fast=DIRECTORY":    {"--usage-type=fast="},
		"at most 44 letters":      {"--usage-type=-fast=/x"},
		"has two directories":     {"--usage-type=fast=/x", "--usage-type=fast=/y"},
		"cannot be read":          {"--pod-annotations=/nonexistent/file"},
		"line 2: want key=":       {"--pod-annotations=" + notAnnotations},
		"is not the name of a":    {choose("a b")},
		"unknown: there are none": {choose("fast")},
		"use one of medium, slow": {"--usage-type=slow=/x", "--usage-type=medium=/y",
			choose("fast")},
	} {
		_, err := tryConfig(args...)
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "secret-of-somebody")
	}
}

func FuzzParseAnnotations(f *testing.F) {
	f.Add([]byte("a=\"b\"\nkubevirt.io/storage.usage-type.fast=\"/storage/ssd\"\n"))
	f.Add([]byte("a=\"\\n\\u00e4\\xff\"\r\n\r\nb=`c`"))
	f.Add([]byte("=\n\"\"="))
	f.Fuzz(func(t *testing.T, text []byte) {
		all, err := parseAnnotations(text)
		if err != nil {
			return
		}
		var b strings.Builder
		for key, value := range all {
			fmt.Fprintf(&b, "%s=%s\n", key, strconv.Quote(value))
		}
		require.Equal(t, all, testtool.Must(parseAnnotations([]byte(b.String())))(t))
	})
}

// TestServeUsageTypes serves disks on storages that they choose, and changes the choice.
func TestServeUsageTypes(t *testing.T) {
	for _, persistent := range []bool{false, true} {
		t.Run(fmt.Sprintf("persistent=%t", persistent), func(t *testing.T) {
			l := newPlace(t, "a.raw", "b.raw")
			ssd, rust, volume := t.TempDir(), t.TempDir(), t.TempDir()
			base, file := filepath.Join(l.dir, "work"), "disk.raw"
			if persistent {
				l.env = append(l.env, "PERSISTENT_DIR="+volume)
				base, file = volume, "disk.img"
			}
			types := "USAGE_TYPES=fast=" + ssd + ",slow=" + rust
			config := func(types ...string) string { // for a.raw
				text := "disks:\n  b.raw: {lun: 2}\n"
				for _, one := range types {
					text += "  a.raw: {usage-type: " + one + "}\n"
				}
				return settings.EnvConfig + "=" + yamlFile(t, text)
			}
			refused := func(parts []string, env ...string) {
				t.Helper()
				status, _, stderr := run(t, append(append([]string{}, l.env...), env...), "serve")
				require.NotEqual(t, exitDone, status)
				for _, part := range parts {
					require.Contains(t, stderr, part)
				}
			}

			p := l.serve(t, types, config("fast"))
			block := make([]byte, 512)
			block[0] = 0xa5
			session := p.login("iqn.2020-01.test:one", 1, 2)
			session.MustGood(t, targettest.Write10(1, 0, block))
			checkUsageTypes(t, p, ssd, rust)
			require.Equal(t, exitDone, p.terminate())
			require.FileExists(t, filepath.Join(ssd, "a.raw", file))
			require.FileExists(t, filepath.Join(base, "b.raw", file))
			require.NoFileExists(t, filepath.Join(base, "a.raw", file))

			there := filepath.Join(ssd, "a.raw")
			refused([]string{there, "usage-type", "was fast"}, types, config("slow"))
			refused([]string{there, "was fast"}, types, config())
			refused([]string{there, "no usage type has that place"}, config())
			refused([]string{there, "no usage type has that place"},
				"USAGE_TYPES=fast="+rust, config("fast"))
			refused([]string{"use one of fast, slow"}, types, config("medium"))
			refused([]string{"mount its storage"}, "USAGE_TYPES=fast=/nonexistent/place", config())
			require.NoDirExists(t, filepath.Join(rust, "a.raw"))
			require.NoDirExists(t, filepath.Join(base, "a.raw"))

			// The storage of the disk is not mounted.
			require.NoError(t, os.Rename(ssd, ssd+".away"))
			refused([]string{there, "does not exist now"}, "USAGE_TYPES=slow="+rust, config("slow"))
			// Its mount point is empty.
			require.NoError(t, os.Mkdir(ssd, 0o755))
			for _, choice := range []string{config("fast"), config("slow"), config()} {
				refused([]string{there, "does not exist now", "mount its storage"}, types, choice)
			}
			require.Empty(t, testtool.Must(os.ReadDir(ssd))(t))
			require.NoError(t, os.Remove(ssd))
			require.NoError(t, os.Rename(ssd+".away", ssd))

			p = l.serve(t, types, config("fast"))
			session = p.login("iqn.2020-01.test:two", 1)
			read := targettest.Read10(1, 0, 1)
			require.Equal(t, block, session.MustGood(t, read).Data)
			require.Equal(t, exitDone, p.terminate())

			// Without the old directory, the disk begins anew. Nor is it moved from the base.
			require.NoError(t, os.RemoveAll(there))
			require.Equal(t, exitDone, l.serve(t, types, config()).terminate())
			refused([]string{filepath.Join(base, "a.raw"), "it had no"}, types, config("slow"))
			require.NoError(t, os.RemoveAll(filepath.Join(base, "a.raw")))
			require.Equal(t, exitDone, l.serve(t, types, config("slow")).terminate())
			require.FileExists(t, filepath.Join(rust, "a.raw", file))
		})
	}
}

// checkUsageTypes checks what status, metrics and log say of the types fast and slow, where LUN 1
// is fast.
func checkUsageTypes(t *testing.T, p *process, ssd, rust string) {
	t.Helper()
	// On a busy machine the storage may answer later than a page waits for it.
	var all status.Status
	p.until("the status tells of the space", func() bool {
		_, page := p.page("/status")
		all = status.Status{}
		require.NoError(t, json.Unmarshal([]byte(page), &all))
		return !slices.ContainsFunc(all.UsageTypes, func(u status.UsageType) bool {
			return u.Space == nil
		}) && all.LUNs[0].Space != nil
	})
	require.Len(t, all.UsageTypes, 2)
	fast, slow := all.UsageTypes[0], all.UsageTypes[1]
	require.Equal(t, []any{"fast", ssd, []uint16{1}}, []any{fast.Name, fast.Directory, fast.LUNs})
	require.Equal(t, []any{"slow", rust, []uint16{}}, []any{slow.Name, slow.Directory, slow.LUNs})
	require.Positive(t, fast.Space.Free)
	require.Positive(t, fast.Space.Used)
	require.Zero(t, slow.Space.Used)
	require.Equal(t, "fast", all.LUNs[0].UsageType)
	require.Empty(t, all.LUNs[1].UsageType)
	p.until("the metrics tell of the space", func() bool {
		_, page := p.page("/metrics")
		return strings.Contains(page,
			`kubevirt_disk_usage_type_used_bytes{usage_type="slow"} 0`) &&
			strings.Contains(page, `kubevirt_disk_usage_type_free_bytes{usage_type="fast"}`)
	})
	require.Equal(t, "fast", p.logged("serving a LUN", "usage_type"))
	require.Equal(t, ssd, p.logged("usage type", "directory"))
	require.Positive(t, p.logged("usage type", "free_bytes"))
}

func TestServeUsageTypeInPlaceIsRefused(t *testing.T) {
	l := newPlace(t, "a.raw")
	fails(t, append(l.env, "USAGE_TYPES=fast="+t.TempDir(), "COPY_MODE=none",
		settings.EnvConfig+"="+yamlFile(t, "disks:\n  a.raw: {usage-type: fast}\n")),
		exitUsage, "written in place", "serve")
}

// TestServeUsageTypeWithoutRoom has room where the disk would lie without its type.
func TestServeUsageTypeWithoutRoom(t *testing.T) {
	l := newPlace(t, "a.raw")
	image := filetest.Put(t, filepath.Join(l.dir, "disk"), "a.raw", filetest.Block(1, 2<<20), 0)
	small := filetest.TinyFS(t, "1m")
	config := settings.EnvConfig + "=" + yamlFile(t, "disks:\n  a.raw: {usage-type: small}\n")
	env := append(l.env, "USAGE_TYPES=small="+small, config)
	status, _, stderr := run(t, env, "serve")
	require.Equal(t, exitFailed, status)
	for _, part := range []string{small, "2 MiB", "make room", `usage type \"small\"`} {
		require.Contains(t, stderr, part)
	}
	// Nothing was made there, so nothing is missing when the storage goes.
	require.NoDirExists(t, filepath.Join(l.dir, "work", ".homes"))
	require.NoError(t, os.Truncate(image, 256<<10))
	l.env = env
	require.Equal(t, exitDone, l.serve(t).terminate())
}
