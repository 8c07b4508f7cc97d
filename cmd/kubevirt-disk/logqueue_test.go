package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

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
