package flock

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestOwnDir: directories of running processes are found until they end. What a killed one has left
// is removed, and nothing else.
func TestOwnDir(t *testing.T) {
	in, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer in.Close()
	other := filepath.Join(in.Name(), "mine")
	require.NoError(t, os.Mkdir(other, 0o700))
	killed, err := NewOwnDir(in, "own-")
	require.NoError(t, err)
	one, err := NewOwnDir(in, "own-")
	require.NoError(t, err)
	require.ElementsMatch(t, []string{killed.Path, one.Path}, OwnDirs(in, "own-"))
	require.NoError(t, killed.lock.Close()) // as the kernel does
	two, err := NewOwnDir(in, "own-")
	require.NoError(t, err)
	require.NoDirExists(t, killed.Path)
	require.ElementsMatch(t, []string{one.Path, two.Path}, OwnDirs(in, "own-"))
	require.NoError(t, one.Remove())
	require.NoError(t, two.Remove())
	require.Empty(t, OwnDirs(in, "own-"))
	require.DirExists(t, other)
	require.NoError(t, (*OwnDir)(nil).Remove())
}
