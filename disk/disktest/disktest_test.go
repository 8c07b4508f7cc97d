package disktest_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
)

func TestMemory(t *testing.T) {
	disktest.Run(t, func(*testing.T) disk.Disk { return disktest.NewMemory(3<<20 + 512) })
}

func TestFaultWithoutRulesIsTheDiskInside(t *testing.T) {
	disktest.Run(t, func(*testing.T) disk.Disk {
		return disktest.NewFault(disktest.NewMemory(2 << 20))
	})
}

func TestDistant(t *testing.T) {
	disktest.Run(t, func(*testing.T) disk.Disk {
		return disktest.NewDistant(disktest.NewMemory(3<<20 + 512))
	})
}

// TestDistantNotNow has content that cannot be had: calls wait until their context ends, or say so
// at once.
func TestDistantNotNow(t *testing.T) {
	const block = disktest.DistantBlock
	d := disktest.NewDistant(disktest.NewMemory(1 << 20))
	p := make([]byte, 3*block)
	ctx, cancel := context.WithCancel(t.Context())
	d.Cut()
	result := make(chan error)
	go func() {
		_, err := d.ReadAt(ctx, p, 0)
		result <- err
	}()
	testtool.Eventually(t, func() bool { return d.Waiting() == 1 })
	cancel()
	require.ErrorIs(t, <-result, disk.ErrNotNow)
	n, err := d.WriteAt(ctx, p[:2*block+1], 0)
	require.ErrorIs(t, err, disk.ErrNotNow)
	require.Equal(t, 2*block, n)
	require.NoError(t, testtool.Err(d.ReadAt(ctx, p[:2*block], 0)), "what was written is here")

	d.Refuse()
	require.ErrorIs(t, testtool.Err(d.ReadAt(t.Context(), p, 0)), disk.ErrNotNow)
	require.Equal(t, 1, d.Refused())
	d.Slow(time.Millisecond)
	d.Restore()
	require.NoError(t, testtool.Err(d.ReadAt(t.Context(), p, 0)))
}

// plain hides a disk's optional interfaces.
type plain struct{ disk.Disk }

func TestPlainDisk(t *testing.T) {
	disktest.Run(t, func(*testing.T) disk.Disk { return plain{disktest.NewMemory(2 << 20)} })
	f := disktest.NewFault(plain{disktest.NewMemory(2 << 20)})
	require.ErrorIs(t, f.Discard(t.Context(), 0, 512), errors.ErrUnsupported)
	require.ErrorIs(t, f.Zero(t.Context(), 0, 512), errors.ErrUnsupported)
	require.ErrorIs(t, testtool.Err(f.Extent(t.Context(), 0, 512)), errors.ErrUnsupported)
}
