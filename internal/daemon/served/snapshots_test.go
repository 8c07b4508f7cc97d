package served

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/options/optionstest"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// serveKept serves persistent disks of images 1.raw, 2.raw and so on, until the test ends.
func serveKept(t *testing.T, count int) *Disks {
	t.Helper()
	opt := &options.Options{Images: options.Images{Dir: t.TempDir()}, WorkDir: t.TempDir(),
		PersistentDir: t.TempDir(), Portals: []options.Address{optionstest.Loopback()},
		Table: optionstest.Table}
	require.NoError(t, opt.Resolve())
	d := testtool.Must(New(opt, serving.New(serving.Config{Log: opt.Log})))(t)
	var found []plan.Disk
	for i := range count {
		path := filepath.Join(opt.Images.Dir, fmt.Sprintf("%d.raw", i+1))
		require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte{1}, 1<<20), 0o644))
		img := testtool.Must(image.Open(path, image.Options{}))(t)
		found = append(found, plan.Disk{Name: filepath.Base(path), Image: img})
	}
	d.begin(t, found)
	return d
}

// snapshot asks for an action on the snapshot "s" of a disk.
func (d *Disks) snapshot(t *testing.T, disk string, action status.SnapshotAction) error {
	_, err := d.ChangeSnapshots(t.Context(), status.SnapshotRequest{Action: action,
		Disks: []string{disk}, Name: "s"})
	return err
}

// TestSnapshotsOfASnapshot: a served snapshot has no snapshots, and each message names it.
func TestSnapshotsOfASnapshot(t *testing.T) {
	d := serveKept(t, 1)
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotCreate))
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotServe))
	const want = `LUN 2 ("1.raw@s") is not kept here`
	for _, action := range []status.SnapshotAction{status.SnapshotCreate, status.SnapshotDelete,
		status.SnapshotRevert, status.SnapshotServe, status.SnapshotUnserve,
		status.SnapshotCommitted} {
		require.ErrorContains(t, d.snapshot(t, "1.raw@s", action), want, action)
	}
	_, err := d.OpenContent("1.raw@s", "s")
	require.ErrorContains(t, err, want)
}

// TestAnImageIsOfTheSnapshotThatWasRead: a snapshot that is deleted and made again under its name,
// while an image of it is stored, is not the one that this image has.
func TestAnImageIsOfTheSnapshotThatWasRead(t *testing.T) {
	d := serveKept(t, 1)
	note := func(identity string) error {
		_, err := d.ChangeSnapshots(t.Context(), status.SnapshotRequest{Name: "s",
			Action: status.SnapshotCommitted, Disks: []string{"1.raw"}, Identity: identity,
			Image: "sha256:1/1.raw"})
		return err
	}
	read := func() (c status.Content) {
		of := testtool.Must(d.OpenContent("1.raw", "s"))(t)
		require.NoError(t, of.Close())
		return of.Described
	}
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotCreate))
	old := read()
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotDelete))
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotCreate))
	require.ErrorContains(t, note(old.Identity), `the snapshot "s" that was read is not there`)
	require.Error(t, note(""))
	require.Empty(t, read().Committed)
	now := read()
	require.NotEqual(t, old.Identity, now.Identity)
	require.NoError(t, note(now.Identity))
	id := d.table.all()[0].Instance().Snapshots()[0].ID
	require.Equal(t, map[string]string{"sha256:1/1.raw": id}, read().Committed)
	require.NoError(t, instance.TakeSnapshot(t.Context(), "t", d.table.all()[0].Instance()))
}

