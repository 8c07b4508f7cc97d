package plane

import (
	"bytes"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRunAgain: a binary that has ended is started again, until it is killed.
func TestRunAgain(t *testing.T) {
	p := &Plane{Dir: t.TempDir(), Bin: "/bin"}
	require.NoError(t, p.runAgain("sh", "-c", "echo here"))
	require.Eventually(t, func() bool {
		log, err := os.ReadFile(p.path("sh.log"))
		return err == nil && bytes.Count(log, []byte("here")) > 2
	}, time.Minute, time.Millisecond)
	require.Empty(t, p.processes.ended())
	p.processes.kill()
	require.Empty(t, p.processes.all)

	require.NoError(t, p.run("sh", "-c", "echo once"))
	require.Eventually(t, func() bool { return p.processes.ended() == "sh" }, time.Minute,
		time.Millisecond)
	p.processes.kill()
	require.ErrorIs(t, p.runAgain("no-such-program"), os.ErrNotExist)
}

// TestRestart: a binary is started again when that is requested.
func TestRestart(t *testing.T) {
	p := &Plane{Dir: t.TempDir(), Bin: "/bin"}
	require.NoError(t, p.run("sh", "-c", "echo here; exec sleep 600"))
	for n := 1; n < 4; n++ {
		require.Eventually(t, func() bool {
			log, err := os.ReadFile(p.path("sh.log"))
			return err == nil && bytes.Count(log, []byte("here")) == n
		}, time.Minute, time.Millisecond)
		require.NoError(t, p.restart("sh"))
		require.Empty(t, p.processes.ended())
	}
	p.processes.kill()

	require.NoError(t, p.run("sh", "-c", "exit 1"))
	require.Eventually(t, func() bool { return p.processes.ended() == "sh" }, time.Minute,
		time.Millisecond)
	require.ErrorContains(t, p.restart("sh"), "sh has ended")
	p.processes.kill()
}
