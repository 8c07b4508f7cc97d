//go:build !race

package nbd // The race detector makes pools forget at random, and disktest.Run take long.

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
)

// TestNoAllocationPerRequest counts the allocations of the whole process, client and server, when
// it runs steadily. Only the garbage collector, which empties the pools, causes some.
func TestNoAllocationPerRequest(t *testing.T) {
	for _, c := range pipelineCases {
		t.Run(c.name, func(t *testing.T) {
			newPipeline(t, c.mode, c.command, c.flags, c.size).allocatesNothing(t)
		})
	}
}

func (p *pipeline) allocatesNothing(t *testing.T) {
	var failed error
	for range 20 {
		require.NoError(t, p.run())
	}
	// On a busy machine a call takes long now and then, and requests are passed on to new
	// goroutines.
	each := float64(pipelineDepth)
	for try := 0; try < 300 && each/pipelineDepth >= 0.05; try++ {
		p.wait()
		each = min(each, testing.AllocsPerRun(5, func() {
			if err := p.run(); err != nil {
				failed = err
			}
		}))
	}
	require.NoError(t, failed)
	require.Less(t, each/pipelineDepth, 0.05, "allocations per request")
}

// TestRelayAllocatesNothing: the way of a request through a relay, with that of its server and of
// its client.
func TestRelayAllocatesNothing(t *testing.T) {
	for _, command := range []uint16{cmdRead, cmdWrite} {
		far := handOn(t, fullServer(t).remote(t, "disk1.raw"))
		p := far.pipeline(t, structured, command, 0, 4<<10)
		for range 2 * maxUnflushed / (pipelineDepth * 4 << 10) { // what is kept grows until then
			require.NoError(t, p.run())
		}
		p.allocatesNothing(t)
	}
}

// TestRemoteIsADisk runs the tests of every disk on one that another server has.
func TestRemoteIsADisk(t *testing.T) {
	disktest.Run(t, func(t *testing.T) disk.Disk {
		v := serve(t, 1, nil)
		r := v.remote(t, "disk1.raw")
		require.Equal(t, "x", r.Identity().Serial)
		require.False(t, r.ReadOnly())
		return plain(t, r)
	})
}

// TestRelayIsADisk runs the tests of every disk on one behind a relay.
func TestRelayIsADisk(t *testing.T) {
	disktest.Run(t, func(t *testing.T) disk.Disk {
		return plain(t, handOn(t, serve(t, 1, nil).remote(t, "disk1.raw")).remote(t, "disk1.raw"))
	})
}