// TestRevertsAtOnce: a disk is never reverted under a guest that uses it, however many ask for it.
func TestRevertsAtOnce(t *testing.T) {
	d := serveKept(t, 1)
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotCreate))
	reverting, reverted := context.WithCancel(t.Context())
	var group errgroup.Group
	for range 3 {
		group.Go(func() error {
			for range 40 {
				err := d.snapshot(t, "1.raw", status.SnapshotRevert)
				if err != nil && !errors.As(err, new(*serving.InUseError)) {
					return err
				}
			}
			return nil
		})
	}
	ended := make(chan error, 1)
	go func() { ended <- group.Wait(); reverted() }()
	uses := 0
	for n := byte(0); uses == 0 || reverting.Err() == nil; n++ {
		one := d.inUse.At(1)
		if one == nil || !one.Begin() {
			continue
		}
		c := d.inUse.Attach("guest")
		if c.FirstUse(one) == nil {
			uses++
			want, got := bytes.Repeat([]byte{n}, 4096), make([]byte, 4096)
			require.NoError(t, testtool.Err(one.Disk.WriteAt(t.Context(), want, 0)))
			require.NoError(t, one.Disk.Flush())
			require.NoError(t, testtool.Err(one.Disk.ReadAt(t.Context(), got, 0)))
			require.Equal(t, want, got)
		}
		one.End()
		c.Detach()
	}
	require.NoError(t, <-ended)
	require.NotNil(t, d.inUse.At(1))
}

// TestReloadDuringARevert: new settings of a disk that is being reverted are not lost in silence,
// and the reload does not wait for it.
func TestReloadDuringARevert(t *testing.T) {
	d := serveKept(t, 1)
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotCreate))
	used := d.inUse.At(1)
	require.True(t, used.Begin()) // a request whose client has gone
	end := sync.OnceFunc(used.End)
	defer end()
	reverted := testtool.Go(func() error {
		return d.snapshot(t, "1.raw", status.SnapshotRevert)
	})
	testtool.Eventually(t, func() bool { return d.inUse.At(1) == nil })
	next := d.opt.Settings
	next.Disk.ReadOnly = true
	done, later := testtool.Must2(d.Reload(next))(t)
	require.Empty(t, done)
	require.Len(t, later, 1)
	require.Contains(t, later[0], "1.raw: read-only (the disk is being reverted")
	end()
	require.NoError(t, <-reverted)
	done, later = testtool.Must2(d.Reload(next))(t)
	require.Equal(t, []string{"1.raw: read-only"}, done)
	require.Empty(t, later)
}

// TestReloadBesideAGrowth: a disk that is served all the while gets its new settings.
func TestReloadBesideAGrowth(t *testing.T) {
	d := serveKept(t, 1)
	s := d.table.all()[0]
	s.turn.Lock() // as a growth whose storage hangs
	defer s.turn.Unlock()
	next := d.opt.Settings
	next.Disk.ReadOnly = true
	done, later := testtool.Must2(d.Reload(next))(t)
	require.Equal(t, []string{"1.raw: read-only"}, done)
	require.Empty(t, later)
}

// TestRevertForgetsAnAtomicWrite: what an atomic write has replaced, and a disk that failed still
// keeps, is not put back over the content of a snapshot. It stays if the revert fails.
func TestRevertForgetsAnAtomicWrite(t *testing.T) {
	d := serveKept(t, 1)
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotCreate))
	store := d.table.all()[0].Instance().Store()
	require.NoError(t, store.Save(disk.StoredAtomic, []byte("former")))
	ended, end := context.WithCancel(t.Context())
	end()
	require.ErrorIs(t, d.Revert(ended, d.table.all()[0], "s"), context.Canceled)
	require.NotEmpty(t, testtool.Must(store.Load(disk.StoredAtomic))(t), "the content stays")
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotRevert))
	require.Empty(t, testtool.Must(store.Load(disk.StoredAtomic))(t))
}

