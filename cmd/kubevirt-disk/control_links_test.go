package main

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A socket that was exchanged for a link before it could be restricted is no way to change the mode of another file.
func TestControlSocketThatBecomesALink(t *testing.T) {
	dir := t.TempDir()
	victim := filepath.Join(t.TempDir(), "victim")
	require.NoError(t, os.WriteFile(victim, nil, 0o644))
	require.NoError(t, os.Chmod(victim, 0o644))
	require.NoError(t, os.Symlink(victim, filepath.Join(dir, "link")))
	l, err := net.Listen("unix", filepath.Join(dir, "socket"))
	require.NoError(t, err)
	defer l.Close()
	d, err := os.Open(dir)
	require.NoError(t, err)
	defer d.Close()
	_, err = restrict(d, "link")
	require.ErrorContains(t, err, "no socket")
	_, err = restrict(d, "none")
	require.ErrorIs(t, err, os.ErrNotExist)
	info, err := os.Stat(victim)
	require.NoError(t, err)
	require.EqualValues(t, 0o644, info.Mode())
	made, err := restrict(d, "socket")
	require.NoError(t, err)
	require.True(t, inPlace(made, filepath.Join(dir, "socket")))
	info, err = os.Lstat(filepath.Join(dir, "socket"))
	require.NoError(t, err)
	require.EqualValues(t, 0o600, info.Mode().Perm())
}
