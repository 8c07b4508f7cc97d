package vhostuser

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/vhostuser/vhosttest"
)

// byHand gives the device a read of 4096 bytes whose memory lies in one region.
func byHand(t *testing.T, d *vhosttest.Driver, r *vhosttest.Region) {
	t.Helper()
	const next, write = vhosttest.DescNext, vhosttest.DescWrite
	b, err := d.Memory.AllocIn(r, 16+4096+1)
	require.NoError(t, err)
	q := d.Queue(0)
	q.SetDescriptor(1, vhosttest.Descriptor{Addr: b.Addr, Len: 16, Flags: next, Next: 2})
	q.SetDescriptor(2, vhosttest.Descriptor{Addr: b.Addr + 16, Len: 4096, Flags: next | write,
		Next: 3})
	q.SetDescriptor(3, vhosttest.Descriptor{Addr: b.Addr + 16 + 4096, Len: 1, Flags: write})
	q.Push(1)
	require.NoError(t, q.Publish())
	require.NoError(t, q.Kick())
}

// TestRingIsCutUnderRequest: the memory of the ring is cut short while a request is under way, so
// that what faults is its way back.
func TestRingIsCutUnderRequest(t *testing.T) {
	far := disktest.NewDistant(disktest.NewMemory(diskSize))
	v := serve(t, far)
	d := v.dial(t, vhosttest.Options{Regions: []vhosttest.RegionOptions{
		{Addr: 1 << 30, Size: 8 << 20, Unsealed: true}, {Addr: 1 << 32, Size: 8 << 20}}})
	far.Cut()
	byHand(t, d, d.Memory.Regions()[1])
	testtool.Eventually(t, func() bool { return far.Waiting() == 1 })
	require.NoError(t, d.Memory.Regions()[0].Truncate(0))
	far.Restore()
	v.ends(t, d.Conn(), errFault.Error())
}
