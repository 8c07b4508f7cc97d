package overlay

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
)

// countedWays counts how chunks are written. The guest becomes active with the first write.
type countedWays struct {
	*filetest.SimFile
	guest             func()
	anyWay, throughIt int
}

func (w *countedWays) Write(p []byte, off int64) error {
	w.anyWay++
	w.guest()
	_, err := w.WriteAt(context.Background(), p, off)
	return err
}

func (w *countedWays) WriteThrough(p []byte, off int64) error {
	w.throughIt++
	_, err := w.WriteAt(context.Background(), p, off)
	return err
}

// TestGuestThatComesBackWaitsForOneWrite: a guest may come while a chunk of many runs is written,
// and wait for a block of it. The rest of the chunk goes through the page cache.
func TestGuestThatComesBackWaitsForOneWrite(t *testing.T) {
	d := newSimDisk(t, 1, Options{})
	out := &countedWays{SimFile: d.file, guest: d.over.watch.touch}
	// with holes, and so with many runs
	d.hydrate.chunk = simSize/minGranule*minGranule + minGranule
	d.hydrate.out = out
	first, last, ok := d.hydrate.next(t.Context())
	require.True(t, ok)
	content := d.image.Content[first*minGranule:]
	require.NoError(t, d.hydrate.keep(content[:min(int64(len(content)), (last+1-first)*minGranule)],
		first*minGranule))
	require.Equal(t, 1, out.anyWay, "the others go through the cache")
	require.Positive(t, out.throughIt)
	require.Zero(t, d.over.blocks.clear.Load())
}
