package socket

import (
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

// TestControlSocketOfTheNext checks that a daemon that has lost its socket does not remove the next
// daemon's socket when it stops.
func TestControlSocketOfTheNext(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	first := testtool.Must(ListenUnix(path))(t)
	require.NoError(t, os.Remove(path))
	second := testtool.Must(ListenUnix(path))(t)
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
		left := testtool.Must(net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}))(t)
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
		require.NoError(t, testtool.Must(net.Dial("unix", path))(t, "nobody listens").Close())
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
	require.ErrorContains(t, testtool.Err(ListenUnix(path)), "another daemon uses it")
	require.FileExists(t, path)
}

// TestControlSocketInTheWay checks that a killed daemon's socket is replaced, and nothing else.
func TestControlSocketInTheWay(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	left := testtool.Must(net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}))(t)
	require.ErrorContains(t, testtool.Err(ListenUnix(path)), "another daemon uses it")
	left.SetUnlinkOnClose(false)
	require.NoError(t, left.Close())
	require.NoError(t, testtool.Must(ListenUnix(path))(t).Close())
	require.NoFileExists(t, path)

	require.NoError(t, os.WriteFile(path, []byte("precious"), 0o600))
	require.ErrorContains(t, testtool.Err(ListenUnix(path)), "not a socket")
	require.FileExists(t, path)
}

// TestSocketWithALongName: a long path is no problem, but the file in it can be too long for the
// kernel, unless the whole path fits.
func TestSocketWithALongName(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 200))
	require.NoError(t, testtool.Must(ListenUnix(filepath.Join(dir, "s")))(t).Close())
	_, err := ListenUnix(filepath.Join(dir, strings.Repeat("s", 100)))
	require.ErrorContains(t, err, "the last part of the path has 100 bytes, and that of a socket")
	t.Chdir(dir)
	require.NoError(t, testtool.Must(ListenUnix(strings.Repeat("s", 100)))(t).Close())
}

// TestControlSocketThatBecomesALink checks that a link in place of the socket does not let anybody
// change the mode of another file.
func TestControlSocketThatBecomesALink(t *testing.T) {
	dir := t.TempDir()
	victim := filepath.Join(t.TempDir(), "victim")
	require.NoError(t, os.WriteFile(victim, nil, 0o644))
	require.NoError(t, os.Chmod(victim, 0o644))
	require.NoError(t, os.Symlink(victim, filepath.Join(dir, "link")))
	l := testtool.Must(net.Listen("unix", filepath.Join(dir, "socket")))(t)
	defer l.Close()
	d := testtool.Must(os.Open(dir))(t)
	defer d.Close()
	require.ErrorContains(t, testtool.Err(restrict(d, "link")), "not a socket")
	require.ErrorIs(t, testtool.Err(restrict(d, "none")), os.ErrNotExist)
	info := testtool.Must(os.Stat(victim))(t)
	require.EqualValues(t, 0o644, info.Mode())
	made := testtool.Must(restrict(d, "socket"))(t)
	info = testtool.Must(os.Lstat(filepath.Join(dir, "socket")))(t)
	require.True(t, os.SameFile(made, info))
	require.EqualValues(t, 0o600, info.Mode().Perm())
}

// TestCloseRemovesItsOwn: the number of the descriptor by which a socket was made is that of
// another directory when it is closed, with a socket of the same name.
func TestCloseRemovesItsOwn(t *testing.T) {
	l := testtool.Must(ListenUnix(filepath.Join(t.TempDir(), "a.sock")))(t)
	var fd int
	require.NoError(t, testtool.Err(fmt.Sscanf(l.Addr().String(), "/proc/self/fd/%d/", &fd)))
	other := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(other, "a.sock"), nil, 0o600))
	dir := testtool.Must(os.Open(other))(t)
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
	left := testtool.Must(net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}))(t)
	require.ErrorContains(t, testtool.Err(ListenUnixAside(path, aside)), "another daemon uses it")
	left.SetUnlinkOnClose(false)
	require.NoError(t, left.Close())
	l := testtool.Must(ListenUnixAside(path, aside))(t)
	require.NoFileExists(t, aside)
	require.NoError(t, testtool.Must(DialUnix(t.Context(), path))(t).Close())
	require.NoError(t, l.Close())
	require.NoFileExists(t, path)
}

// TestLocalUser: the kernel says who has connected.
func TestLocalUser(t *testing.T) {
	l := testtool.Must(net.Listen("tcp4", "127.107.0.1:0"))(t)
	defer l.Close()
	c := testtool.Must(net.Dial("tcp4", l.Addr().String()))(t)
	defer c.Close()
	from := testtool.Must(l.Accept())(t)
	defer from.Close()
	uid := testtool.Must(LocalUser(from))(t)
	require.EqualValues(t, os.Geteuid(), uid)

	require.NoError(t, c.(*net.TCPConn).CloseWrite())
	require.Error(t, testtool.Err(from.Read(make([]byte, 1))))
	require.Error(t, testtool.Err(LocalUser(from)), "it is about to go")
}

// TestLocalUserOfAnother is a client of another user, and one from elsewhere.
func TestLocalUserOfAnother(t *testing.T) {
	testtool.Needs(t, "root (to be another user)", os.Geteuid() == 0)
	l := testtool.Must(net.Listen("tcp4", "127.107.0.1:0"))(t)
	defer l.Close()
	host, port, _ := net.SplitHostPort(l.Addr().String())
	other := exec.Command("bash", "-c", "exec 3<>/dev/tcp/"+host+"/"+port+" && read -u 3")
	other.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 107, Gid: 107}}
	require.NoError(t, other.Start())
	from := testtool.Must(l.Accept())(t)
	require.EqualValues(t, 107, testtool.Must(LocalUser(from))(t))
	require.NoError(t, from.Close())
	_ = other.Wait()
}

// TestLocalUserElsewhere is about what has no entry in the table.
func TestLocalUserElsewhere(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	require.Error(t, testtool.Err(LocalUser(a)))

	l, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Skip("no IPv6")
	}
	defer l.Close()
	c := testtool.Must(net.Dial("tcp6", l.Addr().String()))(t)
	defer c.Close()
	_, err = LocalUser(c)
	require.ErrorContains(t, err, "IPv4")
	require.False(t, strings.Contains(err.Error(), "%!"))
}

// failsOnce is a listener that has no memory for the first connection.
type failsOnce struct {
	net.Listener
	failed atomic.Bool
}

func (l *failsOnce) Accept() (net.Conn, error) {
	if l.failed.CompareAndSwap(false, true) {
		return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", unix.ENOMEM)}
	}
	return l.Listener.Accept()
}

// TestServerOfHTTPLasts: an error of accept that passes does not end a server of net/http.
func TestServerOfHTTPLasts(t *testing.T) {
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	srv := &http.Server{Handler: http.NotFoundHandler(), ErrorLog: log.New(io.Discard, "", 0)}
	ended := testtool.Go(func() error { return srv.Serve(Lasting(&failsOnce{Listener: l})) })
	res := testtool.Must(http.Get("http://" + l.Addr().String()))(t)
	require.NoError(t, res.Body.Close())
	require.NoError(t, srv.Close())
	require.ErrorIs(t, testtool.Await(t, ended), http.ErrServerClosed)
}
