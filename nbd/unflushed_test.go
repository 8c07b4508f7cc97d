package nbd

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// fill takes all room for writes under way.
func fill(t *testing.T, u *unflushed) {
	t.Helper()
	for u.reserve(disk.AtHand, u.largest()) == nil {
	}
}

// TestRoomForTheLastWrites: all room is taken by writes under way when the last ones ask for some,
// and no further call comes. They get it when those under way are acknowledged.
func TestRoomForTheLastWrites(t *testing.T) {
	var flushes atomic.Int32
	u := newUnflushed(maxUnflushed, func() { flushes.Add(1) })
	fill(t, u)
	before := flushes.Load()
	got := testtool.Go(func() error { return u.reserve(t.Context(), u.largest()) })
	testtool.Eventually(t, func() bool { return flushes.Load() > before }) // it waits
	require.False(t, u.wanted(), "nothing is acknowledged that a flush could free")
	before = flushes.Load()
	c := newCall(cmdWrite, 0, 0, uint64(u.largest()), make([]byte, u.largest()))
	u.add(c)
	require.Equal(t, before+1, flushes.Load())
	require.True(t, u.wanted())
	u.drop(u.mark())
	require.NoError(t, <-got)
	require.False(t, u.wanted())
	before = flushes.Load()
	u.add(c)
	require.Equal(t, before, flushes.Load(), "nobody waits")
}

// TestRoomOfAFailedDisk: who waits for room is told that the disk has failed.
func TestRoomOfAFailedDisk(t *testing.T) {
	u := newUnflushed(maxUnflushed, func() {})
	fill(t, u)
	got := testtool.Go(func() error { return u.reserve(t.Context(), u.largest()) })
	u.fail()
	require.ErrorIs(t, <-got, disk.ErrFailed)
	require.ErrorIs(t, u.reserve(t.Context(), 0), disk.ErrFailed)
}

// TestFlushWhileStorageIsFull: the server has no room for a flush. Nothing is lost, so the disk
// goes on: the guest may try again, and a write that needs room waits.
func TestFlushWhileStorageIsFull(t *testing.T) {
	v := serve(t, 1, nil)
	r := openRemote(t, RemoteOptions{Address: serving.SocketPrefix + v.socket, Keep: 64 << 10})
	full := disktest.Rule{Op: disktest.OpFlush, Err: disk.ErrNoSpace, Times: 1}
	v.disks[0].Inject(full)
	require.NoError(t, write(r, 0, 1))
	require.ErrorIs(t, r.Flush(), disk.ErrNoSpace)
	require.NoError(t, r.Flush())
	full.Times = 4
	v.disks[0].Inject(full)
	for i := range int64(64) {
		require.NoError(t, write(r, i*4096, 2))
	}
}
