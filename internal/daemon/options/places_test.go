package options

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestUsageTypesAreKnownByName(t *testing.T) {
	types := UsageTypes{"slow": "/storage/rust", "fast": "/storage/ssd"}
	dir, err := types.Dir("fast")
	require.NoError(t, err)
	require.Equal(t, "/storage/ssd", dir)
	_, err = types.Dir("medium")
	require.EqualError(t, err, `usage type "medium" is unknown: use one of fast, slow`)
	_, err = UsageTypes{}.Dir("")
	require.ErrorContains(t, err, "there are none")
}
