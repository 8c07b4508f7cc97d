package nbd

import (
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

// documented returns the versions of the clients that docs/testing.md names, of the generation with
// which the tests run. The test is skipped if that has no column: the machine is no Debian 12.
func documented(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../../docs/testing.md")
	require.NoError(t, err)
	_, table, found := strings.Cut(string(text), "\n## Which versions are run\n")
	require.True(t, found)
	table, _, _ = strings.Cut(strings.TrimSpace(table), "\n\n")
	rows := strings.Split(table, "\n")
	cells := func(row string) []string {
		all := strings.Split(strings.Trim(row, "|"), "|")
		for i := range all {
			all[i] = strings.TrimSpace(all[i])
		}
		return all
	}
	releases, err := os.ReadFile("../../scripts/generations")
	require.NoError(t, err)
	for _, release := range strings.Split(strings.TrimSpace(string(releases)), "\n") {
		if !strings.HasPrefix(release, "#") {
			require.Contains(t, rows[0], "`"+release+"`", "docs/testing.md has a column for each")
		}
	}
	name := rig.Clients.Name
	if rig.Clients == rig.Installed {
		about, err := os.ReadFile("/etc/os-release")
		require.NoError(t, err)
		name = string(regexp.MustCompile(`(?m)^VERSION_CODENAME=(\w+)$`).FindSubmatch(about)[1])
	}
	column := slices.IndexFunc(cells(rows[0]), func(cell string) bool {
		return strings.Contains(cell, "`"+name+"`")
	})
	if column < 0 {
		t.Skipf("docs/testing.md does not say what %s has", name)
	}
	versions := make(map[string]string)
	for _, row := range rows[2:] {
		versions[cells(row)[0]] = cells(row)[column]
	}
	return versions
}

// TestVersions: docs/testing.md says which versions of the clients the tests run.
func TestVersions(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", "virsh", "nbdinfo", "nbdkit", "fio", "iscsi-ls")
	want := documented(t)
	version := regexp.MustCompile(`\d+\.\d+`)
	for name, program := range map[string]string{"QEMU": "qemu-img", "libvirt": "virsh",
		"libnbd": "nbdinfo", "nbdkit": "nbdkit", "fio": "fio"} {
		require.Equal(t, want[name], version.FindString(rig.OK(t, program, "--version")), name)
	}
	// libiscsi's programs do not tell.
	if f, err := os.Open(filepath.Join(rig.Clients.Root(),
		"usr/share/doc/libiscsi-bin/changelog.Debian.gz")); err == nil {
		defer f.Close()
		unpacked, err := gzip.NewReader(f)
		require.NoError(t, err)
		text, err := io.ReadAll(unpacked)
		require.NoError(t, err)
		require.Equal(t, want["libiscsi"], version.FindString(string(text)))
	}
}
