//go:build !race

package target_test // The race detector makes pools forget at random.

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestNoAllocationPerCommand counts the allocations of the whole process, initiator and target,
// when it runs steadily. Only the garbage collector, which empties the pools, causes some: far less
// than one in a hundred commands.
func TestNoAllocationPerCommand(t *testing.T) {
	for _, c := range pipelineCases {
		t.Run(c.name, func(t *testing.T) {
			p := newPipeline(t, c.write, c.digests, c.size)
			var failed error
			for range 50 {
				require.NoError(t, p.run(c.digests))
			}
			// On a busy machine a call takes long now and then, and commands are passed on to new
			// goroutines.
			each := float64(pipelineDepth)
			for try := 0; try < 300 && each/pipelineDepth >= 0.05; try++ {
				each = min(each, testing.AllocsPerRun(5, func() {
					if err := p.run(c.digests); err != nil {
						failed = err
					}
				}))
			}
			require.NoError(t, failed)
			require.Less(t, each/pipelineDepth, 0.05, "allocations per command")
		})
	}
}
