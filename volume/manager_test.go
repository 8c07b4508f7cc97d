package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

func TestPutTwice(t *testing.T) {
	dir, f := t.TempDir(), newFake()
	m := start(t, dir, f)
	ctx := t.Context()
	v, created := testtool.Must2(m.Put(ctx, "vm1", api.Spec{Size: 4096}))(t)
	require.True(t, created)
	require.Equal(t, api.StateReady, v.State)
	require.Equal(t, uint16(64), v.Record.LUN)
	again, created := testtool.Must2(m.Put(ctx, "vm1", api.Spec{Size: 4096}))(t)
	require.False(t, created)
	require.Equal(t, v, again)
	_, _, err := m.Put(ctx, "vm1", api.Spec{}) // any volume of this name
	require.NoError(t, err)

	_, _, err = m.Put(ctx, "vm1", api.Spec{Size: 512, AccessMode: api.WriteShared})
	e := refused(t, api.CodeDiffers, err)
	require.Len(t, e.Differs, 2)
	require.Equal(t, "access-mode", e.Differs[0].Field)
	require.Equal(t, "size", e.Differs[1].Field)

	v = put(t, m, "vm1", api.Spec{Size: 8192})
	require.Equal(t, int64(8192), v.Record.Size)
	two, _, err := m.Put(ctx, "vm2", api.Spec{}) // the default; 65 is an image's
	require.NoError(t, err)
	require.Equal(t, uint16(66), two.Record.LUN)
	require.NoError(t, m.Close())

	f.served = map[uint16]string{}
	m = start(t, dir, f)
	require.Equal(t, []Volume{v, two}, m.List())
	require.Equal(t, map[uint16]string{64: "vm1", 66: "vm2"}, f.served)
	require.Equal(t, Totals{States: map[api.State]int{api.StateReady: 2}, Bytes: 8192 + 1<<20,
		Max: 40, MaxBytes: 1 << 30}, m.Totals())
}

// TestLowerLimits: volumes that are there are served, whatever the limits are by now.
func TestLowerLimits(t *testing.T) {
	dir, f := t.TempDir(), newFake()
	m := start(t, dir, f)
	for _, name := range []string{"vm1", "vm2"} {
		put(t, m, name, api.Spec{Size: 4096})
	}
	all := m.List()
	require.NoError(t, m.Close())

	f.served = map[uint16]string{}
	m = testtool.Must(New(Options{Dir: dir, Disks: f, Max: 1, MaxBytes: 4096}))(t)
	t.Cleanup(func() { _ = m.Close() })
	require.NoError(t, m.Load(t.Context()))
	require.Equal(t, all, m.List())
	for name, size := range map[string]api.Size{"vm1": 8192, "vm3": 512} {
		_, _, err := m.Put(t.Context(), name, api.Spec{Size: size})
		refused(t, api.CodeLimit, err)
	}
}

func TestRefusedRequests(t *testing.T) {
	f := newFake()
	m := start(t, t.TempDir(), f)
	put := func(name string, s api.Spec) error {
		_, _, err := m.Put(t.Context(), name, s)
		return err
	}
	for _, name := range []string{"../x", "One", "-x", ".hidden", "a b", strings.Repeat("a", 129)} {
		refused(t, api.CodeInvalid, put(name, api.Spec{Size: 512}))
	}
	refused(t, api.CodeInvalid, put("x", api.Spec{Size: 100}))
	refused(t, api.CodeInvalid, put("x", api.Spec{AccessMode: api.WriteShared})) // no size
	refused(t, api.CodeInvalid, put("x", api.Spec{From: &api.Source{Image: "missing"}}))
	refused(t, api.CodeInvalid, put("x", api.Spec{Size: 512, Copy: &api.Copy{UsageType: "slow"}}))
	refused(t, api.CodeInvalid, put("x", api.Spec{Size: 512, PVC: &api.Claim{Name: "none"}}))
	refused(t, api.CodeLimit, put("x", api.Spec{Size: 2 << 30}))
	require.NoError(t, put("big", api.Spec{Size: 1 << 29}))
	refused(t, api.CodeLimit, put("x", api.Spec{Size: 1<<29 + 512}))
	refused(t, api.CodeLimit, put("big", api.Spec{Size: 1<<30 + 512}))
	require.NoError(t, put("big", api.Spec{Size: 1 << 29}), "a refused growth changes nothing")
	for i := range 39 {
		require.NoError(t, put(fmt.Sprint("v", i), api.Spec{Size: 512}))
	}
	refused(t, api.CodeLimit, put("x", api.Spec{Size: 512}))
	_, err := m.Get("x")
	refused(t, api.CodeNotFound, err)
	require.Len(t, m.List(), 40)
	entries := testtool.Must(os.ReadDir(m.opt.Dir))(t)
	// lock, numbers.json and its spare
	require.Len(t, entries, 43, "a refused request leaves nothing")
}

