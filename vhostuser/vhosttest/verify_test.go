package vhosttest

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestVerifier: a guest that verifies its data moves, and sees what somebody else has changed.
func TestVerifier(t *testing.T) {
	p := startPeer(t, ",num-queues=2")
	require.NoError(t, os.Truncate(p.raw, 0))
	require.NoError(t, os.Truncate(p.raw, diskSize))
	d := dial(t, p, Options{Queues: 2, QueueSize: 16})
	v := NewVerifier(d, VerifierOptions{Blocks: 100, Bytes: 2048, Depth: 8})
	require.NoError(t, v.Run(t.Context(), 300))
	require.EqualValues(t, 300, v.Done())
	require.NoError(t, d.Migrate(p.twin(t).socket, func() error {
		return v.Run(t.Context(), 300)
	}))
	require.NoError(t, v.Check())

	raw, err := os.OpenFile(p.raw, os.O_RDWR, 0)
	require.NoError(t, err)
	defer raw.Close()
	_, err = raw.WriteAt([]byte{1}, 2048*42+2047)
	require.NoError(t, err)
	require.ErrorContains(t, v.Check(), "block at 86016 has wrong data")
}
