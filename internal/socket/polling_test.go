package socket

import (
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

func never() bool { return false }

// TestPollingPauses polls first in vain and then with success. The number of waits between two
// polls shows how often a reader polls.
func TestPollingPauses(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	p := newPolling(&PollLimit{})
	require.False(t, p.due(), "nobody has answered yet")
	between := func() (n int) {
		for !p.due() {
			n++
		}
		return n
	}
	for _, want := range []int{0, 1, 2, 4, 8, 16, 32, maxUnpolled, maxUnpolled} {
		require.Equal(t, want, between())
		require.False(t, p.look(never))
		p.limit.barred.Store(0) // by another thread of a busy machine
	}
	for _, want := range []int{maxUnpolled, 0, 0, 0, 0, 0, 0, 0} {
		require.Equal(t, want, between())
		require.True(t, p.look(func() bool { return true }))
	}
	require.Equal(t, 0, between())
	require.False(t, p.look(never))
	require.Equal(t, 1, between(), "success must count as much as failure")
	require.Zero(t, p.limit.looking.Load())
}

// TestPollingNeedsAProcessor checks that pollers leave one processor free for others, and that
// nobody polls if there is only one.
func TestPollingNeedsAProcessor(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for processors := 1; processors <= 3; processors++ {
		runtime.GOMAXPROCS(processors)
		var limit PollLimit
		p := make([]polling, processors)
		for i := range p {
			p[i].limit = &limit
		}
		looks := 0
		var nested func() bool
		nested = func() bool { // each polls while the ones before it do
			if looks++; looks < len(p) {
				p[looks].look(nested)
			}
			return true
		}
		require.Equal(t, processors > 1, p[0].look(nested))
		require.Equal(t, processors-1, looks)
		require.Zero(t, limit.looking.Load())
	}
}

// TestPollingAlone has two readers with work. A reader does not poll if the other one has waited
// since.
func TestPollingAlone(t *testing.T) {
	var limit PollLimit
	a, b := newPolling(&limit), newPolling(&limit)
	for range 3 {
		require.False(t, a.due())
		require.False(t, b.due())
	}
	require.True(t, b.due())
	require.True(t, b.due())
	require.False(t, a.due())
	require.True(t, a.due())
}

// TestPollingIsInterrupted interrupts a poll. Then nobody polls for a while.
func TestPollingIsInterrupted(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	var limit PollLimit
	p, other := newPolling(&limit), newPolling(&limit)
	looks, begin := 0, time.Now()
	found := p.look(func() bool {
		looks++
		time.Sleep(2 * pollInterrupted)
		return false
	})
	require.False(t, found)
	require.Equal(t, 1, looks)
	until := time.Unix(0, limit.barred.Load())
	require.Greater(t, until.Sub(begin), pollBarred)
	require.False(t, limit.enter(until.Add(-1)))
	require.True(t, limit.enter(until))
	limit.leave()
	limit.bar(time.Now().Add(time.Hour))
	require.False(t, other.look(func() bool { return true }))
	require.Zero(t, other.pause, "it has not polled in vain")
	require.Zero(t, limit.looking.Load())
}

// TestSocketLooksBeforeItWaits sends data while the reader polls, so nothing has to wake it.
// Another thread may take the processor meanwhile, so the test may need several attempts.
func TestSocketLooksBeforeItWaits(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	s, client := socketPair(t)
	buf := make([]byte, 16)
	read := func() {
		require.Equal(t, "data", string(buf[:testtool.Must(s.Readv(buf, nil, true))(t)]))
	}
	looks := func() (found bool) {
		var once sync.Once
		comes := func() { once.Do(func() { _, _ = client.Write([]byte("data")) }) }
		n := 0
		s.polling = newPolling(&PollLimit{})
		s.polling.due()
		s.in.try = func() bool {
			if n++; n == 3 {
				comes()
			}
			return s.readOnce()
		}
		late := time.AfterFunc(20*time.Millisecond, comes)
		defer late.Stop()
		read()
		return n >= 3 && !s.in.armed
	}
	for _, before := range []string{"nothing", "a wait"} {
		attempts := 0
		for found := false; !found; attempts++ {
			require.Less(t, attempts, 1000)
			if before == "a wait" { // the data must not end a wait once more
				s.polling = newPolling(&PollLimit{})
				time.AfterFunc(time.Millisecond, func() { _, _ = client.Write([]byte("data")) })
				read()
				if !s.in.armed {
					continue // it came at once
				}
			}
			found = looks()
		}
	}
}
