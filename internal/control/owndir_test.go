package control

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

// shortDir is a directory whose path leaves room for a socket.
func shortDir(t *testing.T) string {
	t.Helper()
	dir := testtool.Must(os.MkdirTemp("/tmp", "kd-"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// TestPlaces: daemons are found until they end.
func TestPlaces(t *testing.T) {
	own := shortDir(t)
	t.Setenv("XDG_RUNTIME_DIR", own)
	t.Setenv("TMPDIR", shortDir(t))
	require.Empty(t, Sockets())
	one := testtool.Must(NewOwnDir())(t)
	two := testtool.Must(NewOwnDir())(t)
	require.ElementsMatch(t, []string{one.Socket(), two.Socket()}, Sockets())
	info := testtool.Must(os.Stat(filepath.Join(own, runtimeName)))(t)
	require.Equal(t, os.FileMode(0o700), info.Mode().Perm())
	require.NoError(t, one.Remove())
	require.Equal(t, []string{two.Socket()}, Sockets())
	require.NoError(t, two.Remove())
	require.Empty(t, Sockets())
	require.NoError(t, (*OwnDir)(nil).Remove())
}

// TestPlacesOfOthers: where somebody else could put another socket in the place of a daemon's, no
// daemon has one, and none is looked for.
func TestPlacesOfOthers(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, dir string){
		"for all": func(t *testing.T, dir string) {
			require.NoError(t, os.Mkdir(dir, 0o700))
			require.NoError(t, os.Chmod(dir, 0o777))
		},
		"a link": func(t *testing.T, dir string) {
			require.NoError(t, os.Symlink(t.TempDir(), dir))
		},
		"a file": func(t *testing.T, dir string) {
			require.NoError(t, os.WriteFile(dir, nil, 0o600))
		},
		"another user's": func(t *testing.T, dir string) {
			testtool.Needs(t, "root (to make another user's directory)", os.Geteuid() == 0)
			require.NoError(t, os.Mkdir(dir, 0o700))
			require.NoError(t, os.Chown(dir, 65534, 65534))
		},
		"replaceable": func(t *testing.T, dir string) {
			require.NoError(t, os.Chmod(filepath.Dir(dir), 0o777))
		},
		"too long": func(t *testing.T, dir string) {
			long := filepath.Join(dir, strings.Repeat("x", 60), strings.Repeat("y", 60))
			require.NoError(t, os.MkdirAll(long, 0o700))
			t.Setenv("XDG_RUNTIME_DIR", long)
		},
	} {
		t.Run(name, func(t *testing.T) {
			own, last := shortDir(t), shortDir(t)
			t.Setenv("XDG_RUNTIME_DIR", own)
			t.Setenv("TMPDIR", last)
			spoil(t, filepath.Join(own, runtimeName))
			p := testtool.Must(NewOwnDir())(t)
			require.True(t, strings.HasPrefix(p.Path, last), p.Path)
			require.Equal(t, []string{p.Socket()}, Sockets())
			require.NoError(t, p.Remove())
			require.NoError(t, os.Chmod(last, 0o777))
			require.ErrorContains(t, testtool.Err(NewOwnDir()), "set XDG_RUNTIME_DIR")
		})
	}
}

// TestStateBeforeBegin: while a daemon starts it tells its state, and does nothing else.
func TestStateBeforeBegin(t *testing.T) {
	s := New(func() status.Status { return status.Status{State: status.StateOpening} },
		zap.NewNop())
	defer s.Close()
	path := filepath.Join(shortDir(t), "control.sock")
	require.NoError(t, s.Listen(path))
	c := Client{Socket: path}
	now, pid := testtool.Must2(c.Status(t.Context()))(t)
	require.Equal(t, status.StateOpening, now.State)
	require.Equal(t, os.Getpid(), pid)
	require.ErrorContains(t, testtool.Err(c.Sessions(t.Context())), "is still starting")
	_, err := c.Handover(t.Context(), status.Handover{LUN: 1, Seconds: time.Minute.Seconds()})
	require.ErrorContains(t, err, "is still starting")
}
