package socket

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// SetUserTimeout ends a connection when the peer's machine has acknowledged nothing that was sent
// for that long (tcp(7), TCP_USER_TIMEOUT).
func SetUserTimeout(c *net.TCPConn, d time.Duration) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	if cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT,
			int(d.Milliseconds()))
	}); cerr != nil {
		return cerr
	}
	return err
}
