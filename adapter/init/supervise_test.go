package guestinit

import (
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestSupervise: the first request to stop sends the stop signal, the second one and the end of the
// time kill; signals for process 1 go to the entry point.
func TestSupervise(t *testing.T) {
	sent := make(chan syscall.Signal, 10)
	requests := make(chan struct{}, 2)
	signals := make(chan os.Signal, 2)
	exited := make(chan unix.WaitStatus, 1)
	s := &supervisor{pid: 7, stop: syscall.SIGQUIT, grace: time.Hour,
		say: func(string, ...any) {}, requests: requests, signals: signals,
		kill: func(pid int, signal syscall.Signal) {
			require.Equal(t, 7, pid)
			sent <- signal
		}}
	done := make(chan ending)
	go func() { done <- s.run(exited, false) }()
	signals <- syscall.SIGHUP
	require.Equal(t, syscall.SIGHUP, <-sent)
	requests <- struct{}{}
	require.Equal(t, syscall.SIGQUIT, <-sent)
	requests <- struct{}{}
	require.Equal(t, syscall.SIGKILL, <-sent)
	exited <- 9
	require.Equal(t, ending{status: 137}, <-done)

	s.grace = time.Millisecond
	go func() { done <- s.run(exited, false) }()
	requests <- struct{}{}
	require.Equal(t, syscall.SIGQUIT, <-sent)
	require.Equal(t, syscall.SIGKILL, <-sent)
	exited <- 5 << 8
	require.Equal(t, ending{status: 5}, <-done)
}
