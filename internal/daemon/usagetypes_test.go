package daemon

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/options/optionstest"
	"kubevirt.io/disk/internal/testtool"
)

// TestUsageTypesAreCheckedAtTheStart lists everything that is wrong.
func TestUsageTypesAreCheckedAtTheStart(t *testing.T) {
	opt, dir := testOptions(t, "a.raw"), t.TempDir()
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	opt.UsageTypes = options.UsageTypes{"gone": filepath.Join(dir, "gone"), "file": file}
	err := <-launch(t, opt).ended
	require.ErrorContains(t, err, "does not exist")
	require.ErrorContains(t, err, "is not a directory")

	opt = testOptions(t, "a.raw")
	opt.UsageTypes = options.UsageTypes{"images": opt.Images.Dir}
	require.ErrorContains(t, <-launch(t, opt).ended, "is also the directory of the images")
	opt = testOptions(t, "a.raw")
	opt.Volumes = &options.Volumes{Dir: opt.Images.Dir, Listen: optionstest.Loopback()}
	opt.Streams.CacheDir, opt.Streams.CacheSize = t.TempDir(), 1<<30
	require.ErrorContains(t, <-launch(t, opt).ended, "is in the directory of the images")
	require.NoFileExists(t, filepath.Join(opt.Images.Dir, "lock"), "nothing was made there")
}

// TestSweepCleansUsageTypes removes the disk of an image that is gone from the storage that it had
// chosen, if a setting says so.
func TestSweepCleansUsageTypes(t *testing.T) {
	opt, ssd := testOptions(t, "a.raw", "b.raw"), t.TempDir()
	opt.UsageTypes = options.UsageTypes{"fast": ssd}
	opt.Settings.Disks = map[string]options.SingleDisk{
		"b.raw": {DiskSettings: options.DiskSettings{UsageType: "fast"}},
	}
	require.NoError(t, start(t, opt).end())
	require.DirExists(t, filepath.Join(ssd, "b.raw"))
	require.NoError(t, os.Remove(filepath.Join(opt.Images.Dir, "b.raw")))
	opt.Settings.Disks = nil
	require.NoError(t, start(t, opt).end())
	require.FileExists(t, filepath.Join(ssd, "b.raw", "disk.raw"), "somebody has named it")
	opt.Leftovers = instance.LeftoversRemove
	d := start(t, opt)
	testtool.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(ssd, "b.raw"))
		return os.IsNotExist(err)
	}, "the disk is removed")
	require.NoError(t, d.end())
}
