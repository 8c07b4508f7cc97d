package volume

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// unsure makes the next save of a record replace it and fail all the same, as a sync of a directory
// that fails, and so many after it fail without an effect.
func unsure(m *Manager, failed int) {
	calls := 0
	m.save = func(r store.Record) error {
		switch calls++; {
		case calls == 1:
			return errors.Join(m.store.Save(r), unix.EIO)
		case calls <= failed+1:
			return unix.EIO
		}
		return m.store.Save(r)
	}
}

// again starts anew, as after a crash of the process.
func again(t *testing.T, m *Manager, f *fakeDisks) *Manager {
	t.Helper()
	require.NoError(t, m.Close())
	f.set(func() { f.served = map[uint16]string{} })
	return start(t, m.opt.Dir, f)
}

// TestDeletionOfWhichNobodyKnows: when storage may say that a volume is deleted, nobody is told
// that it is there before storage certainly says so.
func TestDeletionOfWhichNobodyKnows(t *testing.T) {
	for _, force := range []bool{false, true} {
		f := newFake()
		m := start(t, t.TempDir(), f)
		spec := api.Spec{Size: 512}
		put(t, m, "vm1", spec)
		unsure(m, 2) // the former record is not there again, and PUT fails
		refused(t, api.CodeFailed, m.Delete(t.Context(), "vm1", force))
		require.Empty(t, f.served)
		_, _, err := m.Put(t.Context(), "vm1", spec)
		refused(t, api.CodeFailed, err)
		require.Empty(t, f.served)
		require.Error(t, testtool.Err2(m.TakeSnapshot(t.Context(), "vm1", "s")))
		for range 2 {
			v, created := testtool.Must2(m.Put(t.Context(), "vm1", spec))(t)
			require.False(t, created)
			require.Equal(t, api.StateReady, v.State)
			require.Equal(t, map[uint16]string{64: "vm1"}, f.served)
			m = again(t, m, f)
		}
	}
}

// TestForcedDeletionThatFails: a machine goes on with a volume that could not be deleted, if
// storage says again that it is there.
func TestForcedDeletionThatFails(t *testing.T) {
	f := newFake()
	m := start(t, t.TempDir(), f)
	put(t, m, "vm1", api.Spec{Size: 512})
	unsure(m, 0)
	require.ErrorIs(t, m.Delete(t.Context(), "vm1", true), unix.EIO)
	for range 2 {
		require.Equal(t, api.StateReady, get(t, m, "vm1").State)
		require.Equal(t, map[uint16]string{64: "vm1"}, f.served)
		m = again(t, m, f)
	}
}

// TestUploadOfWhichNobodyKnows: data stays as long as storage may say that it is the disk, and the
// next upload begins without it.
func TestUploadOfWhichNobodyKnows(t *testing.T) {
	for _, restart := range []bool{false, true} {
		f := newFake()
		m := start(t, t.TempDir(), f)
		put(t, m, "vm1", api.Spec{From: &api.Source{Upload: true}})
		fill := filling(t, m, "vm1")
		path := fill.Disk()
		require.NoError(t, os.WriteFile(path, make([]byte, 4096), 0o600))
		unsure(m, 1)
		err := fill.Complete(t.Context(), "")
		require.ErrorIs(t, err, unix.EIO)
		refused(t, api.CodeUnavailable, err) // by which the receiver knows that the data stays
		fill.Release()
		require.Empty(t, f.served)
		if restart {
			m = again(t, m, f)
			v := get(t, m, "vm1")
			require.Equal(t, api.StateReady, v.State, v.Failure)
			require.EqualValues(t, 4096, v.Record.Size)
			continue
		}
		fill = filling(t, m, "vm1")
		require.NoFileExists(t, path)
		fill.Release()
		m = again(t, m, f)
		v := get(t, m, "vm1")
		require.Equal(t, api.StateAwaiting, v.State, v.Failure)
	}
}

// TestFetchOfWhichNobodyKnows: the same for an image that was fetched.
func TestFetchOfWhichNobodyKnows(t *testing.T) {
	f := newFake()
	m := start(t, t.TempDir(), f)
	m.timeout = time.Nanosecond
	f.slow = make(chan struct{})
	spec := api.Spec{Size: 512, From: &api.Source{Reference: "registry/vm/one"}}
	v := put(t, m, "vm1", spec)
	require.Equal(t, api.StateFilling, v.State)
	unsure(m, 1)
	close(f.slow)
	testtool.Eventually(t, func() bool {
		v, err := m.Get("vm1")
		return err == nil && v.State == api.StateFailed
	})
	m = again(t, m, f)
	v = get(t, m, "vm1")
	require.Equal(t, api.StateReady, v.State, v.Failure)
}

// TestGrowthOfWhichNobodyKnows: an answer with a size means that storage has it.
func TestGrowthOfWhichNobodyKnows(t *testing.T) {
	f := newFake()
	m := start(t, t.TempDir(), f)
	put(t, m, "vm1", api.Spec{Size: 512})
	unsure(m, 2)
	require.ErrorIs(t, testtool.Err2(m.Put(t.Context(), "vm1", api.Spec{Size: 4096})), unix.EIO)
	require.ErrorIs(t, testtool.Err2(m.Put(t.Context(), "vm1", api.Spec{Size: 512})), unix.EIO)
	for range 2 {
		v := put(t, m, "vm1", api.Spec{Size: 512})
		require.EqualValues(t, 512, v.Record.Size)
		m = again(t, m, f)
	}
}

// TestVolumeThatFailedIsNotBack: a volume whose PUT has failed does not come with the next start,
// although it was ready for a moment, and could not be removed.
func TestVolumeThatFailedIsNotBack(t *testing.T) {
	f := newFake()
	f.claims = map[string]string{"fast": t.TempDir()}
	m := start(t, t.TempDir(), f)
	fast := f.claims
	f.serving = func() error {
		f.claims = nil // its storage cannot be found now
		return errors.New("it cannot be served")
	}
	_, _, err := m.Put(t.Context(), "vm1", api.Spec{Size: 512, Copy: &api.Copy{UsageType: "fast"}})
	require.ErrorContains(t, err, "it cannot be served")
	f.claims, f.serving = fast, nil
	m = again(t, m, f)
	require.Empty(t, m.List())
}
