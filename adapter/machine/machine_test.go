package machine

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseExited(t *testing.T) {
	status, ok := ParseExited("exited 137\n")
	require.True(t, ok)
	require.Equal(t, 137, status)
	for _, line := range []string{"", "exited", "exited x", "exited -1", "exited 256", "running"} {
		_, ok := ParseExited(line)
		require.False(t, ok, line)
	}
}

func TestKernelArgs(t *testing.T) {
	require.Equal(t, "console=ttyS0 no_timer_check quiet panic=-1 kubevirt.serial=container",
		KernelArgs("amd64", DefaultSerial))
	require.Equal(t, "console=ttyAMA0 quiet panic=-1 kubevirt.serial=container",
		KernelArgs("arm64", DefaultSerial))
}
