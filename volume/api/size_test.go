package api

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSizeAdvice: a message about a size names one that a disk can have.
func TestSizeAdvice(t *testing.T) {
	for size, advice := range map[Size]string{1: "such as 512", 513: "such as 1024",
		-5: "such as 512", math.MaxInt64: "such as 9223372036854775296",
		math.MaxInt64 - 511: "", math.MaxInt64 - 600: "such as 9223372036854775296"} {
		err := size.check()
		if advice == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, advice)
	}
}
