package nbd

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

// TestTroubleIsRecorded: people see why a client's writes fail. What breaks the protocol is no
// trouble of the disk.
func TestTroubleIsRecorded(t *testing.T) {
	v := serve(t, 1, nil)
	d := v.Server.disks.At(1)
	c := v.open(t, "disk1.raw", structured)
	require.NotZero(t, c.do(cmdRead, 0, diskSize, 4096, nil).code)
	require.Empty(t, d.Troubles(time.Now()))
	remove := v.disks[0].Inject(disktest.Rule{Op: disktest.OpWrite, Err: disk.ErrNoSpace})
	require.NotZero(t, c.do(cmdWrite, 0, 0, 4096, make([]byte, 4096)).code)
	remove()
	all := d.Troubles(time.Now())
	require.Len(t, all, 1)
	require.Equal(t, status.TroubleNoSpace, all[0].Kind)
	require.EqualValues(t, 1, all[0].Count)
}

// TestClientThatGoesIsNoTrouble: a client that has taken none of its answers and goes says nothing
// about the disk, however it reads.
func TestClientThatGoesIsNoTrouble(t *testing.T) {
	for _, flags := range []uint16{0, cmdFlagDF} {
		v := serve(t, 1, nil)
		d := v.Server.disks.At(1)
		c := v.open(t, "disk1.raw", structured)
		c.writeAt(0, bytes.Repeat([]byte{1}, diskSize))
		for range 64 {
			c.send(c.request(cmdRead, flags, 0, diskSize/2, nil))
		}
		conns := func(stuck bool) int {
			return len(v.conns.All(func(c *conn) bool {
				return !stuck || c.tx.WriteSince.Load() != 0
			}))
		}
		testtool.Eventually(t, func() bool { return conns(true) == 1 }, "it takes nothing")
		require.NoError(t, c.Close())
		testtool.Eventually(t, func() bool { return conns(false) == 0 }, "it is gone")
		require.Empty(t, d.Troubles(time.Now()))
	}
}
