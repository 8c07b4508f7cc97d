package served

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/registry"
)

// TestRecordReplacesOnlyRecords: the path of the record may be a mistake.
func TestRecordReplacesOnlyRecords(t *testing.T) {
	path := filepath.Join(t.TempDir(), "boot")
	check := func() error {
		_, err := newRecorder(path, options.Setting{}, zap.NewNop())
		return err
	}
	require.NoError(t, check())
	require.NoError(t, os.WriteFile(path, nil, 0o644))
	require.NoError(t, check())
	require.NoError(t, writeOrder(path, &registry.BootOrder{Disks: []registry.BootDisk{
		{Name: "a", Size: 4096, Blocks: []registry.BootRun{{Count: 1}}}}}))
	require.NoError(t, check())
	require.NoError(t, os.WriteFile(path, []byte("QFI\xfb a disk"), 0o644))
	require.ErrorContains(t, check(), "is no such file")
	require.ErrorContains(t, writeOrder(path, new(registry.BootOrder)), "is no such file",
		"it may have got the name since the start")
}
