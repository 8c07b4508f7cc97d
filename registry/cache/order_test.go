package cache

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestOrder: chunks are fetched once each, in the given order, and no more of them than a part of
// the cache holds.
func TestOrder(t *testing.T) {
	var mu sync.Mutex
	var got []int64
	f := &far{}
	f.fetch = func(_ context.Context, p []byte, off int64) error {
		mu.Lock()
		got = append(got, off/testChunk)
		mu.Unlock()
		fillContent(p, off)
		return nil
	}
	c := openCache(t, t.TempDir(), Options{Size: MinSize})
	b := openBlob(t, c, 4*MinSize, f)
	runs := [][2]int64{{900, 40}, {5, 2}, {900, 1}, {3, 1}}
	<-b.Order(runs)
	require.Len(t, got, 43)
	require.Equal(t, int64(900), runs[0][0], "it is the caller's")
	o := &order{runs: runs, left: 42}
	for i := range 42 {
		chunk, ok := o.next()
		require.True(t, ok)
		want := int64(900 + i)
		if i >= 40 {
			want = int64(5 + i - 40)
		}
		require.Equal(t, want, chunk)
	}
	_, ok := o.next()
	require.False(t, ok, "it may fetch no more")

	before := c.Stats().Fetched
	<-b.Order([][2]int64{{0, 4 * MinSize / testChunk}})
	require.LessOrEqual(t, c.Stats().Fetched-before, int64(MinSize/orderPart/testChunk))
}

// TestOrderGivesWay: while a reader waits, little of an order is fetched beside it, and the rest
// comes when the reader has what it wants.
func TestOrderGivesWay(t *testing.T) {
	const wanted = 500
	var mu sync.Mutex
	started := 0
	hold := make(chan struct{})
	f := &far{}
	f.fetch = func(ctx context.Context, p []byte, off int64) error {
		if off/testChunk == wanted {
			select {
			case <-hold:
			case <-ctx.Done():
				return ctx.Err()
			}
		} else {
			mu.Lock()
			started++
			mu.Unlock()
		}
		fillContent(p, off)
		return nil
	}
	c := openCache(t, t.TempDir(), Options{})
	b := openBlob(t, c, 1000*testChunk, f)
	read := testtool.Go(func() error {
		return testtool.Err(b.ReadAt(t.Context(), make([]byte, 1), wanted*testChunk))
	})
	testtool.Eventually(t, func() bool { return c.wanted.Load() == 1 })
	done := b.Order([][2]int64{{0, 300}})
	testtool.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return started > 0
	})
	close(hold)
	require.NoError(t, <-read)
	<-done
	require.Equal(t, int64(301), c.Stats().Fetched)
}
