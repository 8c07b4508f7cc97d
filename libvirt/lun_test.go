package libvirt

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/serving"
)

// TestHighestLUN: this package imports nothing of the server, but the LUNs are the server's.
func TestHighestLUN(t *testing.T) {
	require.Equal(t, serving.MaxNumber, MaxLUN)
}
