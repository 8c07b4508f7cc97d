package daemon

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/instance"
)

func TestUsageTypesAreKnownByName(t *testing.T) {
	types := UsageTypes{"slow": "/storage/rust", "fast": "/storage/ssd"}
	dir, err := types.Dir("fast")
	require.NoError(t, err)
	require.Equal(t, "/storage/ssd", dir)
	_, err = types.Dir("medium")
	require.EqualError(t, err, `usage type "medium" is unknown: use one of fast, slow`)
	_, err = UsageTypes{}.Dir("")
	require.ErrorContains(t, err, "there are none")
}

// TestAddChoosesAUsageType adds disks while the daemon runs.
func TestAddChoosesAUsageType(t *testing.T) {
	opt, ssd := options(t, "a.raw"), t.TempDir()
	opt.UsageTypes = UsageTypes{"fast": ssd}
	d := start(t, opt)
	dir := t.TempDir()
	later := laterDisk(t, dir, "later.raw")
	later.UsageType = "fast"
	lun, err := d.Add(t.Context(), later)
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(ssd, "later.raw", "disk.raw"))
	require.Equal(t, []uint16{lun}, d.Status().UsageTypes[0].LUNs)

	unknown := laterDisk(t, dir, "unknown.raw")
	unknown.UsageType = "slow"
	_, err = d.Add(t.Context(), unknown)
	require.ErrorContains(t, err, "use one of fast")
	require.Len(t, d.Status().LUNs, 2)
}

// TestUsageTypesAreCheckedAtTheStart lists everything that is wrong.
func TestUsageTypesAreCheckedAtTheStart(t *testing.T) {
	opt, dir := options(t, "a.raw"), t.TempDir()
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	opt.UsageTypes = UsageTypes{"gone": filepath.Join(dir, "gone"), "file": file}
	err := <-launch(t, opt).ended
	require.ErrorContains(t, err, "does not exist")
	require.ErrorContains(t, err, "is not a directory")

	opt = options(t, "a.raw")
	opt.UsageTypes = UsageTypes{"images": opt.Images.Dir}
	require.ErrorContains(t, <-launch(t, opt).ended, "is also the directory of the images")
}

// TestSweepCleansUsageTypes removes the disk of an image that is gone from the storage that it had
// chosen, if a setting says so.
func TestSweepCleansUsageTypes(t *testing.T) {
	opt, ssd := options(t, "a.raw", "b.raw"), t.TempDir()
	opt.UsageTypes = UsageTypes{"fast": ssd}
	opt.Settings.Disks = map[string]SingleDisk{
		"b.raw": {DiskSettings: DiskSettings{UsageType: "fast"}},
	}
	require.NoError(t, start(t, opt).end())
	require.DirExists(t, filepath.Join(ssd, "b.raw"))
	require.NoError(t, os.Remove(filepath.Join(opt.Images.Dir, "b.raw")))
	opt.Settings.Disks = nil
	require.NoError(t, start(t, opt).end())
	require.FileExists(t, filepath.Join(ssd, "b.raw", "disk.raw"), "somebody has named it")
	opt.Leftovers = instance.LeftoversRemove
	d := start(t, opt)
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(ssd, "b.raw"))
		return os.IsNotExist(err)
	}, patience, 5*time.Millisecond)
	require.NoError(t, d.end())
}
