package socket

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

// tcpPair returns both ends of a connection over loopback.
func tcpPair(t *testing.T) (server, client *net.TCPConn) {
	t.Helper()
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	dialled := testtool.Must(net.Dial("tcp", l.Addr().String()))(t)
	t.Cleanup(func() { _ = dialled.Close() })
	accepted := testtool.Must(l.Accept())(t)
	t.Cleanup(func() { _ = accepted.Close() })
	return accepted.(*net.TCPConn), dialled.(*net.TCPConn)
}

// socketPair is tcpPair with a socket at one end.
func socketPair(t *testing.T) (*Socket, *net.TCPConn) {
	t.Helper()
	server, client := tcpPair(t)
	s := testtool.Must(New(server, &PollLimit{}))(t)
	t.Cleanup(func() { _ = s.Close() })
	require.NoError(t, server.Close())
	return s, client
}

func send(t *testing.T, client *net.TCPConn) {
	t.Helper()
	require.NoError(t, testtool.Err(client.Write([]byte("data"))))
}

// waits returns when a call waits in Go's poller for the socket of the test.
func waits(t *testing.T) {
	t.Helper()
	stacks := make([]byte, 1<<20)
	testtool.Eventually(t, func() bool {
		all := string(stacks[:runtime.Stack(stacks, true)])
		for goroutine := range strings.SplitSeq(all, "\n\n") {
			state, calls, _ := strings.Cut(goroutine, "\n")
			if strings.Contains(state, "[IO wait") && strings.Contains(calls, ".wait(") &&
				strings.Contains(calls, "*readiness") {
				return true
			}
		}
		return false
	}, "no call waits")
}

// polled returns when Go's poller has run, and has seen what was sent before.
func polled(t *testing.T) {
	t.Helper()
	s, client := socketPair(t)
	read := testtool.Go(func() error { return testtool.Err(s.Readv(make([]byte, 4), nil, true)) })
	waits(t)
	send(t, client)
	require.NoError(t, <-read)
}

// arrived waits until the kernel reports an event of the socket.
func arrived(t *testing.T, s *Socket, event int16) {
	t.Helper()
	n := testtool.Must(unix.Poll([]unix.PollFd{{Fd: int32(s.fd), Events: event}}, 60_000))(t)
	require.Equal(t, 1, n)
}

// TestSocketReads has a peer send in pieces and with pauses, so that data comes before, while and
// after the reader begins to wait. A lost wake-up would hang the test.
func TestSocketReads(t *testing.T) {
	s, client := socketPair(t)
	data := make([]byte, 16<<20)
	rng := rand.NewChaCha8([32]byte{1})
	_, _ = rng.Read(data)
	var read atomic.Int64
	go func() {
		sent := 0
		r := rand.New(rand.NewPCG(2, 3))
		for left := data; len(left) > 0; {
			n := min(1+r.IntN(1<<r.IntN(18)), len(left))
			if _, err := client.Write(left[:n]); err != nil {
				return
			}
			left = left[n:]
			sent += n
			for pause := r.IntN(4) == 0; pause && read.Load() < int64(sent); {
				runtime.Gosched()
			}
		}
		_ = client.CloseWrite()
	}()
	require.NoError(t, s.SetReadDeadline(time.Now().Add(time.Minute)))
	r := rand.New(rand.NewPCG(4, 5))
	got := make([]byte, 0, len(data))
	first, next := make([]byte, 64<<10), make([]byte, 4<<10)
	waits, silences := 0, 0
	for {
		p, q := first[:1+r.IntN(len(first))], next[:r.IntN(len(next))]
		armed := s.in.armed
		n, err := s.Readv(p, q, r.IntN(2) == 0)
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		require.LessOrEqual(t, n, len(p)+len(q))
		read.Add(int64(n))
		got = append(got, p[:min(n, len(p))]...)
		got = append(got, q[:max(n-len(p), 0)]...)
		switch {
		case !armed && s.in.armed:
			waits++
		case armed && !s.in.armed:
			silences++
		}
	}
	require.True(t, bytes.Equal(data, got))
	require.Positive(t, waits, "the reader has waited")
	require.Positive(t, silences, "the reader has been ahead")
}

