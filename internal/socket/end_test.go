package socket

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

// fewDescriptors limits the number of descriptors, and takes all of the lowest numbers except free
// of them.
func fewDescriptors(t *testing.T, limit uint64, free int) {
	t.Helper()
	var before unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE,
		&unix.Rlimit{Cur: limit, Max: before.Max}))
	var taken []int
	t.Cleanup(func() {
		for _, fd := range taken {
			_ = unix.Close(fd)
		}
		require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before))
	})
	for {
		fd, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 0)
		if errors.Is(err, unix.EMFILE) {
			break
		}
		require.NoError(t, err)
		taken = append(taken, fd)
	}
	for range free {
		require.NoError(t, unix.Close(taken[0]))
		taken = taken[1:]
	}
}

// TestASocketThatCannotBe runs out of descriptors at each step. The connection works as before, and
// no descriptor is left behind.
func TestASocketThatCannotBe(t *testing.T) {
	for free, why := range []string{"fcntl", "epoll_create1", "epoll_create1"} {
		server, client := tcpPair(t)
		t.Run(why, func(t *testing.T) {
			fewDescriptors(t, 512, free)
			_, err := New(server, &PollLimit{})
			require.ErrorIs(t, err, unix.EMFILE)
			require.ErrorContains(t, err, why)
			for range free {
				fd, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 0)
				require.NoError(t, err, "a descriptor is missing")
				defer unix.Close(fd)
			}
			require.NoError(t, testtool.Err(client.Write([]byte("data"))))
			require.Equal(t, 4, testtool.Must(io.ReadFull(server, make([]byte, 4)))(t))
		})
	}
}

// TestSocketCloseRaces closes sockets that are in use, while new sockets get the same descriptors.
// Each call ends, and no data reaches another socket.
func TestSocketCloseRaces(t *testing.T) {
	const workers, rounds = 4, 50
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			r := rand.New(rand.NewPCG(8, uint64(w)))
			for range rounds {
				if err := closeRace(t, byte(1+w),
					time.Duration(r.IntN(1000))*time.Microsecond); err != nil {
					t.Errorf("worker %d: %v", w, err)
					return
				}
			}
		})
	}
	all.Wait()
}

// closeRace sends bytes of one value through a socket and closes it after a while.
func closeRace(t *testing.T, value byte, after time.Duration) error {
	s, client := socketPair(t)
	data := bytes.Repeat([]byte{value}, 64<<10)
	errs := make(chan error, 5)
	only := func(b []byte) error {
		if n := bytes.Count(b, []byte{value}); n != len(b) {
			return errors.New("something came from elsewhere")
		}
		return nil
	}
	go func() { // the peer's receiver
		buf := make([]byte, 64<<10)
		for {
			n, err := client.Read(buf)
			if werr := only(buf[:n]); werr != nil || err != nil {
				errs <- werr
				return
			}
		}
	}()
	go func() { // the peer's sender
		for {
			if _, err := client.Write(data); err != nil {
				errs <- nil
				return
			}
		}
	}()
	go func() {
		buf := make([]byte, 64<<10)
		for try := 0; ; try++ {
			n, err := s.Readv(buf, nil, try%2 == 0)
			if werr := only(buf[:n]); werr != nil {
				errs <- werr
				return
			}
			if err != nil {
				errs <- closedOrReset(err)
				return
			}
		}
	}()
	go func() {
		for {
			if err := s.Writev([][]byte{data, data}); err != nil {
				errs <- closedOrReset(err)
				return
			}
		}
	}()
	go func() {
		for !HungUp(s) {
			if err := s.SetDeadline(time.Now().Add(time.Minute)); err != nil {
				break
			}
		}
		errs <- nil
	}()
	time.Sleep(after)
	err := s.Close()
	for range cap(errs) {
		err = errors.Join(err, <-errs)
	}
	return err
}

// closedOrReset returns nil for the errors of a connection that either end has closed.
func closedOrReset(err error) error {
	if errors.Is(err, net.ErrClosed) || errors.Is(err, unix.ECONNRESET) ||
		errors.Is(err, unix.EPIPE) {
		return nil
	}
	return err
}

// deaf has the kernel drop whatever comes for a connection, as if its machine were dead.
func deaf(t *testing.T, c *net.TCPConn) {
	t.Helper()
	raw, err := c.SyscallConn()
	require.NoError(t, err)
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}} // take 0 bytes of each packet
	require.NoError(t, raw.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: 1, Filter: &drop[0]})
	}))
	require.NoError(t, err)
}

// TestSilent tells a peer whose machine is dead from one that is only stopped, and takes nothing.
func TestSilent(t *testing.T) {
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { _ = l.Close() })
	pair := func() (here, there *net.TCPConn) {
		c := testtool.Must(net.Dial("tcp", l.Addr().String()))(t)
		t.Cleanup(func() { _ = c.Close() })
		s := testtool.Must(l.Accept())(t)
		t.Cleanup(func() { _ = s.Close() })
		return s.(*net.TCPConn), c.(*net.TCPConn)
	}
	info := func(c *net.TCPConn) (got *unix.TCPInfo) {
		raw, err := c.SyscallConn()
		require.NoError(t, err)
		require.NoError(t, raw.Control(func(fd uintptr) {
			got, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		}))
		require.NoError(t, err)
		return got
	}
	const long = 300 * time.Millisecond
	quiet := func(c *net.TCPConn, asks bool) {
		testtool.Eventually(t, func() bool {
			i := info(c)
			heard := time.Duration(i.Last_ack_recv) * time.Millisecond
			return heard > 2*long && asks == (i.Backoff > 0)
		}, "nothing has come for a while")
	}

	dead, there := pair()
	asSocket := testtool.Must(New(dead, nil))(t)
	defer asSocket.Close()
	deaf(t, there)
	quiet(dead, false)
	require.False(t, Silent(dead, long), "it was sent nothing")
	require.NoError(t, testtool.Err(dead.Write([]byte("are you there?"))))
	testtool.Eventually(t, func() bool { return Silent(dead, long) }, "it is silent")
	require.True(t, Silent(asSocket, long))
	require.False(t, Silent(dead, time.Hour))

	stopped, there := pair()
	require.NoError(t, there.SetReadBuffer(4096))
	require.NoError(t, stopped.SetWriteDeadline(time.Now().Add(time.Second)))
	require.Error(t, testtool.Err(stopped.Write(make([]byte, 64<<20))), "its buffers are full")
	quiet(stopped, true) // between two probes for room
	require.False(t, Silent(stopped, long))

	deaf(t, there)
	testtool.Eventually(t, func() bool { return Silent(stopped, long) }, "it is dead, too")
	_ = dead.Close()
	require.NoError(t, asSocket.Close())
	require.False(t, Silent(dead, 0))
	require.False(t, Silent(asSocket, 0))
	a, _ := net.Pipe()
	require.False(t, Silent(a, 0))
}
