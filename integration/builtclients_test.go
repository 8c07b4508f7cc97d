package integration

import (
	"cmp"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The versions that scripts/build-client.sh builds.
const (
	cosignVersion = "v2.6.5"
	orasVersion   = "v1.3.6"
)

// builtClient is a program that scripts/build-client.sh has built. The test is skipped if nobody
// has.
func builtClient(t *testing.T, name, version string) string {
	t.Helper()
	cache := cmp.Or(os.Getenv("KUBEVIRT_DISK_"+strings.ToUpper(name)),
		filepath.Join("..", "cache", name))
	binary, err := filepath.Abs(filepath.Join(cache, version, name))
	require.NoError(t, err)
	if _, err := os.Stat(binary); err != nil {
		t.Skipf("needs %s: scripts/build-client.sh %[1]s builds it", name)
	}
	return binary
}
