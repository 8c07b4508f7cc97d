package target

import (
	"io"
	"net"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/pdu"
)

// TestQueueIsBounded has one goroutine wait for a peer that does not read, while another one queues
// PDUs without data.
func TestQueueIsBounded(t *testing.T) {
	ours, theirs := net.Pipe()
	s, clock, pool := new(sender), new(atomic.Int64), memory.New(1<<20)
	clock.Store(1)
	s.init(&socket.Plain{Conn: ours}, clock, new(window), pool)
	ping := func(release *memory.Buffer) {
		var data []byte
		if release != nil {
			data = release.B
		}
		s.send(&pdu.NOPIn{TaskTag: 1, TransferTag: pdu.ReservedTag, DataLen: len(data)}, snAdvance,
			data, release)
	}
	bytes := s.Queued
	ping(pool.Get(4096))
	writer := testtool.Go(s.Flush)
	testtool.Eventually(t, func() bool { return s.WriteSince.Load() != 0 })

	const many = 10 * socket.MaxQueued / socket.MessageCost
	var queued atomic.Int64
	reader := testtool.Go(func() error {
		for range many {
			ping(nil)
			queued.Add(1)
			if err := s.Flush(); err != nil {
				return err
			}
		}
		return nil
	})
	testtool.Eventually(t, func() bool { return bytes() > socket.MaxQueued })
	require.LessOrEqual(t, bytes(), socket.MaxQueued+2*socket.MessageCost+4096)
	require.Less(t, queued.Load(), int64(many))
	require.NoError(t, theirs.Close())
	require.Error(t, <-writer)
	require.Error(t, <-reader)
	s.Close()
	require.Zero(t, pool.Used(), "the queue is given back")
	require.Zero(t, bytes())
}

// TestSlowPeerReads queues far more than a slow peer reads within the time limit. The limit
// restarts with each part.
func TestSlowPeerReads(t *testing.T) {
	const parts = 4
	ours, theirs := net.Pipe()
	s, clock, pool := new(sender), new(atomic.Int64), memory.New(8<<20)
	s.init(&socket.Plain{Conn: ours}, clock, new(window), pool)
	for range parts {
		b := pool.Get(socket.MaxQueued)
		s.send(&pdu.NOPIn{TaskTag: 1, TransferTag: pdu.ReservedTag, DataLen: len(b.B)}, snAdvance,
			b.B, b)
	}
	clock.Store(1)
	written := testtool.Go(s.Flush)
	for i := range int64(parts) {
		testtool.Eventually(t, func() bool { return s.WriteSince.Load() == i+1 })
		clock.Store(i + 2)
		_, err := io.ReadFull(theirs, make([]byte, pdu.HeaderLen+socket.MaxQueued))
		require.NoError(t, err)
	}
	require.NoError(t, <-written)
	require.Zero(t, s.WriteSince.Load())
	s.Close()
	require.Zero(t, pool.Used())
	require.NoError(t, theirs.Close())
	require.NoError(t, ours.Close())
}

// countingWire notes how many buffers each call writes.
type countingWire struct{ calls []int }

func (w *countingWire) Readv(_, _ []byte, _ bool) (int, error) { return 0, io.EOF }
func (w *countingWire) Trim()                                  {}
func (w *countingWire) Writev(data [][]byte) error {
	w.calls = append(w.calls, len(data))
	return nil
}

// TestAnswersOfABusyReader checks that a reader that always has work still sends its answers,
// several at a time, and sooner if the initiator waits for more of them, or if no other reader
// works. A goroutine that has lost the reading role sends its answer at once.
func TestAnswersOfABusyReader(t *testing.T) {
	for _, c := range []struct {
		working, acks int64
		each          int
	}{
		{1, 0, flushAlone / socket.MessageCost}, {1, 4 << 10, 15}, {1, 256 << 10, 4},
		{2, 0, flushBeside / socket.MessageCost}, {2, 4 << 10, 59}, {2, 256 << 10, 13},
	} {
		w, clock := new(countingWire), new(atomic.Int64)
		conn := &conn{srv: &Server{pool: noMemory()}}
		conn.srv.working.Store(c.working)
		conn.tx.init(w, clock, new(window), conn.srv.pool)
		run := &runner{Turn: &serving.Turn{Reading: true}}
		for range 3*c.each + 1 {
			run.queued = conn.tx.respond(&pdu.SCSIResponse{}, c.acks, nil, nil)
			require.NoError(t, conn.flushUnlessReader(run))
		}
		require.Equal(t, []int{c.each, c.each, c.each}, w.calls, "%+v", c)
		run.Reading = false
		require.NoError(t, conn.flushUnlessReader(run))
		require.Equal(t, []int{c.each, c.each, c.each, 1}, w.calls)
	}
}

// noticingWire has data for a reader that waits for it, and records how many readers work
// meanwhile.
type noticingWire struct {
	countingWire
	working  *atomic.Int64
	meantime int64
}

func (w *noticingWire) Readv(p, _ []byte, wait bool) (int, error) {
	if !wait {
		return 0, nil
	}
	w.meantime = w.working.Load()
	return len(p), nil
}

// TestWorkingReaders counts the readers that do not wait.
func TestWorkingReaders(t *testing.T) {
	var working, clock atomic.Int64
	w := &noticingWire{working: &working}
	nothing := func() error { return nil }
	rx := &receiver{}
	rx.BeforeWait, rx.BeforeMore = nothing, nothing
	rx.init(w, &clock)
	require.NoError(t, rx.Await())
	require.Zero(t, working.Load(), "before login")
	pool := memory.New(1 << 20)
	rx.grow(pool, &working)
	working.Add(3) // others
	for range 2 {
		require.NoError(t, rx.Discard(uint64(rx.Buffered())))
		require.NoError(t, rx.Await())
		require.EqualValues(t, 3, w.meantime)
		require.EqualValues(t, 4, working.Load())
	}
	for range 2 {
		rx.release()
		require.EqualValues(t, 3, working.Load())
	}
}

// noMemory is the memory of a server that allows none but what must be.
func noMemory() *memory.Pool { return memory.New(0) }
