package slots

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

func TestStalledWorkerLosesItsSlot(t *testing.T) {
	// The other worker must not stall, however busy the machine is.
	s := New(1, Options{Stall: 500 * time.Millisecond})
	stalled := testtool.Must(s.Acquire(t.Context()))(t)
	other := testtool.Must(s.Acquire(t.Context()))(t)
	require.False(t, stalled.More())
	stalled.Release()
	require.Zero(t, s.Free(), "the watchdog gave the slot back already")
	other.Release()
	other.Release()
	require.Equal(t, 1, s.Free())
}

func TestDoEndsWithTheContext(t *testing.T) {
	s := New(1, Options{})
	held := s.TryAcquire()
	ctx, cancel := context.WithCancel(t.Context())
	ended := testtool.Go(func() error {
		return s.Do(ctx, func() error { t.Error("called without a slot"); return nil })
	})
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
	held.Release()
	require.ErrorIs(t, s.Do(ctx, func() error { t.Error("called after the end"); return nil }),
		context.Canceled)
	called := false
	require.NoError(t, s.Do(t.Context(),
		func() error { called = true; require.Zero(t, s.Free()); return nil }))
	require.True(t, called)
	require.Equal(t, 1, s.Free())
}

func TestBuffers(t *testing.T) {
	s := New(1, Options{Buffer: 1 << 20})
	slot := s.TryAcquire()
	require.Len(t, slot.Buffer(512), 512)
	require.LessOrEqual(t, cap(slot.Buffer(512)), 512, "a small buffer is no larger than asked for")
	large := slot.Buffer(1 << 20)
	require.Len(t, large, 1<<20)
	require.Same(t, &large[0], &slot.Buffer(4096)[0], "the worker's buffer is used again")
	slot.Release()
	require.Len(t, s.TryAcquire().Buffer(2<<20), 2<<20)
}
