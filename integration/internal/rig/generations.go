package rig

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// A Generation of clients is what one release of Debian has. A peer's version that nobody ran may
// be the one that people have: QEMU from 8.2 on speaks NBD otherwise than QEMU 7.2.
type Generation struct {
	// Name is that of the release: "trixie".
	Name string
	// dir has bin, with a program for each client, and root; "": the programs that are installed.
	dir string
}

// Client is the program of a generation.
func (g Generation) Client(name string) string {
	if g.dir == "" {
		return name
	}
	return filepath.Join(g.dir, "bin", name)
}

// Installed are the clients that are installed: those of Debian 12 in CI.
var Installed = Generation{Name: "installed"}

// Clients are those with which the tests of this process run: the directory that the environment
// names is one of scripts/build-clients.sh. Main has them found before those that are installed.
var Clients = func() Generation {
	if dir := os.Getenv("KUBEVIRT_DISK_GENERATION"); dir != "" {
		return Generation{filepath.Base(dir), dir}
	}
	return Installed
}()

// Root is the directory that the release is unpacked into.
func (g Generation) Root() string {
	if g.dir == "" {
		return "/"
	}
	return filepath.Join(g.dir, "root")
}

// find has the programs of the generation found.
func (g Generation) find() error {
	if g.dir == "" {
		return nil
	}
	bin := filepath.Join(g.dir, "bin")
	if _, err := os.Stat(bin); err != nil {
		return fmt.Errorf("KUBEVIRT_DISK_GENERATION names no generation of clients: %w", err)
	}
	return os.Setenv("PATH", bin+":"+os.Getenv("PATH"))
}

// inRoot has the release's /usr in the place of this machine's.
const inRoot = `set -eu
mount --make-rprivate /
mount --bind "$1" /usr
shift
export PATH=/usr/sbin:/usr/bin
exec "$@"`

// InRoot is a command that needs the whole of the release, such as a daemon that loads drivers. It
// needs root, unless the clients are those that are installed.
func (g Generation) InRoot(command ...string) []string {
	if g.dir == "" {
		return command
	}
	return append([]string{"unshare", "-m", "sh", "-c", inRoot, "release",
		filepath.Join(g.Root(), "usr")}, command...)
}

// has reports whether a generation has a tool of its own.
func (g Generation) has(tool string) bool {
	for _, pattern := range modulesOf[tool] {
		if found, _ := filepath.Glob(filepath.Join(g.dir, "root", pattern)); len(found) > 0 {
			return g.dir != ""
		}
	}
	return false
}

// Later are the clients of the latest Debian of scripts/generations.
func Later(t *testing.T) Generation {
	t.Helper()
	Need(t)
	const script = "scripts/build-clients.sh"
	text, err := os.ReadFile(filepath.Join("..", "..", script))
	require.NoError(t, err)
	sum := sha256.Sum256(text)
	dir, err := filepath.Abs(filepath.Join(cmp.Or(os.Getenv("KUBEVIRT_DISK_CLIENTS"),
		filepath.Join("..", "..", "cache", "clients")), hex.EncodeToString(sum[:8])))
	require.NoError(t, err)
	releases, err := os.ReadFile(filepath.Join("..", "..", "scripts", "generations"))
	require.NoError(t, err)
	lines := strings.Fields(string(releases))
	latest := lines[len(lines)-1]
	testtool.Built(t, script, dir, latest)
	return Generation{latest, filepath.Join(dir, latest)}
}

// AgainNightly leaves a test that takes long to the nightly run, except with the clients that are
// installed.
func AgainNightly(t *testing.T) {
	t.Helper()
	if Clients != Installed {
		testtool.NeedNightly(t)
	}
}

// distribution is the version of the registry that goes with later clients.
const distribution = "v3.1.2"

// registryProgram is Debian's docker-registry, which is distribution 2.8; or distribution 3 with
// the clients of a later release, which are nightly.
func registryProgram(t *testing.T) string {
	t.Helper()
	if Clients == Installed || !testtool.Nightly() {
		return "docker-registry"
	}
	return BuiltClient(t, "registry", distribution)
}

// BuiltClient is a program that scripts/build-client.sh builds, for minutes: so its tests are
// nightly. The version is the one in that script.
func BuiltClient(t *testing.T, name, version string) string {
	t.Helper()
	testtool.NeedNightly(t)
	cache := cmp.Or(os.Getenv("KUBEVIRT_DISK_"+strings.ToUpper(name)),
		filepath.Join("..", "..", "cache", name))
	dir := testtool.Must(filepath.Abs(filepath.Join(cache, version)))(t)
	testtool.Built(t, "scripts/build-client.sh "+name, dir, name)
	return filepath.Join(dir, name)
}
