package disk

import (
	"bytes"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// killedImage and killedWork tell the test binary that it is the process to be killed, and what it is to expand.
const (
	killedImage = "KUBEVIRT_DISK_TEST_IMAGE"
	killedWork  = "KUBEVIRT_DISK_TEST_WORK"
)

// TestExpandUntilKilled is the process that TestKillWhileExpanding kills.
func TestExpandUntilKilled(t *testing.T) {
	if os.Getenv(killedImage) == "" {
		t.Skip("is run by TestKillWhileExpanding")
	}
	inst, err := Open(t.Context(), openImage(t, os.Getenv(killedImage)), OpenOptions{WorkDir: os.Getenv(killedWork)})
	require.NoError(t, err)
	require.NoError(t, inst.Close())
}

// Whenever a process is killed, a disk under its final name is complete, and the next start goes on without help.
func TestKillWhileExpanding(t *testing.T) {
	dir, work := t.TempDir(), t.TempDir()
	content := sample(24<<20, 1)
	path := put(t, dir, "disk.raw", content, 0)
	disk := filepath.Join(work, "disk.raw", diskName)
	for range 12 {
		child := exec.Command(os.Args[0], "-test.run=^TestExpandUntilKilled$")
		child.Env = append(os.Environ(), killedImage+"="+path, killedWork+"="+work)
		require.NoError(t, child.Start())
		time.Sleep(time.Duration(rand.IntN(60)) * time.Millisecond)
		child.Process.Kill()
		child.Wait() // it was killed or had finished, both are fine
		if got, err := os.ReadFile(disk); err == nil {
			require.True(t, bytes.Equal(content, got), "a partial disk under its final name")
			require.NoError(t, os.Remove(disk)) // so that the next round expands again
		}
	}
	inst, _ := start(t, path, OpenOptions{WorkDir: work})
	require.True(t, bytes.Equal(content, readAll(t, inst, inst.Size())))
	left, err := filepath.Glob(filepath.Join(work, "*", "*"+partialSuffix))
	require.NoError(t, err)
	require.Empty(t, left)
}
