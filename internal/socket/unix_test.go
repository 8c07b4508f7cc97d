package socket

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestControlSocketOfTheNext checks that a daemon that has lost its socket does not remove the next
// daemon's socket when it stops.
func TestControlSocketOfTheNext(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	first, err := ListenUnix(path)
	require.NoError(t, err)
	require.NoError(t, os.Remove(path))
	second, err := ListenUnix(path)
	require.NoError(t, err)
	require.NoError(t, first.Close())
	require.FileExists(t, path)
	require.NoError(t, second.Close())
	require.NoFileExists(t, path)
}

// TestControlSocketOfDaemonsThatStartTogether starts several daemons on the socket of a killed one.
// One replaces it, and the others leave the new one alone.
func TestControlSocketOfDaemonsThatStartTogether(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	for range 50 {
		left, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		require.NoError(t, err)
		left.SetUnlinkOnClose(false)
		require.NoError(t, left.Close())
		var listeners [4]net.Listener
		var daemons sync.WaitGroup
		for i := range listeners {
			daemons.Go(func() {
				if l, err := ListenUnix(path); err == nil {
					listeners[i] = l
				}
			})
		}
		daemons.Wait()
		c, err := net.Dial("unix", path)
		require.NoError(t, err, "nobody listens")
		require.NoError(t, c.Close())
		made := 0
		for _, l := range listeners {
			if l != nil {
				made++
				require.NoError(t, l.Close())
			}
		}
		require.Equal(t, 1, made)
	}
}

// TestControlSocketOfABusyDaemon checks that a daemon that is too busy to accept keeps its socket.
func TestControlSocketOfABusyDaemon(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, unix.Bind(fd, &unix.SockaddrUnix{Name: path}))
	require.NoError(t, unix.Listen(fd, 0))
	for err == nil { // until its queue is full
		var c net.Conn
		if c, err = net.Dial("unix", path); err == nil {
			defer c.Close()
		}
	}
	require.ErrorIs(t, err, unix.EAGAIN)
	_, err = ListenUnix(path)
	require.ErrorContains(t, err, "another daemon uses it")
	require.FileExists(t, path)
}

// TestControlSocketInTheWay checks that a killed daemon's socket is replaced, and nothing else.
func TestControlSocketInTheWay(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	_, err = ListenUnix(path)
	require.ErrorContains(t, err, "another daemon uses it")
	left.SetUnlinkOnClose(false)
	require.NoError(t, left.Close())
	l, err := ListenUnix(path)
	require.NoError(t, err)
	require.NoError(t, l.Close())
	require.NoFileExists(t, path)

	require.NoError(t, os.WriteFile(path, []byte("precious"), 0o600))
	_, err = ListenUnix(path)
	require.ErrorContains(t, err, "not a socket")
	require.FileExists(t, path)
}

// TestControlSocketThatBecomesALink checks that a link in place of the socket does not let anybody
// change the mode of another file.
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
	require.ErrorContains(t, err, "not a socket")
	_, err = restrict(d, "none")
	require.ErrorIs(t, err, os.ErrNotExist)
	info, err := os.Stat(victim)
	require.NoError(t, err)
	require.EqualValues(t, 0o644, info.Mode())
	made, err := restrict(d, "socket")
	require.NoError(t, err)
	info, err = os.Lstat(filepath.Join(dir, "socket"))
	require.NoError(t, err)
	require.True(t, os.SameFile(made, info))
	require.EqualValues(t, 0o600, info.Mode().Perm())
}

// TestCloseRemovesItsOwn: the number of the descriptor by which a socket was made is that of
// another directory when it is closed, with a socket of the same name.
func TestCloseRemovesItsOwn(t *testing.T) {
	l, err := ListenUnix(filepath.Join(t.TempDir(), "a.sock"))
	require.NoError(t, err)
	var fd int
	_, err = fmt.Sscanf(l.Addr().String(), "/proc/self/fd/%d/", &fd)
	require.NoError(t, err)
	other := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(other, "a.sock"), nil, 0o600))
	dir, err := os.Open(other)
	require.NoError(t, err)
	defer dir.Close()
	if int(dir.Fd()) != fd {
		require.NoError(t, unix.Dup3(int(dir.Fd()), fd, unix.O_CLOEXEC))
		defer unix.Close(fd)
	}
	require.NoError(t, l.Close())
	require.FileExists(t, filepath.Join(other, "a.sock"))
}

// TestListenAside: a socket that is seen answers, and one that does not is replaced.
func TestListenAside(t *testing.T) {
	dir := t.TempDir()
	path, aside := filepath.Join(dir, "a.sock"), filepath.Join(dir, "aside", "a.sock")
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	_, err = ListenUnixAside(path, aside)
	require.ErrorContains(t, err, "another daemon uses it")
	left.SetUnlinkOnClose(false)
	require.NoError(t, left.Close())
	l, err := ListenUnixAside(path, aside)
	require.NoError(t, err)
	require.NoFileExists(t, aside)
	c, err := DialUnix(t.Context(), path)
	require.NoError(t, err)
	require.NoError(t, c.Close())
	require.NoError(t, l.Close())
	require.NoFileExists(t, path)
}
