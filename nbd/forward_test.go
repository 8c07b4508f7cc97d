package nbd

import (
	"context"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// handOn serves the disk of a server to others, as a relay does.
func handOn(t testing.TB, r *Remote) *served {
	t.Helper()
	return serve(t, 1, func(o *serving.Options) { o.Disk = r })
}

// TestRelayHeals: the network between a relay and its server breaks in the middle of requests and
// replies, and no client sees it.
func TestRelayHeals(t *testing.T) {
	n := relay(t, serve(t, 1, nil))
	heals(t, n, handOn(t, n.remote(t)).remote(t, "disk1.raw"))
}

// TestRelayOfASlowClient: a client that does not take its replies holds up no other one.
func TestRelayOfASlowClient(t *testing.T) {
	far := handOn(t, fullServer(t).remote(t, "disk1.raw"))
	const size, requests = 256 << 10, 64
	slow, other := far.open(t, "", structured), far.open(t, "", structured)
	var all []byte
	for i := range uint64(requests) {
		all = append(all, slow.request(cmdRead, 0, i*size%diskSize, size, nil)...)
	}
	sent := testtool.Go(func() error { return testtool.Err(slow.Write(all)) })
	for range 100 {
		other.readAt(0, 4096)
		time.Sleep(time.Millisecond)
	}
	for range requests {
		require.NoError(t, testtool.Err(io.CopyN(io.Discard, slow.in, 20+8+size)))
	}
	require.NoError(t, <-sent)
	slow.readAt(0, 4096)
}

// TestRelayGivesUp: the server of a relay hangs. A client that has gone away with a read under way
// keeps nothing: neither memory nor the end of the relay.
func TestRelayGivesUp(t *testing.T) {
	v := serve(t, 1, nil)
	hang := make(chan struct{})
	v.disks[0].Inject(disktest.Rule{Op: disktest.OpRead, Block: hang})
	far := handOn(t, v.remote(t, "disk1.raw"))
	c := far.open(t, "", structured)
	require.NoError(t, testtool.Err(c.Write(c.request(cmdRead, 0, 0, 4096, nil))))
	testtool.Eventually(t, func() bool { return v.disks[0].Calls(disktest.OpRead) == 1 })
	require.NoError(t, c.Close())
	testtool.Eventually(t, func() bool { return len(far.Sessions()) == 0 })
	ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
	defer stop()
	require.NoError(t, far.Shutdown(ctx))
	close(hang)
}
