package socket

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/flock"
)

// ListenUnix makes a Unix socket that only the daemon's own user and root can connect to, and its
// directory if that is missing. It replaces the socket of a killed daemon, but nothing else. The
// path may be longer than a socket address. Close removes the socket.
func ListenUnix(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	dir, short, err := shortPath(path)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	// Between bind and listen, a socket looks like one of a killed daemon.
	flock.WaitBriefly(dir)
	c, dialErr := net.Dial("unix", short)
	dialErr = named(dialErr, path)
	if dialErr == nil {
		_ = c.Close()
		return nil, fmt.Errorf("another daemon uses it: %w", unix.EADDRINUSE)
	}
	switch info, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case info.Mode()&fs.ModeSocket == 0:
		return nil, fmt.Errorf("%q exists and is not a socket", path)
	case !errors.Is(dialErr, unix.ECONNREFUSED):
		// The daemon is too busy to accept, or the socket belongs to another user and the kernel
		// does not tell whether it listens.
		return nil, fmt.Errorf("another daemon uses it, or has left it: %w", dialErr)
	default:
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	l, err := net.Listen("unix", short)
	if err != nil {
		return nil, named(err, path)
	}
	// Peer checks the user of a connection that was made before the mode is set.
	made, err := restrict(dir, filepath.Base(path))
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	// The name of the socket begins with /proc/self/fd/N. N will soon be another file, so the
	// listener must not remove the socket by that name.
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	return &listener{Listener: Lasting(l), path: path, made: made}, nil
}

// ListenUnixAside is ListenUnix for a directory in which others expect every socket to answer. The
// socket is made at another path of the file system, and gets its name when it listens. So only the
// socket of a killed daemon does not answer, and it is replaced.
func ListenUnixAside(path, aside string) (net.Listener, error) {
	if c, err := DialUnix(context.Background(), path); err == nil {
		_ = c.Close()
		return nil, fmt.Errorf("another daemon uses it: %w", unix.EADDRINUSE)
	}
	l, err := ListenUnix(aside)
	if err != nil {
		return nil, err
	}
	if err := os.Rename(aside, path); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	l.(*listener).path = path
	return l, nil
}

// restrict lets only the own user connect to a socket. If the socket was replaced, for example by a
// link to another file, that is an error, and the other file is not touched.
func restrict(dir *os.File, name string) (fs.FileInfo, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: filepath.Join(dir.Name(), name), Err: err}
	}
	socket := os.NewFile(uintptr(fd), filepath.Join(dir.Name(), name))
	defer socket.Close()
	info, err := socket.Stat()
	if err == nil && info.Mode()&fs.ModeSocket == 0 {
		err = fmt.Errorf("%s was replaced by something that is not a socket", socket.Name())
	}
	if err != nil {
		return nil, err
	}
	// fchmod does not work on an O_PATH descriptor.
	return info, os.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), 0o600)
}

// listener removes the socket when it is closed, unless the path has another daemon's socket by
// then.
type listener struct {
	net.Listener
	path string
	made fs.FileInfo
	once sync.Once // the next socket of the path may get the number of this file
}

func (l *listener) Close() (err error) {
	l.once.Do(func() {
		if there, statErr := os.Lstat(l.path); statErr == nil && os.SameFile(l.made, there) {
			_ = os.Remove(l.path) // first, so that nobody finds a socket that does not answer
		}
		err = l.Listener.Close()
	})
	return err
}

// Lasting returns the listener for servers of net/http. They end for ever after errors of accept
// such as ENOMEM, which pass.
func Lasting(l net.Listener) net.Listener { return lasting{l} }

type lasting struct{ net.Listener }

func (l lasting) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil && Passes(err) {
		err = passing{err}
	}
	return c, err
}

// passing is an error after which net/http accepts again, after a pause.
type passing struct{ error }

func (p passing) Unwrap() error { return p.error }
func (passing) Timeout() bool   { return false }
func (passing) Temporary() bool { return true }

