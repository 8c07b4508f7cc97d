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

func TestMemoryRunsOutOfSpaceAndRecovers(t *testing.T) {
	m := disktest.NewMemory(1 << 20)
	m.SetFree(8192)
	p := make([]byte, 8192)
	_, err := m.WriteAt(t.Context(), p, 0)
	require.NoError(t, err)
	_, err = m.WriteAt(t.Context(), p[:512], 65536)
	require.ErrorIs(t, err, disk.ErrNoSpace)
	n, err := m.WriteAt(t.Context(), p, 4096)
	require.ErrorIs(t, err, disk.ErrNoSpace)
	require.Equal(t, 4096, n, "as much as there is space for")
	_, err = m.WriteAt(t.Context(), p, 0)
	require.NoError(t, err, "allocated pages can be overwritten")
	require.NoError(t, m.Discard(t.Context(), 0, 4096))
	require.EqualValues(t, 4096, m.Allocated())
	_, err = m.WriteAt(t.Context(), p[:512], 65536)
	require.NoError(t, err)
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
	_, err = d.ReadAt(ctx, p[:2*block], 0)
	require.NoError(t, err, "what was written is here")

	d.Refuse()
	_, err = d.ReadAt(t.Context(), p, 0)
	require.ErrorIs(t, err, disk.ErrNotNow)
	require.Equal(t, 1, d.Refused())
	d.Slow(time.Millisecond)
	d.Restore()
	_, err = d.ReadAt(t.Context(), p, 0)
	require.NoError(t, err)
}

func TestFaultRules(t *testing.T) {
	boom := errors.New("boom")
	f := disktest.NewFault(disktest.NewMemory(1 << 20))
	p := []byte{1, 2, 3, 4}

	remove := f.Inject(disktest.Rule{Op: disktest.OpWrite, Off: 512, Length: 512, Times: 1,
		Err: boom})
	_, err := f.WriteAt(t.Context(), p, 0)
	require.NoError(t, err, "another range")
	n, err := f.WriteAt(t.Context(), p, 600)
	require.ErrorIs(t, err, boom)
	require.Zero(t, n)
	_, err = f.WriteAt(t.Context(), p, 600)
	require.NoError(t, err, "once only")
	remove()

	remove = f.Inject(disktest.Rule{Err: boom})
	require.ErrorIs(t, f.Flush(), boom)
	require.ErrorIs(t, f.Discard(t.Context(), 0, 512), boom)
	require.ErrorIs(t, f.Zero(t.Context(), 0, 512), boom)
	_, err = f.Extent(t.Context(), 0, 512)
	require.ErrorIs(t, err, boom)
	remove()
	require.NoError(t, f.Flush())

	release := make(chan struct{})
	f.Inject(disktest.Rule{Op: disktest.OpRead, Block: release})
	before := f.Calls(disktest.OpRead)
	result := make(chan error)
	go func() {
		_, err := f.ReadAt(t.Context(), make([]byte, 4), 0)
		result <- err
	}()
	require.NoError(t, f.Flush(), "only reads are blocked")
	close(release)
	require.NoError(t, <-result)
	require.Equal(t, before+1, f.Calls(disktest.OpRead))
	require.Equal(t, "write", disktest.OpWrite.String())
	require.Equal(t, "Op(99)", disktest.Op(99).String())
}

// plain hides a disk's optional interfaces.
type plain struct{ disk.Disk }

func TestPlainDisk(t *testing.T) {
	disktest.Run(t, func(*testing.T) disk.Disk { return plain{disktest.NewMemory(2 << 20)} })
	f := disktest.NewFault(plain{disktest.NewMemory(2 << 20)})
	require.ErrorIs(t, f.Discard(t.Context(), 0, 512), errors.ErrUnsupported)
	require.ErrorIs(t, f.Zero(t.Context(), 0, 512), errors.ErrUnsupported)
	_, err := f.Extent(t.Context(), 0, 512)
	require.ErrorIs(t, err, errors.ErrUnsupported)
}
