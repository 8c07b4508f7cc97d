package iscsi

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// debianMirror is a mirror of Debian on this machine, with one kernel in one suite.
type debianMirror struct{ dir, suite, gnupg string }

// offer makes this kernel the latest one of the mirror. The former one is gone.
func (m debianMirror) offer(t *testing.T, version string) {
	t.Helper()
	write := func(name, text string) {
		t.Helper()
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o755))
		require.NoError(t, os.WriteFile(name, []byte(text), 0o644))
	}
	require.NoError(t, os.RemoveAll(m.dir))
	name := "linux-image-" + strings.ReplaceAll(version, "-", ".") + "-cloud-amd64"
	fields := func(name, more string) string {
		return "Package: " + name + "\nVersion: " + version + "\nArchitecture: amd64\n" +
			"Maintainer: nobody <nobody@example.org>\nDescription: a kernel\n" + more
	}
	tree := t.TempDir()
	write(filepath.Join(tree, "boot", "vmlinuz"), version)
	write(filepath.Join(tree, "DEBIAN", "control"), fields(name, ""))
	deb := filepath.Join(m.dir, "kernel.deb")
	write(deb, "")
	runIn(t, m.dir, "dpkg-deb", "--root-owner-group", "--build", tree, deb)
	content := testtool.Must(os.ReadFile(deb))(t)
	packages := fields("linux-image-cloud-amd64", "Depends: "+name+"\nFilename: meta.deb\n"+
		"Size: 1\nSHA256: "+strings.Repeat("0", 64)+"\n") + "\n" + fields(name, fmt.Sprintf(
		"Filename: kernel.deb\nSize: %d\nSHA256: %x\n", len(content), sha256.Sum256(content)))
	dist := filepath.Join(m.dir, "dists", m.suite)
	write(filepath.Join(dist, "main", "binary-amd64", "Packages"), packages)
	write(filepath.Join(dist, "Release"), fmt.Sprintf("Suite: %s\nCodename: %[1]s\n"+
		"Date: Thu, 01 Jan 2026 00:00:00 UTC\nArchitectures: amd64\nComponents: main\nSHA256:\n"+
		" %x %d main/binary-amd64/Packages\n", m.suite, sha256.Sum256([]byte(packages)),
		len(packages)))
	runIn(t, dist, "gpg", "--homedir", m.gnupg, "--batch", "--clearsign", "-o", "InRelease",
		"Release")
}

// runIn runs a program in a directory.
func runIn(t *testing.T, dir string, args ...string) {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s: %s", cmd, out)
}

// TestKernelUpdates: the kernel is the latest of the release and of the security updates. Nothing
// is pinned that a mirror drops, and an old kernel is not taken without being asked for.
func TestKernelUpdates(t *testing.T) {
	rig.Need(t, "apt-get", "apt-cache", "dpkg", "dpkg-deb", "gpg", "gpg-agent")
	// Its path is short, because the agent has a socket in it.
	gnupg := testtool.Must(os.MkdirTemp("", "gpg"))(t)
	t.Cleanup(func() {
		_ = exec.Command("gpgconf", "--homedir", gnupg, "--kill", "all").Run() // it ends by itself
		require.NoError(t, os.RemoveAll(gnupg))
	})
	base := t.TempDir()
	keyring := filepath.Join(base, "keyring.gpg")
	runIn(t, base, "gpg", "--homedir", gnupg, "--batch", "--passphrase", "",
		"--quick-generate-key", "mirror@example.org", "rsa2048", "sign", "never")
	runIn(t, base, "gpg", "--homedir", gnupg, "--batch", "--output", keyring, "--export")
	release := debianMirror{filepath.Join(base, "debian"), "bookworm", gnupg}
	security := debianMirror{filepath.Join(base, "security"), "bookworm-security", gnupg}
	kernels := filepath.Join(base, "kernels")
	fetch := func(flags ...string) (said string, err error) {
		cmd := exec.Command("scripts/fetch-kernel.sh", append(flags, "amd64", kernels)...)
		cmd.Dir = "../.."
		cmd.Env = append(os.Environ(), "DEBIAN_MIRROR=file:"+release.dir, "DEBIAN_KEYRING="+keyring,
			"DEBIAN_SECURITY_MIRROR=file:"+security.dir)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	fetched := func(version string) {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(kernels, "amd64", "root", "boot", "vmlinuz"))
		require.NoError(t, err)
		require.Equal(t, version, string(text))
		source := testtool.Must(os.ReadFile(filepath.Join(kernels, "amd64", "source")))(t)
		require.Contains(t, string(source), "/linux/"+version+"/")
	}

	release.offer(t, "6.1.1-1")
	said, err := fetch()
	require.Error(t, err)
	require.Contains(t, said, security.dir, "there is no mirror of security updates")
	said, err = fetch("--any")
	require.NoError(t, err, said)
	require.Contains(t, said, "no security updates")
	require.Contains(t, said, "older than")
	fetched("6.1.1-1")

	security.offer(t, "6.1.2-1")
	said, err = fetch()
	require.Error(t, err)
	require.Contains(t, said, "6.1.2-1", "it is older than the one that was tested")
	fetched("6.1.1-1")

	security.offer(t, "7.0.10-1")
	said, err = fetch("--any")
	require.NoError(t, err, said)
	fetched("6.1.1-1") // any will do
	said, err = fetch()
	require.NoError(t, err, said)
	fetched("7.0.10-1")

	security.offer(t, "7.0.11-1")
	said, err = fetch()
	require.NoError(t, err, said)
	fetched("7.0.10-1") // it is there
	said, err = fetch("--update")
	require.NoError(t, err, said)
	fetched("7.0.11-1")

	security.offer(t, "7.0.9-1") // a mirror that is behind
	said, err = fetch("--update")
	require.NoError(t, err, said)
	fetched("7.0.11-1")
}
