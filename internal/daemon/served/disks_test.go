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

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/options/optionstest"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/serving"
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
	inUse := serving.New(serving.Config{Log: opt.Log})
	d, err := New(opt, inUse)
	require.NoError(t, err)
	var found []plan.Disk
	of := map[string]disk.Disk{}
	for i, one := range disks {
		name := fmt.Sprintf("%d.raw", i+1)
		path := filepath.Join(opt.Images.Dir, name)
		require.NoError(t, os.WriteFile(path, make([]byte, 4096), 0o644))
		img, err := image.Open(path, image.Options{})
		require.NoError(t, err)
		found, of[name] = append(found, plan.Disk{Name: name, Image: img}), one
	}
	d.OpenInstance = func(ctx context.Context, img *image.Image, opt instance.Options) (
		*instance.Instance, error) {
		inst, err := instance.Open(ctx, img, opt)
		require.NoError(t, err)
		inst.Disk = of[img.Name()]
		return inst, nil
	}
	p, err := plan.Make(t.Context(), opt, found, plan.Volumes{})
	require.NoError(t, err)
	require.NoError(t, d.Start(t.Context(), p))
	handovers := control.New(nil, opt.Log)
	handovers.Begin(inUse, nil, d)
	require.NoError(t, d.ServeAll(handovers))
	t.Cleanup(func() {
		handovers.Close()
		d.Stop()
		require.NoError(t, d.Close(context.Background(), func() error { return nil }))
	})
	return d
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
