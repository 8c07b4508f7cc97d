package target

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/target/internal/scsi"
)

// decompressing is a disk that must decompress reads below 1 MiB.
type decompressing struct{ *disktest.Memory }

func (decompressing) Slow(off int64) bool { return off < 1<<20 }

// TestSharedReads checks when a read that keeps a processor busy is passed on: if the reader has
// been busy with such reads for a while, and others wait or are passed on already. There is a
// limit, and a lone read is never passed on.
func TestSharedReads(t *testing.T) {
	d := decompressing{disktest.NewMemory(4 << 20)}
	server, err := New(Options{LUNs: []LUN{{Number: 1, Disk: d, Access: AccessWriteShared,
		Identity: disk.Identity{Serial: "x", NAA: [8]byte{0x30}}}}})
	require.NoError(t, err)
	device := server.device
	nexus := device.Attach(scsi.InitiatorPort{Name: "iqn.a"})
	prepared := func(cdb ...byte) *task {
		k := &task{}
		k.scsi.Nexus, k.scsi.LUN = nexus, 1<<48
		copy(k.scsi.CDB[:], cdb)
		for range 3 { // unit attentions come first
			if err = device.Prepare(&k.scsi); err == nil {
				return k
			}
		}
		require.NoError(t, err)
		return nil
	}
	slow, quick, write := prepared(0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0),
		prepared(0x28, 0, 0, 0, 0x08, 0, 0, 0, 8, 0), prepared(0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0)
	var l lunWatch
	srv := &Server{start: time.Now().Add(-time.Hour)}
	alone := &conn{srv: srv}
	require.False(t, alone.shares(&runner{}, slow, &l), "a wake-up would gain nothing")
	busy := &conn{srv: srv}
	busy.rx.w = 48
	require.False(t, busy.shares(&runner{}, quick, &l))
	require.False(t, busy.shares(&runner{}, write, &l))
	require.False(t, busy.shares(&runner{}, slow, &l), "before the first one nobody has waited")
	require.NotZero(t, busy.slowSince)
	require.NoError(t, busy.beforeWait())
	require.Zero(t, busy.slowSince, "nobody waits when the reader does")
	long := time.Hour - 2*shareAfter
	busy.slowSince, alone.slowSince = long, long
	run := &runner{}
	require.True(t, busy.shares(run, slow, &l))
	require.Same(t, &l, run.passed)
	require.True(t, alone.shares(&runner{}, slow, &l), "others are at work already")
	for l.passed.Load() < slowParallel {
		require.True(t, busy.shares(&runner{}, slow, &l))
	}
	require.False(t, busy.shares(&runner{}, slow, &l), "the limit is reached")
	require.EqualValues(t, slowParallel, l.passed.Load())
	busy.ended(run)
	require.EqualValues(t, slowParallel-1, l.passed.Load(),
		"when one has ended, there is room for another")
}
