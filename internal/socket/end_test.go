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