// TestASocketIsSilent checks that data wakes nobody while the reader is busy.
func TestASocketIsSilent(t *testing.T) {
	s, client := socketPair(t)
	// wakes reports whether the instance would wake Go's poller because of data that has arrived.
	wakes := func() bool {
		t.Helper()
		arrived(t, s, unix.POLLIN)
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(s.in.fd), Events: unix.POLLIN}}, 0)
		require.NoError(t, err)
		return n > 0
	}
	buf := make([]byte, 4)

	send(t, client)
	testtool.Eventually(t, func() bool {
		n, err := s.Readv(buf, nil, false)
		return n == 4 && err == nil
	})
	send(t, client)
	require.False(t, wakes(), "nobody has waited yet")
	testtool.Eventually(t, func() bool {
		n, err := s.Readv(buf, nil, false)
		return n == 4 && err == nil
	})

	try := s.in.try
	s.in.try = func() bool {
		done := try()
		if !done && s.in.armed { // the reader waits from here on
			s.in.try = try
			send(t, client)
		}
		return done
	}
	n := testtool.Must(s.Readv(buf, nil, true))(t)
	require.Equal(t, 4, n)
	send(t, client)
	require.True(t, wakes(), "after a wait the instance is armed")
	n = testtool.Must(s.Readv(buf, nil, true))(t)
	require.Equal(t, 4, n)
	send(t, client)
	require.False(t, wakes(), "the last read did not wait")
}

// TestSocketMissesNothing sends data just before the reader's instance listens. Such data may wake
// nobody.
func TestSocketMissesNothing(t *testing.T) {
	s, client := socketPair(t)
	buf := make([]byte, 4)
	read := testtool.Go(func() error { return testtool.Err(s.Readv(buf, nil, true)) })
	waits(t)
	send(t, client)
	require.NoError(t, <-read)
	send(t, client)
	// Go's poller has seen the data, but not that it was read.
	polled(t)
	require.NoError(t, testtool.Err(s.Readv(buf, nil, true)))
	require.NoError(t, s.in.silence())

	try := s.in.try
	s.in.try = func() bool {
		done := try()
		if !done {
			s.in.try = try
			send(t, client)
			arrived(t, s, unix.POLLIN)
		}
		return done
	}
	require.NoError(t, s.SetReadDeadline(time.Now().Add(time.Minute)))
	require.Equal(t, 4, testtool.Must(s.Readv(buf, nil, true))(t))
}

// TestSocketWrites writes more buffers than a system call takes, and more bytes than the peer takes
// at once.
func TestSocketWrites(t *testing.T) {
	s, client := socketPair(t)
	require.NoError(t, unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 16<<10))
	r := rand.New(rand.NewPCG(6, 7))
	var want []byte
	places := make([][]byte, 3*maxIovec+1)
	for i := range places {
		places[i] = bytes.Repeat([]byte{byte(i)}, r.IntN(2048)) // some of them empty
		want = append(want, places[i]...)
	}
	require.NoError(t, s.SetWriteDeadline(time.Now().Add(time.Minute)))
	wrote, got := make(chan error, 1), make(chan []byte)
	go func() { wrote <- s.Writev(places) }()
	waits(t)
	go func() {
		b, _ := io.ReadAll(client)
		got <- b
	}()
	require.NoError(t, <-wrote)
	require.Positive(t, s.out.tries, "the writer has waited")
	require.False(t, s.out.armed, "and is woken no more")
	require.Nil(t, s.iov, "such a long list is not kept")
	require.Equal(t, 3, testtool.Must(s.Write([]byte("end")))(t))
	require.NoError(t, s.CloseWrite())
	require.True(t, bytes.Equal(append(want, "end"...), <-got))
}

