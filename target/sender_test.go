package target

import (
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/target/internal/pdu"
)

// TestQueueIsBounded has one goroutine wait for a peer that does not read, and another one go on queueing PDUs without data.
func TestQueueIsBounded(t *testing.T) {
	ours, theirs := net.Pipe()
	s, clock, pool := new(sender), new(atomic.Int64), &buffers{limit: 1 << 20}
	clock.Store(1)
	s.init(ours, clock, new(window))
	ping := func(release *buffer) {
		var data []byte
		if release != nil {
			data = release.b
		}
		s.send(&pdu.NOPIn{TaskTag: 1, TransferTag: pdu.ReservedTag, DataLen: len(data)}, snAdvance, data, release)
	}
	bytes := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.bytes
	}
	writer := make(chan error, 1)
	ping(pool.get(4096))
	go func() { writer <- s.flush() }()
	require.Eventually(t, func() bool { return s.writeSince.Load() != 0 }, 10*time.Second, time.Millisecond)

	const many = 10 * maxQueued / pduCost
	var queued atomic.Int64
	reader := make(chan error, 1)
	go func() {
		for range many {
			ping(nil)
			queued.Add(1)
			if err := s.flush(); err != nil {
				reader <- err
				return
			}
		}
		reader <- nil
	}()
	require.Eventually(t, func() bool { return bytes() > maxQueued }, 10*time.Second, time.Millisecond)
	require.LessOrEqual(t, bytes(), maxQueued+2*pduCost+4096)
	require.Less(t, queued.Load(), int64(many))
	require.NoError(t, theirs.Close())
	require.Error(t, <-writer)
	require.Error(t, <-reader)
	require.Zero(t, pool.used.Load(), "what was queued is given back")
	require.Zero(t, bytes())
}

// TestSlowPeerReads queues far more than a slow peer reads within its time. Each part that it has read gives it time for the next one.
func TestSlowPeerReads(t *testing.T) {
	const parts = 4
	ours, theirs := net.Pipe()
	s, clock, pool := new(sender), new(atomic.Int64), &buffers{limit: 8 << 20}
	s.init(ours, clock, new(window))
	for range parts {
		b := pool.get(maxQueued)
		s.send(&pdu.NOPIn{TaskTag: 1, TransferTag: pdu.ReservedTag, DataLen: len(b.b)}, snAdvance, b.b, b)
	}
	clock.Store(1)
	written := make(chan error, 1)
	go func() { written <- s.flush() }()
	for i := range int64(parts) {
		require.Eventually(t, func() bool { return s.writeSince.Load() == i+1 }, 10*time.Second, time.Millisecond)
		clock.Store(i + 2)
		_, err := io.ReadFull(theirs, make([]byte, pdu.HeaderLen+maxQueued))
		require.NoError(t, err)
	}
	require.NoError(t, <-written)
	require.Zero(t, s.writeSince.Load())
	require.Zero(t, pool.used.Load())
	require.NoError(t, theirs.Close())
	require.NoError(t, ours.Close())
}
