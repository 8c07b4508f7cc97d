package nbd

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// TestRemoteOnce: a disk that is for one connection has failed when that breaks.
func TestRemoteOnce(t *testing.T) {
	n := relay(t, serve(t, 1, nil))
	r := openRemote(t, RemoteOptions{Address: serving.SocketPrefix + n.socket,
		Export: "disk1.raw", Once: true})
	require.NoError(t, testtool.Err(r.ReadAt(t.Context(), make([]byte, 512), 0)))
	n.cut()
	require.ErrorIs(t, testtool.Err(r.ReadAt(t.Context(), make([]byte, 512), 0)), disk.ErrFailed)
}

// sparse is a disk of which every other page is a hole.
type sparse struct {
	*disktest.Memory
	asked atomic.Int32
	gate  sync.RWMutex // nothing is told while it is locked
}

func (s *sparse) Extent(ctx context.Context, off, length int64) (disk.Extent, error) {
	s.asked.Add(1)
	s.gate.RLock()
	defer s.gate.RUnlock()
	return disk.Extent{Length: min(length, layerPage-off%layerPage),
		Data: off/layerPage%2 == 1}, nil
}

// TestRemoteExtents: a disk that is for one connection tells what it stores, and asks its server
// for many extents at once. One that others may write meanwhile tells nothing.
func TestRemoteExtents(t *testing.T) {
	s := &sparse{Memory: disktest.NewMemory(diskSize)}
	v := serve(t, 1, func(o *serving.Options) { o.Disk = s })
	n := relay(t, v)
	opt := RemoteOptions{Address: serving.SocketPrefix + n.socket}
	e := testtool.Must(openRemote(t, opt).Allocated(t.Context(), 512, diskSize-512))(t)
	require.Equal(t, disk.Extent{Length: diskSize - 512, Data: true}, e)
	require.Zero(t, s.asked.Load())

	opt.Once = true
	r := openRemote(t, opt)
	is := func(off, length int64, data bool, want int64) {
		t.Helper()
		e := testtool.Must(r.Allocated(t.Context(), off, length))(t)
		require.Equal(t, disk.Extent{Length: want, Data: data}, e)
	}
	for off := int64(0); off < diskSize; off += layerPage {
		is(off, diskSize-off, off/layerPage%2 == 1, layerPage)
	}
	require.Less(t, s.asked.Load(), int32(diskSize/layerPage*3/2), "one request for each extent")
	is(512, diskSize, false, layerPage-512) // back again
	is(layerPage+512, 512, true, 512)
	is(diskSize-512, 512, true, 512)

	s.gate.Lock()
	ctx, stop := context.WithCancel(t.Context())
	before, ended := s.asked.Load(), make(chan error)
	go func() {
		_, err := r.Allocated(ctx, 0, 512)
		ended <- err
	}()
	testtool.Eventually(t, func() bool { return s.asked.Load() > before })
	stop()
	require.ErrorIs(t, <-ended, disk.ErrNotNow)
	s.gate.Unlock()
	is(0, 512, false, 512)
	n.cut()
	require.ErrorIs(t, testtool.Err(r.Allocated(t.Context(), diskSize-512, 512)), disk.ErrFailed)
}
