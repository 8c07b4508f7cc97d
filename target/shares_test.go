package target

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/serving"
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
	disks := serving.New(serving.Config{})
	server, err := New(Options{Disks: disks})
	require.NoError(t, err)
	require.NoError(t, disks.Add(serving.Options{Number: 1, Disk: d,
		Access:   serving.AccessWriteShared,
		Identity: disk.Identity{Serial: "x", NAA: [8]byte{0x30}}}))
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
	l := disks.At(1)
	srv := &Server{pool: noMemory(), start: time.Now().Add(-time.Hour)}
	alone := &conn{srv: srv}
	require.False(t, alone.shares(slow, l), "a wake-up would gain nothing")
	busy := &conn{srv: srv}
	busy.rx.Open(nil)
	busy.rx.Push(make([]byte, 48))
	require.False(t, busy.shares(quick, l))
	require.False(t, busy.shares(write, l))
	require.False(t, busy.shares(slow, l), "before the first one nobody has waited")
	require.NotZero(t, busy.slowSince)
	require.NoError(t, busy.beforeWait())
	require.Zero(t, busy.slowSince, "nobody waits when the reader does")
	long := time.Hour - 2*shareAfter
	busy.slowSince, alone.slowSince = long, long
	require.True(t, busy.shares(slow, l))
	require.False(t, alone.shares(slow, l))
	require.True(t, new(serving.Turn).Share(l))
	require.True(t, alone.shares(slow, l), "others are at work already")
}