// TestRevertBesideDeletion: a disk that was withdrawn is not served again by a revert that was
// under way, and a disk that is closed is not reverted.
func TestRevertBesideDeletion(t *testing.T) {
	const disks = 12
	d := serveKept(t, disks)
	for i, s := range d.table.all() {
		require.NoError(t, d.snapshot(t, s.Name, status.SnapshotCreate))
		done := testtool.Go(func() error {
			var err error
			for err == nil {
				err = d.Revert(context.Background(), s, "s")
			}
			return err
		})
		testtool.Eventually(t, func() bool { return d.Withdraw(s) == nil })
		<-s.released
		require.False(t, s.Serving(), i)
		require.NoError(t, d.Abandon(s))
		require.ErrorContains(t, <-done, "is not open")
		require.Nil(t, d.inUse.At(s.LUN))
		require.Error(t, d.Serve(s, false))
		require.Error(t, d.Grow(s, 2<<20))
	}
}

// TestServedSnapshotIsKnownAsOne: nobody finds it in the table as a disk of its own, also before it
// is served.
func TestServedSnapshotIsKnownAsOne(t *testing.T) {
	d := serveKept(t, 1)
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotCreate))
	served := testtool.Go(func() error {
		for range 200 {
			if err := d.snapshot(t, "1.raw", status.SnapshotServe); err != nil {
				return err
			}
			if err := d.snapshot(t, "1.raw", status.SnapshotUnserve); err != nil {
				return err
			}
		}
		return nil
	})
	for len(served) == 0 {
		_, err := d.source("1.raw@s")
		require.ErrorIs(t, err, fs.ErrNotExist)
	}
	require.NoError(t, <-served)
}

// TestDeletionOfADiskThatIsRead: who reads a snapshot of a disk uses the disk.
func TestDeletionOfADiskThatIsRead(t *testing.T) {
	d := serveKept(t, 1)
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotCreate))
	of := testtool.Must(d.OpenContent("1.raw", "s"))(t)
	s := d.table.all()[0]
	require.ErrorIs(t, d.Withdraw(s), instance.ErrSnapshotInUse)
	require.True(t, s.Serving())
	require.NoError(t, of.Close())
	require.NoError(t, d.Withdraw(s))
	<-s.released
}

// TestRefusedDeletionEndsNothing: snapshots stay LUNs if the deletion of their disk is refused.
func TestRefusedDeletionEndsNothing(t *testing.T) {
	for name, use := range map[string]func(t *testing.T, d *Disks) (end func()){
		"disk":             func(_ *testing.T, d *Disks) func() { return d.use(1) },
		"another snapshot": func(_ *testing.T, d *Disks) func() { return d.use(3) },
		"read snapshot": func(t *testing.T, d *Disks) func() {
			of := testtool.Must(d.OpenContent("1.raw", "third"))(t)
			return func() { require.NoError(t, of.Close()) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := serveKept(t, 1)
			s := d.table.all()[0]
			for _, name := range []string{"first", "second", "third"} {
				require.NoError(t, d.TakeSnapshot(t.Context(), name, s))
			}
			first := testtool.Must(d.serveSnapshot(t.Context(), s, "first"))(t)
			second := testtool.Must(d.serveSnapshot(t.Context(), s, "second"))(t)
			end := use(t, d)
			require.Error(t, d.Withdraw(s))
			for _, lun := range []uint16{1, first, second} {
				require.NotNil(t, d.inUse.At(lun), lun)
			}
			end()
			require.NoError(t, d.Withdraw(s))
			for _, lun := range []uint16{1, first, second} {
				require.Nil(t, d.inUse.At(lun), lun)
			}
		})
	}
}

// use begins to use a disk, as a client that has read it does.
func (d *Disks) use(lun uint16) (end func()) {
	c := d.inUse.Attach("guest")
	_ = c.FirstUse(d.inUse.At(lun)) // it is there
	return c.Detach
}

