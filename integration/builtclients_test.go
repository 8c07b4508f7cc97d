package integration

import (
	"cmp"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// The versions that scripts/build-client.sh builds.
const (
	cosignVersion = "v2.6.5"
	orasVersion   = "v1.3.6"
)

// builtClient is a program that scripts/build-client.sh builds, for minutes: so its tests are
// nightly.
func builtClient(t *testing.T, name, version string) string {
	t.Helper()
	testtool.NeedNightly(t)
	cache := cmp.Or(os.Getenv("KUBEVIRT_DISK_"+strings.ToUpper(name)),
		filepath.Join("..", "cache", name))
	dir, err := filepath.Abs(filepath.Join(cache, version))
	require.NoError(t, err)
	testtool.Built(t, "scripts/build-client.sh "+name, dir, name)
	return filepath.Join(dir, name)
}
