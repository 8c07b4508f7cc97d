package daemon

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/transport"
	"kubevirt.io/disk/target/targettest"
)

// TestRecordBoot: when the daemon has stopped, the file has the guest's reads in their order.
func TestRecordBoot(t *testing.T) {
	opt := testOptions(t)
	for _, name := range []string{"a.raw", "b.raw", "c.raw"} {
		require.NoError(t, os.WriteFile(filepath.Join(opt.Images.Dir, name),
			make([]byte, 1<<20), 0o644))
	}
	opt.RecordBoot = filepath.Join(t.TempDir(), "order")
	r := start(t, opt)
	s := r.login("iqn.2026-01.test:a", 1, 3)
	read := func(lun uint16, block uint32) {
		answer := testtool.Must(s.Do(targettest.Read10(lun, block, 8)))(t)
		require.True(t, answer.Good())
	}
	for _, block := range []uint32{1000, 1001, 0, 129, 1000} {
		read(1, block)
	}
	read(3, 2040)
	s.Close()
	require.NoError(t, r.end())
	f := testtool.Must(os.Open(opt.RecordBoot))(t)
	defer f.Close()
	order := testtool.Must(registry.ReadBootOrder(f))(t)
	require.Equal(t, []registry.BootDisk{
		{Name: "a.raw", Size: 1 << 20, Blocks: []registry.BootRun{{First: 7, Count: 1},
			{First: 0, Count: 2}}},
		{Name: "c.raw", Size: 1 << 20, Blocks: []registry.BootRun{{First: 15, Count: 1}}},
	}, order.Disks)
}

// TestRecordBootRefuses: a file that cannot be made is reported at the start.
func TestRecordBootRefuses(t *testing.T) {
	opt := testOptions(t, "a.raw")
	for _, path := range []string{filepath.Join(t.TempDir(), "none", "order"), t.TempDir()} {
		opt.RecordBoot = path
		require.ErrorContains(t, testtool.Err(New(opt)), "cannot be recorded")
	}
}

// TestRecordBootOfNothing: a person who waits for the file is told why there is none.
func TestRecordBootOfNothing(t *testing.T) {
	opt := testOptions(t, "a.raw")
	opt.RecordBoot = filepath.Join(t.TempDir(), "order")
	r := start(t, opt)
	require.NoError(t, r.end())
	require.Equal(t, 1, r.log.FilterMessageSnippet("nothing was recorded").Len())
	require.NoFileExists(t, opt.RecordBoot)
}

// TestWrongRegistrySettings: they end the start as other wrong settings do.
func TestWrongRegistrySettings(t *testing.T) {
	opt := testOptions(t, "a.raw")
	opt.Streams.References = []transport.Reference{
		testtool.Must(transport.ParseReference("r.example/a:1"))(t)}
	opt.Streams.CacheDir, opt.Streams.Registry.CA = t.TempDir(), "/none"
	var wrong *problems.Error
	require.ErrorAs(t, testtool.Err(New(opt)), &wrong)
	require.ErrorContains(t, wrong, "--registry-ca")
}
