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
	"kubevirt.io/disk/internal/testtool"
)

// documented returns the versions of the clients that docs/testing.md names, of the generation with
// which the tests run. The test is skipped if that has no column: the machine is no Debian 12.
func documented(t *testing.T) map[string]string {
	t.Helper()
	text := testtool.Must(os.ReadFile("../../docs/testing.md"))(t)
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
	releases := testtool.Must(os.ReadFile("../../scripts/generations"))(t)
	for release := range strings.SplitSeq(strings.TrimSpace(string(releases)), "\n") {
		if !strings.HasPrefix(release, "#") {
			require.Contains(t, rows[0], "`"+release+"`", "docs/testing.md has a column for each")
		}
	}
	name := rig.Clients.Name
	if rig.Clients == rig.Installed {
		about := testtool.Must(os.ReadFile("/etc/os-release"))(t)
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
		text := testtool.Must(io.ReadAll(testtool.Must(gzip.NewReader(f))(t)))(t)
		require.Equal(t, want["libiscsi"], version.FindString(string(text)))
	}
}

// TestGenerationsOfClients has the clients of each generation read, write, zero, discard and flush,
// by iSCSI, by NBD, and by NBD through a relay. What one protocol has written, the other reads.
func TestGenerationsOfClients(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", "qemu-io", rig.QEMUISCSI, "nbdcopy", "nbdinfo", "iscsi-ls")
	served := func() (d *rig.Daemon, uri string) {
		socket := filepath.Join(t.TempDir(), "nbd.sock")
		d = rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 64<<20),
			Args: []string{"--nbd=unix:" + socket}})
		return d, "nbd+unix:///disk.raw?socket=" + socket
	}
	server, uri := served()
	behind, uriBehind := served()
	socket := filepath.Join(t.TempDir(), "relay.sock")
	relay := rig.Start(t, rig.Config{DiskDir: t.TempDir(),
		Args: []string{"--disk=" + uriBehind, "--nbd=unix:" + socket}})
	require.Contains(t, rig.OK(t, "iscsi-ls", "-s", server.PortalURL()), "Lun:1")
	use(t, server, server.URL(1), uri)
	use(t, server, uri, server.URL(1))
	copies(t, uri)
	between := "nbd+unix:///disk.raw?socket=" + socket
	use(t, relay, between, between)
	copies(t, between)
	for _, d := range []*rig.Daemon{relay, behind, server} {
		d.Stop()
		require.NotContains(t, d.Output(), "protocol_error")
	}
}

// use fills a disk of 64 MiB, compares it as somebody else reads it, and has QEMU do each kind of
// request.
func use(t *testing.T, d *rig.Daemon, disk, read string) {
	t.Helper()
	source := randomFile(t, filepath.Join(t.TempDir(), "source"), 64<<20)
	rig.OK(t, "qemu-img", "convert", "-n", "-W", "-m", "16", "-f", "raw", "-O", "raw", source, disk)
	d.UntilFree()
	rig.Same(t, source, read)
	d.UntilFree()
	args := []string{"-f", "raw", "-t", "writeback"}
	for _, command := range []string{"write -P 7 5k 130k", "write -f -P 8 1M 512", "write -z 2M 1M",
		"discard 8M 4M", "aio_write -P 9 16M 3M", "aio_write -P 10 20M 3M", "aio_flush", "flush",
		"read -P 7 5k 130k", "read -P 8 1M 512", "read -P 0 2M 1M", "read -P 9 16M 3M",
		"read -P 10 20M 3M"} {
		args = append(args, "-c", command)
	}
	require.NotContains(t, rig.OK(t, "qemu-io", append(args, disk)...), "failed", disk)
}

// copies has libnbd's programs read and fill a disk.
func copies(t *testing.T, disk string) {
	t.Helper()
	source := randomFile(t, filepath.Join(t.TempDir(), "source"), 64<<20)
	copied := filepath.Join(t.TempDir(), "copied")
	require.NoError(t, os.WriteFile(copied, nil, 0o600))
	require.NoError(t, os.Truncate(copied, 64<<20))
	rig.OK(t, "nbdcopy", disk, copied)
	rig.Same(t, copied, disk)
	rig.OK(t, "nbdcopy", "--flush", source, disk)
	rig.Same(t, source, disk)
	require.Contains(t, rig.OK(t, "nbdinfo", "--map", disk), "67108864")
}
