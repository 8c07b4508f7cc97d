package rig

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// A Generation of clients is what one release of Debian has. A peer's version that nobody ran may
// be the one that people have: QEMU from 8.2 on speaks NBD otherwise than QEMU 7.2.
type Generation struct {
	Name string
	// bin has the programs; "": those that are installed are taken.
	bin string
}

// Client is the program of a generation.
func (g Generation) Client(name string) string { return filepath.Join(g.bin, name) }

// Installed are the clients that are installed.
var Installed = Generation{Name: "installed"}

// Later are the clients of a later Debian, which scripts/build-clients.sh unpacks.
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
	testtool.Built(t, script, dir, "bin")
	return Generation{"later", filepath.Join(dir, "bin")}
}

// InGenerations runs a test with the clients that are installed, and with those of a later Debian.
func InGenerations(t *testing.T, tools []string, test func(t *testing.T, g Generation)) {
	t.Helper()
	t.Run("installed", func(t *testing.T) {
		t.Parallel()
		Need(t, tools...)
		test(t, Installed)
	})
	t.Run("later", func(t *testing.T) {
		t.Parallel()
		test(t, Later(t))
	})
}