func TestASocketEndsWhoWaits(t *testing.T) {
	full := func(t *testing.T, s *Socket) {
		t.Helper()
		require.NoError(t, unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 16<<10))
	}
	wait := func(s *Socket, write bool) error {
		if write {
			return s.Writev([][]byte{make([]byte, 64<<20)})
		}
		_, err := s.Readv(make([]byte, 1), nil, true)
		return err
	}
	for name, write := range map[string]bool{"reader": false, "writer": true} {
		t.Run(name, func(t *testing.T) {
			t.Run("close", func(t *testing.T) {
				s, _ := socketPair(t)
				full(t, s)
				ended := testtool.Go(func() error { return wait(s, write) })
				waits(t)
				require.NoError(t, s.Close())
				require.ErrorIs(t, <-ended, net.ErrClosed)
				require.ErrorIs(t, wait(s, write), net.ErrClosed, "later calls fail, too")
				require.ErrorIs(t, s.Close(), net.ErrClosed)
				require.ErrorIs(t, s.CloseWrite(), net.ErrClosed)
				require.False(t, HungUp(s))
			})
			t.Run("deadline", func(t *testing.T) {
				s, _ := socketPair(t)
				full(t, s)
				require.NoError(t, s.SetDeadline(time.Now().Add(20*time.Millisecond)))
				require.ErrorIs(t, wait(s, write), os.ErrDeadlineExceeded)
			})
			t.Run("reset", func(t *testing.T) {
				s, client := socketPair(t)
				full(t, s)
				ended := testtool.Go(func() error { return wait(s, write) })
				waits(t)
				require.NoError(t, client.SetLinger(0))
				require.NoError(t, client.Close())
				require.ErrorIs(t, <-ended, unix.ECONNRESET)
			})
		})
	}
}

// TestNothingIsReadAfterTheDeadline, however fast the peer sends: a reader that polls stops, too.
func TestNothingIsReadAfterTheDeadline(t *testing.T) {
	s, client := socketPair(t)
	p := make([]byte, 2)
	send(t, client)
	require.Equal(t, 2, testtool.Must(s.Readv(p, nil, true))(t))
	require.NoError(t, s.SetReadDeadline(time.Unix(1, 0)))
	require.Zero(t, testtool.Must(s.Readv(p, nil, false))(t))
	require.ErrorIs(t, testtool.Err(s.Readv(p, nil, true)), os.ErrDeadlineExceeded)
	require.NoError(t, s.SetReadDeadline(time.Time{}))
	require.Equal(t, 2, testtool.Must(s.Readv(p, nil, true))(t))
}

func TestSocketEnded(t *testing.T) {
	s, client := socketPair(t)
	require.False(t, HungUp(s))
	require.NoError(t, testtool.Err(client.Write([]byte("last"))))
	require.NoError(t, client.Close())
	testtool.Eventually(t, func() bool { return HungUp(s) }, "although there is something to read")
	require.Equal(t, 4, testtool.Must(s.Read(make([]byte, 8)))(t))
	require.True(t, HungUp(s))
	require.ErrorIs(t, testtool.Err(s.Read(make([]byte, 8))), io.EOF)

	s, client = socketPair(t)
	require.NoError(t, client.SetLinger(0))
	require.NoError(t, client.Close())
	testtool.Eventually(t, func() bool { return HungUp(s) }, "by a reset")
	_, err := s.Read(make([]byte, 8))
	require.ErrorIs(t, err, unix.ECONNRESET, "the reader sees the end, too")
}

func TestWhatIsNoSocketStaysAsItIs(t *testing.T) {
	ours, theirs := net.Pipe()
	defer theirs.Close()
	defer ours.Close()
	require.ErrorIs(t, testtool.Err(New(ours, &PollLimit{})), errors.ErrUnsupported)
	w := &Plain{Conn: ours}
	require.False(t, HungUp(w))

	server, _ := tcpPair(t)
	_, err := New(struct{ *net.TCPConn }{server}, &PollLimit{})
	require.ErrorIs(t, err, errors.ErrUnsupported, "the wrapper may count the bytes")
}