// Passes reports whether an error of accept will pass: there are no descriptors or no memory, or
// the connection was closed before it was accepted (accept(2)).
func Passes(err error) bool {
	var errno unix.Errno
	if !errors.As(err, &errno) {
		var t interface{ Temporary() bool }
		return errors.As(err, &t) && t.Temporary()
	}
	switch errno {
	case unix.EBADF, unix.EINVAL, unix.ENOTSOCK, unix.EOPNOTSUPP, unix.EFAULT:
		return false
	}
	return true
}

// named puts the path that a person knows into an error with a socket's short path.
func named(err error, path string) error {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		op.Addr = &net.UnixAddr{Name: path, Net: "unix"}
	}
	return err
}

// MaxAddress is the longest path in a socket address, in bytes (unix(7)).
const MaxAddress = 107

// shortPath names a socket by its open directory, because of MaxAddress, unless its own path is the
// shorter one.
func shortPath(path string) (dir *os.File, short string, err error) {
	dir, err = os.OpenFile(filepath.Dir(path), os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, "", err
	}
	by := fmt.Sprintf("/proc/self/fd/%d", dir.Fd())
	if short = by + "/" + filepath.Base(path); len(short) > MaxAddress && len(path) <= MaxAddress {
		short = path
	}
	if len(short) > MaxAddress {
		err = fmt.Errorf("the last part of the path has %d bytes, and that of a socket %d at most",
			len(filepath.Base(path)), MaxAddress-len(by)-1)
	} else if _, statErr := os.Stat(by); statErr != nil {
		err = fmt.Errorf("a socket needs /proc, which is not mounted here: %w", statErr)
	}
	if err != nil {
		return nil, "", errors.Join(err, dir.Close())
	}
	return dir, short, nil
}

// DialUnix connects to a socket of ListenUnix.
func DialUnix(ctx context.Context, path string) (net.Conn, error) {
	dir, short, err := shortPath(path)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	c, err := new(net.Dialer).DialContext(ctx, "unix", short)
	return c, named(err, path)
}

// Peer returns the process at the other end of a Unix socket, or nil if the kernel does not know
// it. A process that is not visible in this container has PID 0.
func Peer(c net.Conn) (peer *unix.Ucred) {
	socket, ok := c.(*net.UnixConn)
	if !ok {
		return nil
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return nil
	}
	_ = raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err == nil {
			peer = cred
		}
	})
	return peer
}

// LocalUser returns the user who has made the other end of a connection by TCP and IPv4, from the
// kernel's table. It is an error if that end is not in this network namespace: the peer is
// elsewhere, or its packets only pass here, as those of a virtual machine do.
func LocalUser(c net.Conn) (uid uint32, err error) {
	ours, isTCP := c.LocalAddr().(*net.TCPAddr)
	theirs, _ := c.RemoteAddr().(*net.TCPAddr)
	if !isTCP || ours.IP.To4() == nil || theirs.IP.To4() == nil {
		return 0, fmt.Errorf("%s is not connected by TCP and IPv4", c.RemoteAddr())
	}
	// This file has all sockets of TCP by IPv4 in this network namespace: proc(5).
	table, err := os.ReadFile("/proc/self/net/tcp")
	if err != nil {
		return 0, err
	}
	// The peer's socket is listed from its side: its own address is first.
	ends := entry(theirs) + " " + entry(ours) + " "
	for line := range strings.Lines(string(table)) {
		_, socket, _ := strings.Cut(line, ": ")
		rest, found := strings.CutPrefix(socket, ends)
		if !found {
			continue
		}
		// A socket whose process has closed it has no user, and the table says 0.
		const state, user, established = 0, 4, "01"
		if f := strings.Fields(rest); len(f) > user && f[state] == established {
			n, err := strconv.ParseUint(f[user], 10, 32)
			return uint32(n), err
		}
	}
	return 0, errors.New("no process of this network namespace has the other end")
}

// entry is an address in the table's form: the four bytes as one number of this machine.
func entry(a *net.TCPAddr) string {
	return fmt.Sprintf("%08X:%04X", binary.NativeEndian.Uint32(a.IP.To4()), a.Port)
}
