package served

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/options/optionstest"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// brokenDisk is a disk whose flush fails or hangs.
type brokenDisk struct {
	failed, closed atomic.Bool
	hang           chan struct{}
}

func (b *brokenDisk) ReadAt(_ context.Context, p []byte, _ int64) (int, error) {
	return len(p), nil
}

func (b *brokenDisk) WriteAt(ctx context.Context, p []byte, _ int64) (int, error) {
	if b.failed.Load() {
		return 0, disk.ErrFailed
	}
	return len(p), nil
}
func (b *brokenDisk) Flush() error {
	if b.hang != nil {
		<-b.hang
	}
	if b.failed.Load() {
		return disk.ErrFailed
	}
	return nil
}
func (b *brokenDisk) Size() int64  { return 512 }
func (b *brokenDisk) Close() error { b.closed.Store(true); return nil }

// serve serves disks until the test ends.
func serve(t *testing.T, disks ...disk.Disk) *Disks {
	t.Helper()
	opt := &options.Options{Images: options.Images{Dir: t.TempDir()}, WorkDir: t.TempDir(),
		Portals: []options.Address{optionstest.Loopback()}, Table: optionstest.Table}
	require.NoError(t, opt.Resolve())
	opt.Settings.Disk.CopyMode = instance.CopyNone
	d := testtool.Must(New(opt, serving.New(serving.Config{Log: opt.Log})))(t)
	var found []plan.Disk
	of := map[string]disk.Disk{}
	for i, one := range disks {
		name := fmt.Sprintf("%d.raw", i+1)
		path := filepath.Join(opt.Images.Dir, name)
		require.NoError(t, os.WriteFile(path, make([]byte, 4096), 0o644))
		img := testtool.Must(image.Open(path, image.Options{}))(t)
		found, of[name] = append(found, plan.Disk{Name: name, Image: img}), one
	}
	d.OpenInstance = func(ctx context.Context, img *image.Image, opt instance.Options) (
		*instance.Instance, error) {
		inst := testtool.Must(instance.Open(ctx, img, opt))(t)
		inst.Disk = of[img.Name()]
		return inst, nil
	}
	d.begin(t, found)
	return d
}

// begin serves what was found until the test ends.
func (d *Disks) begin(t *testing.T, found []plan.Disk) {
	t.Helper()
	p := testtool.Must(plan.Make(t.Context(), d.opt, found, plan.Volumes{}))(t)
	require.NoError(t, d.Start(t.Context(), p))
	handovers := control.New(nil, d.opt.Log)
	handovers.Begin(d.inUse, nil, d)
	require.NoError(t, d.ServeAll(handovers))
	t.Cleanup(func() {
		handovers.Close()
		d.Stop()
		require.NoError(t, d.Close(context.Background(), func() error { return nil }))
	})
}

func TestAFlushThatHangsEndsWithTheDeadline(t *testing.T) {
	b := &brokenDisk{hang: make(chan struct{})}
	defer close(b.hang)
	d := serve(t, b)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorContains(t, d.Flush(ctx), "did not end in time")
	require.False(t, b.closed.Load())
}

// TestRecordThatHangs: the storage of the file with the first reads does not answer. At a stop, the
// disks are flushed all the same.
func TestRecordThatHangs(t *testing.T) {
	b := &brokenDisk{hang: make(chan struct{})}
	d := serve(t, b)
	d.record = &recorder{log: zap.NewNop()}
	d.record.mu.Lock() // as a save that hangs
	defer d.record.mu.Unlock()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := testtool.Go(func() error { return d.Flush(ctx) })
	select {
	case b.hang <- struct{}{}: // the disk's flush takes it
	case <-time.After(testtool.Timeout):
		require.Fail(t, "the disk is not flushed")
	}
	testtool.Waits(t, ended, "the record is not saved")
	cancel()
	require.ErrorContains(t, <-ended, "did not end in time")
	close(b.hang)
}

