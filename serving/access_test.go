package serving

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseAccessMode(t *testing.T) {
	for _, mode := range []AccessMode{AccessWriteExclusive, AccessWriteShared, AccessReadShared} {
		got, err := ParseAccessMode(string(mode))
		require.NoError(t, err)
		require.Equal(t, mode, got)
	}
	got, err := ParseAccessMode("")
	require.NoError(t, err)
	require.Equal(t, AccessWriteExclusive, got)
	_, err = ParseAccessMode("Write-Shared")
	require.ErrorContains(t, err, `"Write-Shared" is unknown; use write-exclusive`)
}