func TestAConnectionWithinTheHostIsNotPaced(t *testing.T) {
	allowed := testtool.Must(os.ReadFile("/proc/sys/net/ipv4/tcp_allowed_congestion_control"))(t)
	others := slices.DeleteFunc(strings.Fields(string(allowed)),
		func(name string) bool { return name == "reno" })
	if len(others) == 0 {
		t.Skip("this kernel lets a process choose no other congestion control than reno")
	}
	server, _ := tcpPair(t)
	raw, err := server.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, others[0])
	}))
	require.NoError(t, err)
	s := testtool.Must(New(server, &PollLimit{}))(t)
	defer s.Close()
	name := testtool.Must(unix.GetsockoptString(s.fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION))(t)
	require.Equal(t, "reno", name)
}

func TestWithinHost(t *testing.T) {
	tcp := func(ip string) net.Addr { return &net.TCPAddr{IP: net.ParseIP(ip), Port: 3260} }
	for _, c := range []struct {
		local, remote net.Addr
		within        bool
	}{
		{tcp("127.0.0.1"), tcp("127.0.0.1"), true},
		{tcp("127.0.0.7"), tcp("127.0.0.1"), true},
		{tcp("::1"), tcp("::1"), true},
		{tcp("10.1.2.3"), tcp("10.1.2.3"), true},
		{tcp("10.1.2.3"), tcp("::ffff:10.1.2.3"), true},
		{tcp("10.1.2.3"), tcp("10.1.2.4"), false},
		{tcp("fd00::1"), tcp("fd00::2"), false},
		{&net.UnixAddr{}, &net.UnixAddr{}, false},
		{tcp("127.0.0.1"), nil, false},
	} {
		require.Equal(t, c.within, withinHost(c.local, c.remote), "%v to %v", c.local, c.remote)
	}
}

// TestSocketOverUnix: a Unix socket is as good as one of TCP.
func TestSocketOverUnix(t *testing.T) {
	l := testtool.Must(net.Listen("unix", filepath.Join(t.TempDir(), "s")))(t)
	defer l.Close()
	client := testtool.Must(net.Dial("unix", l.Addr().String()))(t)
	defer client.Close()
	server := testtool.Must(l.Accept())(t)
	s := testtool.Must(New(server, &PollLimit{}))(t)
	require.NoError(t, server.Close())
	defer s.Close()
	late := time.AfterFunc(5*time.Millisecond, func() { _, _ = client.Write([]byte("ping")) })
	defer late.Stop()
	got := make([]byte, 4)
	require.NoError(t, testtool.Err(io.ReadFull(s, got)))
	require.Equal(t, "ping", string(got))
	require.NoError(t, s.Writev([][]byte{[]byte("po"), []byte("ng")}))
	require.NoError(t, testtool.Err(io.ReadFull(client, got)))
	require.Equal(t, "pong", string(got))
	require.False(t, HungUp(s))
	require.NoError(t, client.Close())
	require.True(t, HungUp(s))
}

// TestAUnixSocketHoldsAReply: nobody has to be woken in the middle of a reply with 256 KiB.
func TestAUnixSocketHoldsAReply(t *testing.T) {
	l := testtool.Must(net.Listen("unix", filepath.Join(t.TempDir(), "s")))(t)
	defer l.Close()
	peer := testtool.Must(net.Dial("unix", l.Addr().String()))(t)
	defer peer.Close()
	nc := testtool.Must(l.Accept())(t)
	defer nc.Close()
	s := testtool.Must(New(nc, &PollLimit{}))(t)
	defer s.Close()
	require.NoError(t, s.SetWriteDeadline(time.Now().Add(time.Minute)))
	require.NoError(t, s.Writev([][]byte{make([]byte, 44), make([]byte, 256<<10)}))
	require.Zero(t, s.out.tries, "the writer has waited")
}