// TestSnapshotThatAVolumeNeeds: a snapshot that was cloned stays, also if the daemon does not serve
// the volumes that would tell who needs it, or serves others.
func TestSnapshotThatAVolumeNeeds(t *testing.T) {
	d := serveKept(t, 2)
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotCreate))
	d.ServeVolumes("here")
	clone, err := d.Clone(t.Context(), plan.Disk{Name: "vm2", Dir: t.TempDir(), Volume: true,
		DiskSettings: options.DiskSettings{CopyMode: instance.CopyOnWrite}}, "1.raw", "s")
	require.NoError(t, err)
	require.NoError(t, d.Abandon(clone))
	remove := func() error { return d.snapshot(t, "1.raw", status.SnapshotDelete) }
	for _, served := range []string{"", "elsewhere"} {
		d.ServeVolumes(served)
		require.ErrorIs(t, remove(), instance.ErrSnapshotInUse)
		require.ErrorContains(t, remove(), `"vm2"`)
	}
	d.ServeVolumes("here")
	require.NoError(t, d.AddVolume(Volume{Name: "vm2", Disk: "1.raw", Snapshot: "s"}, true))
	require.ErrorIs(t, remove(), instance.ErrSnapshotInUse, "it is not open")
	require.Equal(t, []string{"vm2"}, d.LeaveVolume("1.raw", true))
	// The record of the volume cannot be read, or the image was renamed since: the note counts.
	require.NoError(t, d.AddVolume(Volume{Name: "vm2", Unknown: true}, true))
	require.ErrorIs(t, remove(), instance.ErrSnapshotInUse)
	require.Equal(t, []string{"vm2"}, d.LeaveVolume("1.raw", true))
	require.NoError(t, d.AddVolume(Volume{Name: "vm2", Disk: "0.raw", Snapshot: "s"}, true))
	require.ErrorIs(t, remove(), instance.ErrSnapshotInUse)
	// Another volume has the name by now.
	for _, v := range []Volume{{}, {Disk: "0.raw", Snapshot: "t"}, {Disk: "2.raw", Snapshot: "s"}} {
		v.Name = "vm2"
		require.NoError(t, d.AddVolume(v, true))
		require.Empty(t, d.LeaveVolume("1.raw", true))
		require.NoError(t, remove())
		require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotCreate))
		inst := d.table.all()[0].Instance()
		require.NoError(t, inst.NoteClone(inst.Snapshots()[0].ID, "here/vm2", d.gone))
	}
	d.DropVolume("vm2")
	require.NoError(t, remove())
	// Nothing is cloned from a volume that is deleted.
	require.NoError(t, d.AddVolume(Volume{Name: "vm1"}, false))
	require.Empty(t, d.LeaveVolume("vm1", true))
	clone2 := Volume{Name: "vm2", Disk: "vm1", Snapshot: "s"}
	require.ErrorAs(t, d.AddVolume(clone2, false), new(*LeavingError))
	require.Empty(t, d.LeaveVolume("vm1", false))
	require.NoError(t, d.AddVolume(clone2, false))
}

// TestClonesThatAreGone: a snapshot forgets clones that were volumes here and are gone, and no
// others. Otherwise its record would grow with each clone that was ever made, until it is full.
func TestClonesThatAreGone(t *testing.T) {
	d := serveKept(t, 1)
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotCreate))
	clone := func(name string) {
		require.NoError(t, d.AddVolume(Volume{Name: name, Disk: "1.raw", Snapshot: "s"}, false))
		made, err := d.Clone(t.Context(), plan.Disk{Name: name, Dir: t.TempDir(), Volume: true,
			DiskSettings: options.DiskSettings{CopyMode: instance.CopyOnWrite}}, "1.raw", "s")
		require.NoError(t, err)
		require.NoError(t, d.Abandon(made))
	}
	d.ServeVolumes("elsewhere")
	clone("vm1")
	d.ServeVolumes("here")
	clone("vm2")
	clone("vm3")
	d.DropVolume("vm1")
	d.DropVolume("vm2")
	clone("vm4")
	require.Equal(t, []string{"elsewhere/vm1", "here/vm3", "here/vm4"},
		d.table.all()[0].Instance().Snapshots()[0].Clones)
}

