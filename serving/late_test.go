package serving

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/rangelock"
	"kubevirt.io/disk/internal/testtool"
)

// TestWhoWaitsForStorage: a reader does, in the order of the requests. The goroutine does if there
// are many, if storage takes long, while a reader waits that may lose its role, and if the peer
// always has something else for the reader.
func TestWhoWaitsForStorage(t *testing.T) {
	s, _ := oneDisk(t, nil)
	began, end, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	var l *Late[int]
	l = NewLate[int](s, new(Conn), 2, func(*Turn) {
		for ok := true; ok; {
			began <- struct{}{}
			<-end
			_, ok = l.Next()
		}
		ended <- struct{}{}
	}, func() {})
	defer l.Close()
	next := 0
	reader, goroutine := &Turn{Reading: true}, &Turn{Reading: true, Late: true}
	postpone := func() {
		l.Postpone(reader, next)
		next++
	}
	takes := func(want bool) {
		t.Helper()
		request, ok := l.Take()
		require.Equal(t, want, ok)
		if ok {
			require.Equal(t, next-1-l.Waiting(), request)
		}
	}
	runs := func(requests int) { // the goroutine does
		t.Helper()
		for range requests + 1 {
			testtool.Await(t, began)
			require.False(t, l.alone())
			takes(false)
			end <- struct{}{}
		}
		<-ended
	}
	quick := func() {
		for range slowReads {
			l.Waits(goroutine)
			l.Blocked(goroutine, quickRead-1)
		}
	}

	takes(false)
	postpone()
	postpone()
	require.True(t, l.alone())
	takes(true)
	takes(true)
	for range 3 {
		postpone()
	}
	runs(3)
	postpone()
	postpone()
	takes(true)
	l.Waits(reader)
	takes(false)
	runs(1)
	l.Blocked(reader, quickRead-1)
	postpone()
	takes(true)
	l.Waits(reader)
	l.Blocked(reader, quickRead)
	postpone()
	runs(1)
	quick()
	postpone()
	takes(true)
	l.Blocked(goroutine, quickRead)
	postpone()
	runs(1)
	quick()
	postpone()
	l.Waits(reader)
	reader.Reading = false // the watchdog has replaced it
	l.Blocked(reader, 0)
	takes(false)
	runs(1)
	quick()
	postpone()
	runs(1) // the reader that has replaced it may wait for the peer already
	reader.Reading = true
	postpone()
	l.Start()
	runs(1)
	postpone()
	for range maxOvertaken {
		require.True(t, l.alone())
		always := func() (bool, error) { return true, nil }
		require.NoError(t, l.Await(reader, always, func(int) error { return errors.New("late") }))
	}
	runs(1)
}

// sending is an Executor that sends answers before it waits for storage.
type sending struct {
	Executor
	begun, taken chan struct{}
}

func (s *sending) Blocks() error {
	s.begun <- struct{}{}
	<-s.taken
	return ErrAborted
}

// TestChangesDoNotWaitForAnswers: an atomic change by one peer does not wait until another takes
// its answers.
func TestChangesDoNotWaitForAnswers(t *testing.T) {
	s := New(Config{})
	storage := disktest.NewStorage(disktest.NewMemory(1 << 20))
	require.NoError(t, s.Add(Options{Number: 1, Disk: storage, Access: AccessWriteShared,
		Identity: disk.Identity{Serial: "x", NAA: [8]byte{0x30}}}))
	peer := &sending{begun: make(chan struct{}), taken: make(chan struct{})}
	d, r := s.At(1), &Request{Executor: peer}
	ended := testtool.Go(func() error { return testtool.Err(r.Read(d, make([]byte, 512), 0)) })
	<-peer.begun
	var h rangelock.Hold
	h.Set(rangelock.Exclusive, "", 0, 512)
	require.NoError(t, d.Ranges.LockContext(disk.AtHand, &h))
	d.Ranges.Unlock(&h)
	close(peer.taken)
	require.ErrorIs(t, <-ended, ErrAborted)
}
