package plane

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// logged returns how often the program of a test has run.
func logged(p *Plane) int {
	log, _ := os.ReadFile(p.path("sh.log")) // it may not be there yet
	return bytes.Count(log, []byte("here"))
}

// TestRunAgain: a binary that has ended is started again, until it is killed.
func TestRunAgain(t *testing.T) {
	p := &Plane{Dir: t.TempDir(), Bin: "/bin"}
	require.NoError(t, p.runAgain("sh", "-c", "echo here"))
	testtool.Eventually(t, func() bool { return logged(p) > 2 },
		"it has run three times: %d", func() any { return logged(p) })
	require.Empty(t, p.processes.ended())
	p.processes.kill()
	require.Empty(t, p.processes.all)

	require.NoError(t, p.run("sh", "-c", "echo once"))
	testtool.Eventually(t, func() bool { return p.processes.ended() == "sh" }, "it has ended")
	p.processes.kill()
	require.ErrorIs(t, p.runAgain("no-such-program"), os.ErrNotExist)
}

// TestRestart: a binary is started again when that is requested.
func TestRestart(t *testing.T) {
	p := &Plane{Dir: t.TempDir(), Bin: "/bin"}
	require.NoError(t, p.run("sh", "-c", "echo here; exec sleep 600"))
	for n := 1; n < 4; n++ {
		testtool.Eventually(t, func() bool { return logged(p) == n },
			"it has run %d times: %d", n, func() any { return logged(p) })
		require.NoError(t, p.restart("sh"))
		require.Empty(t, p.processes.ended())
	}
	p.processes.kill()

	require.NoError(t, p.run("sh", "-c", "exit 1"))
	testtool.Eventually(t, func() bool { return p.processes.ended() == "sh" }, "it has ended")
	require.ErrorContains(t, p.restart("sh"), "sh has ended")
	p.processes.kill()
}
