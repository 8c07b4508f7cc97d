package rawfile_test

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/internal/rawfile"
)

func TestFileUsage(t *testing.T) {
	const size = 64 << 20
	d, err := rawfile.Open(sparseFile(t, size), rawfile.Options{Durable: true})
	require.NoError(t, err)
	before, err := d.Usage()
	require.NoError(t, err)
	require.Less(t, before.Used, int64(1<<20), "a hole takes nothing")
	require.Positive(t, before.Available)

	_, err = d.WriteAt(t.Context(), bytes.Repeat([]byte{7}, 16<<20), 0)
	require.NoError(t, err)
	require.NoError(t, d.Flush(), "this ends delayed allocation")
	after, err := d.Usage()
	require.NoError(t, err)
	require.GreaterOrEqual(t, after.Used, before.Used+16<<20)
	require.Less(t, after.Used, int64(size/2))

	require.NoError(t, d.Discard(t.Context(), 0, 16<<20))
	freed, err := d.Usage()
	require.NoError(t, err)
	require.Less(t, freed.Used, after.Used)

	require.NoError(t, d.Close())
	_, err = d.Usage()
	require.ErrorContains(t, err, "disk.raw", "the error names the disk")
}

// TestUsageWhileClosed: the daemon asks for the usage of a disk that it may be closing. The race
// detector looks on.
func TestUsageWhileClosed(t *testing.T) {
	path := sparseFile(t, 1<<20)
	for range 50 {
		d, err := rawfile.Open(path, rawfile.Options{Durable: true})
		require.NoError(t, err)
		asked := make(chan error)
		go func() {
			_, err := d.Usage()
			asked <- err
		}()
		require.NoError(t, d.Close())
		if err := <-asked; err != nil {
			require.ErrorContains(t, err, "closed file")
		}
	}
}