// TestDisksAreClosedAtOnce: closing a disk may wait for its background reads, and all disks share
// the time of a stop. So they are closed at the same time.
func TestDisksAreClosedAtOnce(t *testing.T) {
	const disks = 40
	var entered atomic.Int32
	all := make(chan struct{})
	err := forAll(disks, disks, func(i int) error {
		if entered.Add(1) == disks {
			close(all)
		}
		select {
		case <-all:
		case <-time.After(time.Minute):
			return errors.New("the others do not come")
		}
		if i%20 == 3 {
			return fmt.Errorf("disk %d", i)
		}
		return nil
	})
	require.EqualError(t, err, "disk 3\ndisk 23")
	require.NoError(t, forAll(0, 0, nil))
}

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

// movedDisk is one that another daemon serves for its machine now.
type movedDisk struct{ brokenDisk }

func (*movedDisk) WriteAt(context.Context, []byte, int64) (int, error) {
	return 0, fmt.Errorf("%w: %w", disk.ErrFailed, disk.ErrMoved)
}

// TestProbesActWhereItHelps: guests shall log in elsewhere when all disks have failed or moved, and
// not because one waits or has no space. Only a disk that has failed needs a new start: of the
// daemon, or of the machine if the disk is another server's.
func TestProbesActWhereItHelps(t *testing.T) {
	b := &brokenDisk{}
	d := serve(t, b, &movedDisk{})
	remote := func(lun uint16) { // the disk is another server's
		s := d.table.served()[lun-1]
		s.AlreadyOpen = s.Instance()
	}
	remote(2)
	state := func(lun uint16) status.Condition {
		c, _ := d.condition(d.table.served()[lun-1], time.Now())
		return c
	}
	require.Equal(t, status.DiskReady, state(1).State)
	require.Equal(t, status.DiskMoved, state(2).State)
	require.Empty(t, d.Trouble(), "a disk that has moved is no trouble")
	require.NoError(t, d.Failure())

	in := d.inUse.At(1)
	in.Failed(status.TroubleNoSpace, serving.OpWrite, "iqn.a", "it is full", disk.ErrNoSpace,
		time.Now())
	require.Equal(t, status.DiskNoSpace, state(1).State)
	require.NotEmpty(t, state(1).WhatToDo)
	require.Len(t, d.Trouble(), 1)
	require.NoError(t, d.Unusable(), "a guest may log in")

	b.failed.Store(true)
	require.Equal(t, status.DiskFailed, state(1).State, "the worst counts")
	require.ErrorContains(t, d.Unusable(), "LUN 2")
	require.ErrorContains(t, d.Failure(), "LUN 1")
	require.NotContains(t, d.Failure().Error(), "LUN 2")
	require.Contains(t, state(1).WhatToDo, "start the daemon again")
	remote(1)
	require.NoError(t, d.Failure(), "the machine would go on without what is lost")
	require.Contains(t, state(1).WhatToDo, "start the machine again")
	b.failed.Store(false)
	require.NoError(t, d.Unusable())
}

// TestCopyingThatFails: people see that a part of the image cannot be copied, before a guest reads
// there.
func TestCopyingThatFails(t *testing.T) {
	d := serve(t, &brokenDisk{})
	s := d.table.served()[0]
	s.Progress = new(image.Progress)
	now := time.Now()
	var troubles []status.Trouble
	state := func() (c status.Condition) {
		now = now.Add(time.Second)
		c, troubles = d.condition(s, now)
		return c
	}
	require.Equal(t, status.DiskReady, state().State)
	s.Progress.Missed(&disk.MediumError{Op: "read", Off: 512, Length: 512,
		Err: errors.New("input/output error")})
	c := state()
	require.Equal(t, status.DiskFailing, c.State)
	require.Equal(t, status.TroubleReadError, c.Kind)
	require.Contains(t, c.Reason, "a part of the image cannot be copied")
	require.Contains(t, c.Reason, "input/output error")
	began := now
	_ = state()
	require.Equal(t, began, troubles[0].Since, "it is known since then")
	require.NoError(t, d.Unusable(), "a guest may log in")
	s.Progress.Wait(true)
	require.Equal(t, status.DiskNoSpace, state().State, "the worst counts")
	s.Progress.Wait(false)
	s.Progress.Missed(nil)
	require.Equal(t, status.DiskReady, state().State)
}
