package pages

import (
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// work is the work of a LUN after this many seconds at 100 reads of 4 KiB and 10 writes of 1 MiB a
// second.
func work(lun uint16, seconds int) Work {
	n := uint64(seconds)
	return Work{LUN: lun, Image: "a", CopiedBytes: int64(n) << 20,
		Read: Commands{Count: 100 * n, Bytes: 100 * n << 12,
			Time: time.Duration(n) * 5 * time.Millisecond},
		Write: Commands{Count: 10 * n, Bytes: 10 * n << 20,
			Time: time.Duration(n) * 20 * time.Millisecond}}
}

func TestRates(t *testing.T) {
	var r rates
	now := time.Now()
	r.add(now, []Work{work(1, 5), {LUN: 2}})
	require.Zero(t, r.luns[1].now, "one look is no speed")
	for i := range 5 {
		now = now.Add(time.Second)
		r.add(now, []Work{work(1, 6+i), {LUN: 2}})
	}
	h := r.luns[1]
	require.Equal(t, speed{readOps: 100, writeOps: 10, readBytes: 100 << 12, writeBytes: 10 << 20,
		readTime: 50 * time.Microsecond, writeTime: 2 * time.Millisecond}, h.now)
	require.InEpsilon(t, 100, h.left(100<<20).Seconds(), .001)
	up, down, top := h.chart(r.next, func(p point) float32 { return p.readOps },
		func(p point) float32 { return p.writeOps })
	require.NotEmpty(t, up)
	require.NotEmpty(t, down)
	require.InEpsilon(t, 100, top, .001)
	require.Nil(t, r.luns[2].points, "nothing is kept of a LUN that nobody uses")
	require.Zero(t, r.luns[2].left(1))

	// The latency stays for a while, and the chart for two minutes.
	idle := work(1, 10)
	for range latencyFor {
		now = now.Add(time.Second)
		r.add(now, []Work{idle})
		require.NotZero(t, r.luns[1].now.readTime)
		require.Zero(t, r.luns[1].now.readOps)
	}
	require.NotContains(t, r.luns, uint16(2), "the LUN is gone")
	for range chartPoints {
		require.NotNil(t, r.luns[1].points)
		now = now.Add(time.Second)
		if r.add(now, []Work{idle}); r.luns[1].points == nil {
			break
		}
	}
	require.Nil(t, r.luns[1].points)
	require.Zero(t, r.luns[1].now.readTime)

	r.add(now.Add(time.Second/2), []Work{idle, work(3, 1)})
	require.InEpsilon(t, 200, r.luns[3].now.readOps, .001, "all of it is new")
	idle.Image = "b"
	r.add(now.Add(time.Second), []Work{idle})
	require.Zero(t, r.luns[1].now.readOps, "another disk at the same LUN")
	r.add(now.Add(2*time.Second), []Work{{LUN: 1, Image: "b"}})
	require.Zero(t, r.luns[1].now.readOps, "counters that began anew")
}

// TestRatesAreBounded measures the histories of as many LUNs as a target can have, all in use.
func TestRatesAreBounded(t *testing.T) {
	heap := func() int64 {
		runtime.GC()
		runtime.GC() // the second collection empties the pools
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	var r rates
	now := time.Now()
	for second := range 4 {
		all := make([]Work, 1<<14)
		for i := range all {
			all[i] = work(uint16(i), second)
		}
		now = now.Add(time.Second)
		r.add(now, all)
	}
	with := heap()
	require.Len(t, r.luns, 1<<14)
	r = rates{}
	// Memory of earlier tests was collected before both numbers were taken.
	used := with - heap()
	t.Logf("%d bytes", used)
	require.Greater(t, used, int64(1<<20))
	require.Less(t, used, int64(40<<20))
}
