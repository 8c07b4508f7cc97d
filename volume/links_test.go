package volume

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
)

// TestLinksInForeignStorage: other users may write to a claim and to the storage of a usage type. A
// link there never makes a volume change, remove or share a file somewhere else.
func TestLinksInForeignStorage(t *testing.T) {
	precious := filepath.Join(t.TempDir(), "precious")
	require.NoError(t, os.WriteFile(precious, []byte("keep"), 0o600))
	kept := func() {
		t.Helper()
		require.Equal(t, "keep", string(testtool.Must(os.ReadFile(precious))(t)))
		info := testtool.Must(os.Stat(precious))(t)
		require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	}
	f := newFake()
	claim, fast := t.TempDir(), t.TempDir()
	f.claims = map[string]string{"c": claim, "fast": fast}
	f.whole = make(chan struct{})
	m := start(t, t.TempDir(), f)

	// The disk is exchanged before it is given to the group of the claim.
	put := func(name string, spec api.Spec) { _, _, _ = m.Put(t.Context(), name, spec) }
	put("x", api.Spec{Size: 512, PVC: &api.Claim{Name: "c"}})
	require.NoError(t, os.Remove(filepath.Join(claim, diskName)))
	require.NoError(t, os.Symlink(precious, filepath.Join(claim, diskName)))
	close(f.whole)
	testtool.Eventually(t, func() bool {
		v, err := m.Get("x")
		return err == nil && v.Failure != ""
	})
	kept()
	require.NoError(t, m.Delete(t.Context(), "x", true))
	kept()

	// The directories of a usage type's volumes are exchanged.
	z := api.Spec{Size: 512, Copy: &api.Copy{UsageType: "fast"}}
	put("z", z)
	above := filepath.Join(fast, ".volumes", m.store.ID())
	elsewhere := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(elsewhere, "z"), 0o700))
	file := filepath.Join(elsewhere, "z", diskName)
	require.NoError(t, os.WriteFile(file, []byte("keep"), 0o600))
	require.NoError(t, os.Rename(above, above+".away"))
	require.NoError(t, os.Symlink(elsewhere, above))
	require.Error(t, m.Delete(t.Context(), "z", true))
	require.FileExists(t, file)
	put("other", z)
	require.NoDirExists(t, filepath.Join(elsewhere, "other"))
}

// TestUsageTypeHasTheDirectory: what lies where a volume of a usage type should be made stays when
// that is refused, and after a restart.
func TestUsageTypeHasTheDirectory(t *testing.T) {
	f, fast, dir := newFake(), t.TempDir(), t.TempDir()
	f.claims = map[string]string{"fast": fast}
	m := start(t, dir, f)
	there := filepath.Join(fast, ".volumes", m.store.ID(), "vm1")
	require.NoError(t, os.MkdirAll(there, 0o700))
	disk := filepath.Join(there, diskName)
	require.NoError(t, os.WriteFile(disk, []byte("keep"), 0o600))
	_, _, err := m.Put(t.Context(), "vm1", api.Spec{Size: 512, Copy: &api.Copy{UsageType: "fast"}})
	refused(t, api.CodeInUse, err)
	require.FileExists(t, disk)
	require.NoError(t, m.Close())
	require.Empty(t, start(t, dir, newFake()).List())
	require.FileExists(t, disk)
}

// TestDiskOfAnotherServer: who has a copy of the directory of volumes deletes no disk that another
// server has, neither now nor when it is not served any more.
func TestDiskOfAnotherServer(t *testing.T) {
	for name, spec := range map[string]api.Spec{
		"usage type": {Size: 512, Copy: &api.Copy{UsageType: "there"}},
		"claim":      {Size: 512, PVC: &api.Claim{Name: "there"}},
	} {
		t.Run(name, func(t *testing.T) {
			there, dir, f := t.TempDir(), t.TempDir(), newFake()
			f.claims = map[string]string{"there": there}
			m := start(t, dir, f)
			put(t, m, "vm1", spec)
			place := testtool.Must(m.dir(m.volumes["vm1"].record))(t)
			disk := filepath.Join(place, diskName)
			require.NoError(t, m.Close())
			f = newFake()
			f.claims = map[string]string{"there": there}
			f.opening = func() error { return errors.New("it is in use") }
			m = start(t, dir, f)
			held := filepath.Join(place, durable.PersistentLockName)
			require.NoError(t, os.Mkdir(held, 0o700)) // it cannot be opened, as without descriptors
			require.ErrorContains(t, m.Delete(t.Context(), "vm1", true), "is kept")
			require.NoError(t, os.Remove(held))
			lock := testtool.Must(durable.AcquireLock(held, place))(t)
			for _, force := range []bool{false, true} {
				refused(t, api.CodeInUse, m.Delete(t.Context(), "vm1", force))
			}
			require.NoError(t, durable.ReleaseLock(lock))
			require.NoError(t, m.Close())
			m = start(t, dir, f)
			require.FileExists(t, disk)
			require.NoError(t, m.Delete(t.Context(), "vm1", false))
			require.NoFileExists(t, disk)
		})
	}
}

// TestLockGoesLast: the lock of a disk is free before its file is removed, because NFS keeps a
// directory for a file that is open.
func TestLockGoesLast(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "vm1")
	require.NoError(t, os.MkdirAll(filepath.Join(dir, diskName+".unit-1"), 0o700))
	for _, name := range []string{diskName, stateName, durable.PersistentLockName} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	unlocked := 0
	require.NoError(t, clearAll(dir, func() {
		unlocked++
		require.Equal(t, []string{durable.PersistentLockName}, filetest.Names(t, dir))
	}))
	require.Equal(t, 1, unlocked)
	require.NoDirExists(t, dir)
}
