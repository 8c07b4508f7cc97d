package machine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

func TestKernelArgs(t *testing.T) {
	require.Equal(t, "console=ttyS0 no_timer_check quiet panic=-1 kubevirt.serial=container",
		KernelArgs("amd64", DefaultSerial))
	require.Equal(t, "console=ttyAMA0 quiet panic=-1 kubevirt.serial=container",
		KernelArgs("arm64", DefaultSerial))
}

func TestParseSignal(t *testing.T) {
	for text, want := range map[string]int{"": 15, "SIGQUIT": 3, "quit": 3, "9": 9,
		"SIGRTMIN+3": 37, "RTMIN": 34, "SIGRTMAX-1": 63} {
		require.Equal(t, want, int(testtool.Must(ParseSignal(text))(t)), text)
	}
	for _, text := range []string{"SIGNONE", "0", "65", "SIGRTMIN+40", "SIGRTMIN+x"} {
		require.ErrorContains(t, testtool.Err(ParseSignal(text)), text)
	}
}
