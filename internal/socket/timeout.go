package socket

import (
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A peer whose machine has died sends nothing any more. With the kernel's defaults that is noticed
// after two and a half minutes while nothing is under way, and otherwise after a quarter of an
// hour.

// KeepAlive is for listeners: a connection without traffic ends 45 s after the last sign of life
// from the peer's machine.
var KeepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second,
	Interval: 10 * time.Second, Count: 3}

// Silent reports whether the peer's machine has acknowledged nothing for that long, although data
// was sent to it. SetUserTimeout is not for servers: it also ends the connection of a stopped peer,
// whose machine is alive and whose buffers are full. c is a TCP connection, or its Socket; for any
// other, and for a closed one, Silent returns false.
func Silent(c net.Conn, d time.Duration) (silent bool) {
	if _, ok := c.RemoteAddr().(*net.TCPAddr); !ok {
		return false
	}
	look(c, func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		silent = err == nil && unanswered(info) && millis(info.Last_ack_recv) >= d
	})
	return silent
}

// HungUp reports whether the peer has closed its side of a connection, even if earlier data was not
// read yet. It takes no data and does not wait; any goroutine may call it. For a connection without
// a descriptor, or a closed one, it returns false.
func HungUp(c net.Conn) (gone bool) {
	look(c, func(fd uintptr) {
		polled := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(polled, 0)
		gone = err == nil && n > 0
	})
	return gone
}

// look calls f with the descriptor of a connection, if it has one.
func look(c net.Conn, f func(fd uintptr)) {
	switch c := c.(type) {
	case *Socket:
		c.mu.RLock()
		defer c.mu.RUnlock()
		if c.fd >= 0 {
			f(uintptr(c.fd))
		}
	case syscall.Conn:
		if raw, err := c.SyscallConn(); err == nil {
			_ = raw.Control(f)
		}
	}
}

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

func millis(n uint32) time.Duration { return time.Duration(n) * time.Millisecond }

// unanswered reports whether data was sent again, or more than one probe of a full buffer, and
// nothing came back. One probe may be under way: the pauses between them grow to two minutes, so
// the last answer may be old. If a peer's buffer has become smaller, the kernel counts neither.
func unanswered(info *unix.TCPInfo) bool {
	shrunk := info.Unacked > 0 && millis(info.Last_data_sent) >= time.Second &&
		info.Last_ack_recv > info.Last_data_sent
	return info.Retransmits > 0 || info.Probes > 1 || shrunk
}
