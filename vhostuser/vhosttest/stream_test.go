package vhosttest

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestStream: all kinds of streams move data, and running one allocates nothing for a request.
func TestStream(t *testing.T) {
	p := startPeer(t, "")
	d := dial(t, p, Options{})
	for _, o := range []StreamOptions{
		{Bytes: 4096, Depth: 1},
		{Bytes: 4096, Depth: 32, Indirect: true},
		{Bytes: 256 << 10, Depth: 32, Sequential: true},
		{Bytes: 512, Depth: 42, Write: true, Span: 1 << 20},
	} {
		s, err := d.Queue(0).Stream(o)
		require.NoError(t, err)
		var done Totals
		allocations := testing.AllocsPerRun(1, func() { // which calls it twice
			if err == nil {
				done, err = s.Run(50 * time.Millisecond)
			}
		})
		require.NoError(t, err)
		require.NotZero(t, done.Operations)
		require.Less(t, allocations, 50.0, "of a run, not of a request")
		require.LessOrEqual(t, done.Latency.Quantile(0.5), done.Latency.Quantile(0.99))
		require.NotZero(t, done.Latency.Mean())
		require.NotZero(t, done.Kicks+done.Waits)
		s.Close()
		require.NoError(t, d.Read(0, 0, make([]byte, 4096)), "the queue is free for others")
	}
}

func TestLatencies(t *testing.T) {
	var l Latencies
	for i := range 1000 {
		l.add(time.Duration(i+1) * time.Microsecond)
	}
	require.Equal(t, 500500*time.Nanosecond, l.Mean())
	for _, share := range []float64{0.01, 0.5, 0.99} {
		require.InEpsilon(t, share*1e6, float64(l.Quantile(share)), 1.0/16)
	}
}
