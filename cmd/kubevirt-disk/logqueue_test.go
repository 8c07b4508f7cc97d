package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

// gate is a log reader that reads nothing until it is opened. Then it counts lines.
type gate struct {
	open  chan struct{}
	lines atomic.Int64
}

func (g *gate) Write(p []byte) (int, error) {
	<-g.open
	g.lines.Add(int64(bytes.Count(p, []byte("\n"))))
	return len(p), nil
}

func TestALogThatNobodyReadsHoldsUpNothing(t *testing.T) {
	g := &gate{open: make(chan struct{})}
	q := newLogQueue(g)
	told := make(chan uint64, 1)
	q.tell = func(lost uint64) { told <- lost }
	const lines = logQueueLines + 100
	write := func(n int) {
		for range n {
			n, err := q.Write([]byte("line\n"))
			require.NoError(t, err)
			require.Equal(t, 5, n)
		}
	}
	write(logQueueLines + 2) // one is being written, as many as fit wait, and one is lost
	require.True(t, q.stuck.Load())
	q.timeout = time.Hour // only the first lost line has to wait
	write(lines - logQueueLines - 2)
	require.NoError(t, q.Sync())
	close(g.open)
	lost := int64(<-told)
	require.GreaterOrEqual(t, lost, int64(99), "one is being written, and as many as fit wait")
	testtool.Within(t, timeout, func() bool { return g.lines.Load()+lost == lines },
		"all lines but %d are there: %d", lost, func() any { return g.lines.Load() })
}

func TestAFastLogIsComplete(t *testing.T) {
	g := &gate{open: make(chan struct{})}
	close(g.open)
	q := newLogQueue(g)
	q.timeout = time.Hour // on a busy machine the reader may pause for seconds
	const lines = 20 * logQueueLines
	for range lines {
		_, err := q.Write([]byte("line\n"))
		require.NoError(t, err)
	}
	require.NoError(t, q.Sync())
	testtool.Within(t, timeout, func() bool { return g.lines.Load() == lines },
		"%d lines are there: %d", lines, func() any { return g.lines.Load() })
}

// TestTheLogKeepsItsLines writes lines from one buffer, as a logger does, while nobody reads them
// yet.
func TestTheLogKeepsItsLines(t *testing.T) {
	var got bytes.Buffer
	g := &gate{open: make(chan struct{})}
	q := newLogQueue(io.MultiWriter(&got, g))
	var want bytes.Buffer
	buf := make([]byte, 0, 16)
	for i := range 100 {
		buf = fmt.Appendf(buf[:0], "line %d\n", i)
		want.Write(buf)
		_, err := q.Write(buf)
		require.NoError(t, err)
	}
	close(g.open)
	testtool.Within(t, timeout, func() bool { return g.lines.Load() == 100 },
		"all lines are there: %d", func() any { return g.lines.Load() })
	require.Equal(t, want.String(), got.String())
}

// TestServeWithALogThatNobodyReads fills the pipe of the log before the daemon starts, and stops
// the daemon.
func TestServeWithALogThatNobodyReads(t *testing.T) {
	l := newPlace(t, "a.raw")
	path := fullPipe(t)
	p := launch(t, "/bin/sh", l.env, "-c", `exec "$0" serve 2>"$1"`, binary(t), path)
	p.until("the ready file is there", func() bool { return exists(l.readyFile()) })
	require.Equal(t, exitDone, p.terminate())
	require.NoFileExists(t, l.readyFile())
}

// TestFailuresThatNobodyReads checks that a daemon that cannot serve exits even if its log hangs,
// so that it is restarted.
func TestFailuresThatNobodyReads(t *testing.T) {
	l := newPlace(t, "a.raw")
	path := fullPipe(t)
	for flag, want := range map[string]int{"--port=none": exitUsage,
		"--listen=192.0.2.1:0 --insecure-no-auth": exitFailed} {
		p := launch(t, "/bin/sh", l.env, "-c", `exec "$0" serve $2 2>"$1"`, binary(t), path, flag)
		require.Equal(t, want, p.status(), flag)
	}
}

// fullPipe returns a named pipe that is full.
func fullPipe(t *testing.T) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "log")
	require.NoError(t, unix.Mkfifo(path, 0o600))
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	pipe := os.NewFile(uintptr(fd), path)
	t.Cleanup(func() { pipe.Close() })
	for err == nil {
		_, err = unix.Write(fd, make([]byte, 4096))
	}
	require.ErrorIs(t, err, unix.EAGAIN)
	return path
}
