package options

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

func TestUsageTypesAreKnownByName(t *testing.T) {
	types := UsageTypes{"slow": "/storage/rust", "fast": "/storage/ssd"}
	dir, err := types.Dir("fast")
	require.NoError(t, err)
	require.Equal(t, "/storage/ssd", dir)
	_, err = types.Dir("medium")
	require.EqualError(t, err, `usage type "medium" is unknown: use one of fast, slow`)
	require.ErrorContains(t, testtool.Err(UsageTypes{}.Dir("")), "there are none")
}

// TestHookAddress: each hook sidecar has its own, the same in every pod, and a plugin has none.
func TestHookAddress(t *testing.T) {
	for container, want := range map[string]string{"hook-sidecar-0": "127.107.0.1:10809",
		"hook-sidecar-254": "127.107.0.255:10809", "hook-sidecar-255": "", "hook-sidecar-": "",
		"hook-sidecar-x": "", "disks": "", "": ""} {
		a, ok := (&Hook{Container: container}).Address()
		require.Equal(t, want != "", ok, container)
		if ok {
			require.Equal(t, want, a.String())
			require.True(t, a.Loopback())
		}
	}
	_, ok := (&Hook{Container: "hook-sidecar-0", Plugin: true}).Address()
	require.False(t, ok)
}