// TestFailuresLeaveNothing: whichever step fails, nothing is left, and the next try works.
func TestFailuresLeaveNothing(t *testing.T) {
	f := newFake()
	m := start(t, t.TempDir(), f)
	fail := func() error { return errFake }
	for name, change := range map[string]func(){
		"open":  func() { f.opening = fail },
		"serve": func() { f.serving = fail },
	} {
		f.set(change)
		_, _, err := m.Put(t.Context(), name, api.Spec{Size: 512})
		require.ErrorIs(t, err, errFake)
		refused(t, api.CodeFailed, err)
		require.NoDirExists(t, m.store.Dir(name))
		require.Empty(t, m.List())
		f.set(func() { f.opening, f.serving = nil, nil })
		_, created := testtool.Must2(m.Put(t.Context(), name, api.Spec{Size: 512}))(t)
		require.True(t, created)
		require.NoError(t, m.Delete(t.Context(), name, false))
	}
}

// TestKilled: after a kill a volume is there completely or not at all.
func TestKilled(t *testing.T) {
	dir, f := t.TempDir(), newFake()
	m := start(t, dir, f)
	snapshot := func() string {
		at := filepath.Join(t.TempDir(), "volumes")
		require.NoError(t, exec.Command("cp", "-a", dir, at).Run())
		return at
	}
	var before, after, deleting string
	f.opening = func() error { before = snapshot(); return nil }
	f.serving = func() error { after = snapshot(); return nil }
	put(t, m, "vm1", api.Spec{Size: 4096})
	hold := make(chan struct{})
	f.set(func() { f.closing = hold })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	refused(t, api.CodeUnavailable, deleteOnce(ctx, m, "vm1"))
	deleting = snapshot()
	require.Equal(t, api.StateDeleting, get(t, m, "vm1").State)
	close(hold)
	require.NoError(t, m.Delete(t.Context(), "vm1", false)) // waits for its turn

	require.FileExists(t, filepath.Join(before, "vm1", diskName))
	require.Empty(t, start(t, before, newFake()).List())
	require.NoDirExists(t, filepath.Join(before, "vm1"))
	require.Empty(t, start(t, deleting, newFake()).List())
	require.NoDirExists(t, filepath.Join(deleting, "vm1"))
	all := start(t, after, newFake()).List()
	require.Len(t, all, 1)
	require.Equal(t, api.StateReady, all[0].State)
	require.Equal(t, int64(4096), all[0].Record.Size)
}

// deleteOnce deletes with a context that has ended. That begins the deletion and does not wait.
func deleteOnce(ctx context.Context, m *Manager, name string) error {
	for {
		err := m.Delete(ctx, name, false)
		var e *api.Error
		if !errors.As(err, &e) || e.Code != api.CodeBusy {
			return err // the turn or the end of ctx may come first
		}
	}
}

func TestDelete(t *testing.T) {
	f := newFake()
	m := start(t, t.TempDir(), f)
	require.NoError(t, m.Delete(t.Context(), "vm1", false))
	require.NoError(t, m.Delete(t.Context(), "../vm1", false))
	put(t, m, "vm1", api.Spec{Size: 512})
	f.set(func() { f.users = []string{"iqn.1994-05.com.example:node1"} })
	e := refused(t, api.CodeInUse, m.Delete(t.Context(), "vm1", false))
	require.Equal(t, f.users, e.Users)
	require.ErrorContains(t, e, "node1")
	require.Len(t, f.served, 1)
	v := get(t, m, "vm1")
	require.Equal(t, api.StateReady, v.State)
	require.NoError(t, m.Delete(t.Context(), "vm1", true))
	require.Empty(t, f.served)
	require.NoDirExists(t, m.store.Dir("vm1"))
	v, created := testtool.Must2(m.Put(t.Context(), "vm1", api.Spec{Size: 512}))(t)
	require.True(t, created)
	require.NotEqual(t, uint16(64), v.Record.LUN, "the number must not come again at once")
}

