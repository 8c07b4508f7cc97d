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

// TestQueueIsBounded has one goroutine wait for a peer that does not read, while another one queues
// PDUs without data.
func TestQueueIsBounded(t *testing.T) {
	ours, theirs := net.Pipe()
	s, clock, pool := new(sender), new(atomic.Int64), &buffers{limit: 1 << 20}
	clock.Store(1)
	s.init(&plainWire{Conn: ours}, clock, new(window), pool)
	ping := func(release *buffer) {
		var data []byte
		if release != nil {
			data = release.b
		}
		s.send(&pdu.NOPIn{TaskTag: 1, TransferTag: pdu.ReservedTag, DataLen: len(data)}, snAdvance,
			data, release)
	}
	bytes := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.bytes
	}
	writer := make(chan error, 1)
	ping(pool.get(4096))
	go func() { writer <- s.flush() }()
	require.Eventually(t, func() bool { return s.writeSince.Load() != 0 }, 10*time.Second,
		time.Millisecond)

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
	require.Eventually(t, func() bool { return bytes() > maxQueued }, 10*time.Second,
		time.Millisecond)
	require.LessOrEqual(t, bytes(), maxQueued+2*pduCost+4096)
	require.Less(t, queued.Load(), int64(many))
	require.NoError(t, theirs.Close())
	require.Error(t, <-writer)
	require.Error(t, <-reader)
	s.close()
	require.Zero(t, pool.used.Load(), "the queue is given back")
	require.Zero(t, bytes())
}

// TestSlowPeerReads queues far more than a slow peer reads within the time limit. The limit
// restarts with each part.
func TestSlowPeerReads(t *testing.T) {
	const parts = 4
	ours, theirs := net.Pipe()
	s, clock, pool := new(sender), new(atomic.Int64), &buffers{limit: 8 << 20}
	s.init(&plainWire{Conn: ours}, clock, new(window), pool)
	for range parts {
		b := pool.get(maxQueued)
		s.send(&pdu.NOPIn{TaskTag: 1, TransferTag: pdu.ReservedTag, DataLen: len(b.b)}, snAdvance,
			b.b, b)
	}
	clock.Store(1)
	written := make(chan error, 1)
	go func() { written <- s.flush() }()
	for i := range int64(parts) {
		require.Eventually(t, func() bool { return s.writeSince.Load() == i+1 }, 10*time.Second,
			time.Millisecond)
		clock.Store(i + 2)
		_, err := io.ReadFull(theirs, make([]byte, pdu.HeaderLen+maxQueued))
		require.NoError(t, err)
	}
	require.NoError(t, <-written)
	require.Zero(t, s.writeSince.Load())
	s.close()
	require.Zero(t, pool.used.Load())
	require.NoError(t, theirs.Close())
	require.NoError(t, ours.Close())
}

// countingWire notes how many buffers each call writes.
type countingWire struct{ calls []int }

func (w *countingWire) readv(_, _ []byte, _ bool) (int, error) { return 0, io.EOF }
func (w *countingWire) trim()                                  {}
func (w *countingWire) ended() bool                            { return false }
func (w *countingWire) writev(data [][]byte) error {
	w.calls = append(w.calls, len(data))
	return nil
}

// TestAnswersOfABusyReader checks that a reader that always has work still sends its answers,
// several at a time, and sooner if the initiator waits for more of them. A goroutine that has lost
// the reading role sends its answer at once.
func TestAnswersOfABusyReader(t *testing.T) {
	for acks, each := range map[int64]int{0: flushAt / pduCost, 4 << 10: 15, 256 << 10: 4} {
		w, clock := new(countingWire), new(atomic.Int64)
		c := new(conn)
		c.tx.init(w, clock, new(window), &buffers{})
		run := &runner{reading: true}
		for range 3*each + 1 {
			run.queued = c.tx.respond(&pdu.SCSIResponse{}, acks, nil, nil)
			require.NoError(t, c.sent(run))
		}
		require.Equal(t, []int{each, each, each}, w.calls, "answers to writes of %d bytes", acks)
		run.reading = false
		require.NoError(t, c.sent(run))
		require.Equal(t, []int{each, each, each, 1}, w.calls)
	}
}
