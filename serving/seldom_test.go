package serving

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
)

// TestSeldom has more kinds of lines than are remembered, at the same time, for three intervals: a
// bounded number is logged, each with how many there were meanwhile.
func TestSeldom(t *testing.T) {
	const every = 10 * time.Minute
	for name, kinds := range map[string]int{"many": 2 * maxKinds, "few": 3} {
		t.Run(name, func(t *testing.T) {
			l := NewSeldom[int](every)
			begin := time.Unix(1e9, 0)
			for round := range 3 {
				at := begin.Add(time.Duration(round) * every)
				logged, unlogged := 0, int64(0)
				for i := range 10 * maxKinds {
					suppressed, ok := l.Admit(i%kinds, at.Add(time.Duration(i)*time.Second/2))
					if ok {
						logged++
						unlogged += suppressed
					}
					require.LessOrEqual(t, len(l.last), maxKinds)
				}
				require.LessOrEqual(t, logged, maxKinds)
				require.NotZero(t, logged, "one that goes on is told of again")
				require.Equal(t, round > 0, unlogged > 0, "with how many there were meanwhile")
			}
		})
	}
	require.Empty(t, Unsaid(0))
	require.Equal(t, []zap.Field{zap.Int64("not_logged_since", 3)}, Unsaid(3))
}
