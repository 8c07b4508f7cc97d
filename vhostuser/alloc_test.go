//go:build !race

package vhostuser

import (
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/vhostuser/vhosttest"
)

// TestNothingIsAllocated on the path of a request.
func TestNothingIsAllocated(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	d := v.dial(t, vhosttest.Options{})
	s, err := d.Queue(0).Stream(vhosttest.StreamOptions{Bytes: 4096, Depth: 8})
	require.NoError(t, err)
	defer s.Close()
	_, err = s.Run(50 * time.Millisecond)
	require.NoError(t, err)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	totals, err := s.Run(200 * time.Millisecond)
	require.NoError(t, err)
	runtime.ReadMemStats(&after)
	require.Less(t, float64(after.Mallocs-before.Mallocs), 0.05*float64(totals.Operations))
}