// TestDeleteThatCannotBeNoted: a volume stops being a LUN before its record says that it is being
// deleted. If the record cannot be written, PUT serves the volume again, and DELETE deletes it.
func TestDeleteThatCannotBeNoted(t *testing.T) {
	for _, after := range []string{"PUT", "DELETE"} {
		t.Run(after, func(t *testing.T) {
			f := newFake()
			m := start(t, t.TempDir(), f)
			put(t, m, "vm1", api.Spec{Size: 512})
			dir := m.store.Dir("vm1")
			require.NoError(t, os.Rename(dir, dir+".away"))
			e := refused(t, api.CodeFailed, m.Delete(t.Context(), "vm1", false))
			require.ErrorContains(t, e, "PUT it to have it back")
			require.Empty(t, f.served)
			v := get(t, m, "vm1")
			require.Equal(t, api.StateFailed, v.State)
			require.NoError(t, os.Rename(dir+".away", dir))
			if after == "PUT" {
				v, created := testtool.Must2(m.Put(t.Context(), "vm1", api.Spec{Size: 512}))(t)
				require.False(t, created)
				require.Equal(t, api.StateReady, v.State)
				require.Equal(t, map[uint16]string{64: "vm1"}, f.served)
				return
			}
			require.NoError(t, m.Delete(t.Context(), "vm1", false))
			require.NoDirExists(t, dir)
		})
	}
}

// TestGrowthThatFails: answers have the size that the disk has, even if the record could not be
// saved again.
func TestGrowthThatFails(t *testing.T) {
	f := newFake()
	m := start(t, t.TempDir(), f)
	put(t, m, "vm1", api.Spec{Size: 512})
	dir := m.store.Dir("vm1")
	f.set(func() {
		f.growing = func() error { return errors.Join(unix.ENOSPC, os.Rename(dir, dir+".away")) }
	})
	require.ErrorIs(t, testtool.Err2(m.Put(t.Context(), "vm1", api.Spec{Size: 4096})), unix.ENOSPC)
	v := get(t, m, "vm1")
	require.EqualValues(t, 512, v.Record.Size)
	require.NoError(t, os.Rename(dir+".away", dir))
	v = put(t, m, "vm1", api.Spec{})
	require.EqualValues(t, 512, v.Record.Size)
}

// TestMissingDisk: a disk that was made and is not there is never made again. The volume has
// failed, and is served when the disk is back.
func TestMissingDisk(t *testing.T) {
	dir, f := t.TempDir(), newFake()
	m := start(t, dir, f)
	put(t, m, "vm1", api.Spec{Size: 512})
	require.NoError(t, m.Close())
	disk := filepath.Join(m.store.Dir("vm1"), diskName)
	require.NoError(t, os.Rename(disk, disk+".away"))
	f.set(func() { f.served = map[uint16]string{} })
	m, err := New(Options{Dir: dir, Disks: f})
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.Close() })
	m.missingPoll = time.Millisecond
	require.NoError(t, m.Load(t.Context()))
	v := get(t, m, "vm1")
	require.Equal(t, api.StateFailed, v.State)
	_, _, err = m.Put(t.Context(), "vm1", api.Spec{Size: 512})
	require.ErrorIs(t, err, fs.ErrNotExist)
	_, _, err = m.TakeSnapshot(t.Context(), "vm1", "s")
	require.ErrorIs(t, err, fs.ErrNotExist, "nobody is told to try that again")
	require.NoFileExists(t, disk)
	require.NoError(t, os.Rename(disk+".away", disk))
	testtool.Eventually(t, func() bool {
		v, err := m.Get("vm1")
		return err == nil && v.State == api.StateReady
	})
	require.Equal(t, map[uint16]string{64: "vm1"}, f.served)
}

// TestAtOnce: requests for one volume come one after the other, those for others at the same time.
func TestAtOnce(t *testing.T) {
	f := newFake()
	m := start(t, t.TempDir(), f)
	var all sync.WaitGroup
	made := make(chan bool, 100)
	for i := range 100 {
		all.Go(func() {
			name := fmt.Sprint("vm", i%10)
			_, created, err := m.Put(context.Background(), name, api.Spec{Size: 512})
			if err == nil {
				made <- created
			}
			if i%3 == 0 {
				_ = m.Delete(context.Background(), name, false)
			}
			m.List()
		})
	}
	all.Wait()
	require.Len(t, made, 100)
	for _, v := range m.List() {
		require.Equal(t, v.Record.Name, f.served[v.Record.LUN])
	}
	require.Len(t, f.served, len(m.List()))
}

func TestBrokenVolumes(t *testing.T) {
	dir, f := t.TempDir(), newFake()
	m := start(t, dir, f)
	for _, name := range []string{"good", "bad", "damaged"} {
		put(t, m, name, api.Spec{Size: 512})
	}
	require.NoError(t, m.Close())
	require.NoError(t, os.WriteFile(filepath.Join(dir, "damaged", "volume.json"), []byte("{"),
		0o600))
	f.served, f.opening = map[uint16]string{}, func() error { return errFake }
	m = start(t, dir, f)
	states := map[api.State]int{}
	for _, v := range m.List() {
		states[v.State]++
		require.NotEmpty(t, v.Failure)
	}
	require.Equal(t, map[api.State]int{api.StateFailed: 3}, states)
	require.ErrorIs(t, testtool.Err2(m.Put(t.Context(), "bad", api.Spec{Size: 512})), errFake)
	f.set(func() { f.opening = nil })
	for _, name := range []string{"good", "bad"} {
		v, created := testtool.Must2(m.Put(t.Context(), name, api.Spec{Size: 512}))(t)
		require.False(t, created)
		require.Equal(t, api.StateReady, v.State)
	}
	_, _, err := m.Put(t.Context(), "damaged", api.Spec{Size: 512})
	require.ErrorContains(t, err, "cannot be used")
	require.ErrorContains(t, m.Delete(t.Context(), "damaged", true), "cannot be used")
	require.FileExists(t, filepath.Join(dir, "damaged", diskName))
}

