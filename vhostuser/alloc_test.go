//go:build !race

package vhostuser

import (
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/vhostuser/vhosttest"
)

// TestNothingIsAllocated on the path of a request.
func TestNothingIsAllocated(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	d := v.dial(t, vhosttest.Options{})
	s := testtool.Must(d.Queue(0).Stream(vhosttest.StreamOptions{Bytes: 4096, Depth: 8}))(t)
	defer s.Close()
	require.NoError(t, testtool.Err(s.Run(50*time.Millisecond)))
	for length := 200 * time.Millisecond; ; length *= 2 { // Run allocates a few times
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		totals := testtool.Must(s.Run(length))(t)
		runtime.ReadMemStats(&after)
		if operations := float64(totals.Operations); operations > 2000 {
			require.Less(t, float64(after.Mallocs-before.Mallocs), 0.05*operations)
			return
		}
	}
}