// TestCloneOfADiskWithAnotherSerialNumber: a clone knows its snapshot whatever serial number the
// disk has by now, and as earlier versions have known it.
func TestCloneOfADiskWithAnotherSerialNumber(t *testing.T) {
	d := serveKept(t, 1)
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotCreate))
	what := plan.Disk{Name: "vm2", Dir: t.TempDir(), Volume: true,
		DiskSettings: options.DiskSettings{CopyMode: instance.CopyOnWrite}}
	clone := func() error {
		s, err := d.Clone(t.Context(), what, "1.raw", "s")
		if err == nil {
			err = d.Abandon(s)
		}
		return err
	}
	require.NoError(t, clone())
	inst := d.table.all()[0].Instance()
	inst.Identity.Serial = "another"
	require.NoError(t, clone())
	path, state := filepath.Join(what.Dir, instance.PersistentName+".state"), map[string]any{}
	require.NoError(t, durable.LoadRecord(path, &state))
	state["chain"].([]any)[0].(map[string]any)["digest"] = "snapshot:" +
		snapshotIdentity(inst, inst.Snapshots()[0].ID).Serial
	require.NoError(t, durable.SaveRecord(path, state, nil, nil))
	require.NoError(t, clone())
	inst.Identity.Serial = "a third one"
	require.NoError(t, clone(), "it knows the snapshot better by now")
	require.NoError(t, d.DeleteSnapshot(t.Context(), d.table.all()[0], "s"))
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotCreate))
	require.ErrorContains(t, clone(), "the image has changed")
}

// TestEndsAtOnce: a disk is not closed under a command that hangs in it, however many take it away.
func TestEndsAtOnce(t *testing.T) {
	for name, again := range map[string]func(*Disks, context.Context, *Disk) error{
		"end": func(d *Disks, ctx context.Context, s *Disk) error { return d.End(ctx, s) },
		"withdraw": func(d *Disks, ctx context.Context, s *Disk) error {
			if err := d.Withdraw(s); err != nil {
				return err
			}
			return d.End(ctx, s)
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := serveKept(t, 1)
			s, used := d.table.all()[0], d.inUse.At(1)
			require.True(t, used.Begin())
			over := sync.OnceFunc(used.End)
			t.Cleanup(over)
			impatient, end := context.WithCancel(t.Context())
			end()
			require.ErrorIs(t, d.End(impatient, s), context.Canceled)
			require.ErrorIs(t, again(d, impatient, s), context.Canceled)
			require.NotNil(t, s.Instance(), "a command hangs in it")
			over()
			require.NoError(t, again(d, t.Context(), s))
			require.NoError(t, d.End(t.Context(), s))
			require.Nil(t, s.Instance())
		})
	}
}

// TestCloneWithOtherBlocks: a clone has the blocks of its disk. One that an earlier version has
// made with others keeps them.
func TestCloneWithOtherBlocks(t *testing.T) {
	d := serveKept(t, 1)
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotCreate))
	clone := plan.Disk{Name: "vm2", Dir: t.TempDir(), Volume: true, DiskSettings: options.
		DiskSettings{CopyMode: instance.CopyOnWrite, BlockSize: disk.LongBlock}}
	_, err := d.Clone(t.Context(), clone, "1.raw", "s")
	require.ErrorAs(t, err, new(*instance.BlockSizeError))
	clone.BlockSizeKnown = true
	for range 2 { // it is made, and opened
		s := testtool.Must(d.Clone(t.Context(), clone, "1.raw", "s"))(t)
		require.Equal(t, disk.LongBlock, s.Instance().BlockSize)
		require.NoError(t, d.Abandon(s))
	}
}

// TestNumbersOfDisks: a command finds a disk by its number, as it is written in one way. Another
// way is a name, which a volume may have or have had.
func TestNumbersOfDisks(t *testing.T) {
	d := serveKept(t, 1)
	s := testtool.Must(d.findOpen("1"))(t)
	require.Equal(t, "1.raw", s.Name)
	for _, name := range []string{"01", "+1", "0", ""} {
		require.ErrorContains(t, testtool.Err(d.findOpen(name)), "there is no disk", name)
	}
}
