package nbd

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// busyDisk notes how many reads there were at once. They wait at the gate.
type busyDisk struct {
	disk.Disk
	gate             chan struct{}
	now, most, calls atomic.Int32
}

func (d *busyDisk) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	d.calls.Add(1)
	now := d.now.Add(1)
	defer d.now.Add(-1)
	for most := d.most.Load(); now > most && !d.most.CompareAndSwap(most, now); {
		most = d.most.Load()
	}
	<-d.gate
	return d.Disk.ReadAt(context.Background(), p, off)
}

// TestLongRequestsAreFew: a connection that floods the server with long requests has a few of them
// executed at once. Those of others are executed beside.
func TestLongRequestsAreFew(t *testing.T) {
	d := &busyDisk{Disk: disktest.NewMemory(2 * longRequest), gate: make(chan struct{})}
	opened := sync.OnceFunc(func() { close(d.gate) })
	v := serve(t, 1, func(o *serving.Options) { o.Disk, o.Access = d, serving.AccessWriteShared })
	t.Cleanup(opened)
	const flood, others = 100, 3
	c := v.open(t, "", extended)
	for range flood {
		c.send(c.request(cmdCache, 0, 0, 2*longRequest, nil))
	}
	testtool.Eventually(t, func() bool { return d.now.Load() >= maxLong+1 }, "a few are executed")
	other := v.open(t, "", structured)
	for range others { // each is executed beside the ones before when the watchdog has seen those
		other.send(other.request(cmdRead, 0, 0, 512, nil))
	}
	testtool.Eventually(t, func() bool { return d.now.Load() >= maxLong+1+others },
		"others are, too")
	opened()
	for range others {
		_, a := other.answer(func(uint64) (uint16, uint64) { return cmdRead, 512 })
		other.good(a)
	}
	for range flood {
		_, a := c.answer(func(uint64) (uint16, uint64) { return cmdCache, 0 })
		c.good(a)
	}
	require.LessOrEqual(t, d.most.Load(), int32(maxLong+1+others))
}

// TestClientThatLeavesLongRequests: of a client that is gone, nothing is executed any more, and it
// has no session, also when its reader executes one of its long requests.
func TestClientThatLeavesLongRequests(t *testing.T) {
	d := &busyDisk{Disk: disktest.NewMemory(2 * longRequest), gate: make(chan struct{})}
	v := serve(t, 1, func(o *serving.Options) { o.Disk, o.Access = d, serving.AccessWriteShared })
	opened := sync.OnceFunc(func() { close(d.gate) })
	t.Cleanup(opened)
	c := v.open(t, "", extended)
	for range 40 {
		c.send(c.request(cmdCache, 0, 0, 2*longRequest, nil))
	}
	testtool.Eventually(t, func() bool { return d.now.Load() >= maxLong+1 }, "a few are executed")
	v.conns.LookNow(time.Now())
	require.Len(t, v.Sessions(), 1, "it is still there")
	require.NoError(t, c.Close())
	v.conns.LookNow(time.Now())
	before := d.calls.Load()
	opened()
	testtool.Eventually(t, func() bool { return len(v.Sessions()) == 0 }, "it has gone")
	require.Equal(t, before, d.calls.Load(), "each that was begun ends at its next piece")
}
