package disk

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRunWhileBlocksAreSet asks for the run of blocks around those that another goroutine is just setting. A run has at least the
// block that it begins at: a reader takes its length from it.
func TestRunWhileBlocksAreSet(t *testing.T) {
	const blocks = 4 * mapPageBlocks
	m := newBlockMap(blocks)
	var next atomic.Int64
	done := make(chan error, 1)
	go func() {
		for block := range int64(blocks) {
			next.Store(block)
			if err := m.set(block, block, nil); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for {
		first := next.Load()
		_, end := m.run(first, blocks-1)
		require.Greater(t, end, first)
		require.LessOrEqual(t, end, int64(blocks))
		select {
		case err := <-done:
			require.NoError(t, err)
			set, end := m.run(0, blocks-1)
			require.True(t, set)
			require.EqualValues(t, blocks, end)
			return
		default:
		}
	}
}