// TestPlaces: disks are made in the requested place, and files that were there before stay.
func TestPlaces(t *testing.T) {
	f := newFake()
	claim, fast := t.TempDir(), t.TempDir()
	f.claims, f.single = map[string]string{"c": claim, "fast": fast}, t.TempDir()
	dir := t.TempDir()
	m := start(t, dir, f)
	put := func(name string, s api.Spec) (Volume, error) {
		v, _, err := m.Put(t.Context(), name, s)
		return v, err
	}
	onClaim := api.Spec{Size: 512, PVC: &api.Claim{Name: "c"}}
	foreign := filepath.Join(claim, diskName)
	require.NoError(t, os.WriteFile(foreign, []byte("precious"), 0o600))
	_, err := put("x", onClaim)
	refused(t, api.CodeInUse, err)
	require.Equal(t, "precious", string(testtool.Must(os.ReadFile(foreign))(t)))
	require.NoError(t, os.Remove(foreign))

	v := testtool.Must(put("x", onClaim))(t)
	require.Equal(t, api.StateReady, v.State)
	require.Zero(t, v.Record.LUN)
	st := testtool.Must(os.Stat(foreign))(t)
	require.Equal(t, os.FileMode(0o660), st.Mode().Perm())
	v = testtool.Must(put("x", api.Spec{Size: 1024, PVC: &api.Claim{Name: "c"}}))(t)
	require.Equal(t, int64(1024), v.Record.Size)
	_, err = put("y", onClaim)
	refused(t, api.CodeInUse, err)

	require.NoError(t, testtool.Err(put(api.DefaultName, api.Spec{Size: 512})))
	require.FileExists(t, filepath.Join(f.single, diskName))
	require.True(t, m.Has(store.Place{Kind: store.PlaceRoot}))
	_, err = put("z", api.Spec{Size: 512, Copy: &api.Copy{UsageType: "fast"}})
	require.NoError(t, err)
	at := filepath.Join(fast, ".volumes", m.store.ID(), "z")
	require.FileExists(t, filepath.Join(at, diskName))
	for _, name := range []string{"x", api.DefaultName, "z"} {
		require.NoError(t, m.Delete(t.Context(), name, false))
	}
	require.NoFileExists(t, foreign)
	require.NoFileExists(t, filepath.Join(f.single, diskName))
	require.NoDirExists(t, at)
}

// TestClaimIsFilled: a volume on a claim cannot be used before its disk has all of its image, even
// after a restart.
func TestClaimIsFilled(t *testing.T) {
	f := newFake()
	claim := t.TempDir()
	f.claims = map[string]string{"c": claim}
	f.whole = make(chan struct{})
	dir := t.TempDir()
	m := start(t, dir, f)
	spec := api.Spec{From: &api.Source{Image: "a"}, PVC: &api.Claim{Name: "c"}}
	v := put(t, m, "x", spec)
	require.Equal(t, api.StateFilling, v.State)
	require.NoError(t, m.Close())
	m = start(t, dir, f)
	v = get(t, m, "x")
	require.Equal(t, api.StateFilling, v.State)
	close(f.whole)
	testtool.Eventually(t, func() bool {
		v, err := m.Get("x")
		return err == nil && v.State == api.StateReady
	})
	require.Empty(t, f.served)

	// The disk of a machine that runs is not removed: QEMU locks it like that.
	qemu := testtool.Must(os.OpenFile(filepath.Join(claim, diskName), os.O_RDWR, 0))(t)
	defer qemu.Close()
	lock := unix.Flock_t{Type: unix.F_RDLCK, Start: 101, Len: 1}
	require.NoError(t, unix.FcntlFlock(qemu.Fd(), unix.F_OFD_SETLK, &lock))
	refused(t, api.CodeInUse, m.Delete(t.Context(), "x", false))
	require.Equal(t, api.StateReady, get(t, m, "x").State)
	require.NoError(t, m.Delete(t.Context(), "x", true))
	require.Empty(t, testtool.Must(diskFiles(claim))(t))
}
