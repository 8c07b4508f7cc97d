package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestStopDuringTheCopy stops the daemon around the end of the copy. Whichever comes first, the
// stop is clean, and the next start continues with the disk.
func TestStopDuringTheCopy(t *testing.T) {
	l := newPlace(t)
	f, err := os.Create(filepath.Join(l.dir, "disk", "big.raw"))
	require.NoError(t, err)
	block := bytes.Repeat([]byte{0xa5}, 1<<20)
	for range 256 {
		require.NoError(t, testtool.Err(f.Write(block)))
	}
	require.NoError(t, f.Close())
	p := launch(t, binary(t), l.env, "serve")
	p.until("the disk is made", func() bool {
		return p.logged("made a disk of the image", "lun") != nil
	})
	require.Equal(t, exitDone, p.terminate())
	require.NoFileExists(t, l.readyFile())
	partial, err := filepath.Glob(filepath.Join(l.dir, "work", "*", "*.partial"))
	require.NoError(t, err)
	require.Empty(t, partial)
	require.True(t, p.logged("stopped", "msg") != nil ||
		p.logged("stopped before the LUNs were ready", "msg") != nil)
	again := l.serve(t)
	require.NotNil(t, again.logged("keeping the existing disk, with what was written to it", "lun"))
}

// interrupts is a context that signals end, and where the status is told when one ends the process.
func interrupts(t *testing.T, sameRequest time.Duration) (context.Context, chan int) {
	exited := make(chan int, 1)
	a := &app{exit: func(status int) { exited <- status }, sameRequest: sameRequest}
	ctx, stop := a.interruptible(t.Context(), nil, nil)
	t.Cleanup(stop)
	return ctx, exited
}

func TestTheFirstSignalCancelsTheSecondEnds(t *testing.T) {
	ctx, exited := interrupts(t, 0)
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
	testtool.Await(t, ctx.Done(), "the first signal does nothing")
	require.Empty(t, exited)
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGINT))
	require.Equal(t, exitFailed, testtool.Await(t, exited, "the second signal does nothing"))
}

// TestOneRequestThatComesTwice: timeout(1) sends one request to a process and then to its group.
// The daemon must still drain.
func TestOneRequestThatComesTwice(t *testing.T) {
	ctx, exited := interrupts(t, time.Hour)
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
	<-ctx.Done()
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
	require.Never(t, func() bool { return len(exited) > 0 }, 50*time.Millisecond, time.Millisecond)
}

func TestAClosedTerminalIsAFirstSignal(t *testing.T) {
	if signal.Ignored(syscall.SIGHUP) {
		t.Skip("skipped: the tests were started to outlive their terminal")
	}
	ctx, exited := interrupts(t, 0)
	for range 2 {
		require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGHUP))
		testtool.Await(t, ctx.Done(), "the signal does nothing")
	}
	require.Never(t, func() bool { return len(exited) > 0 }, 50*time.Millisecond, time.Millisecond)
}

// TestMessagesCommandNoTerminal checks that the name of an image, or the answer of a remote daemon,
// neither moves the cursor nor reverses the text.
func TestMessagesCommandNoTerminal(t *testing.T) {
	var b bytes.Buffer
	a := &app{stderr: &b}
	require.Equal(t, exitFailed,
		a.report(&failure{errors.New("LUN 1 (größe\x1b[2J\r\x9b\u009b\u202e\x00\"'.raw):\n  bad, " +
			"\uFFFD")}))
	require.Equal(t, `kubevirt-disk: LUN 1 (größe\x1b[2J\r\x9b\u009b\u202e\x00"'.raw):`+
		"\n  bad, \uFFFD\n", b.String())
}

// TestTheFirstThreadOnlyWaits: a signal of the process is given to its first thread, even while
// that one hangs in a call of storage.
func TestTheFirstThreadOnlyWaits(t *testing.T) {
	const many = 100
	threads, held := make(chan int, many), make(chan struct{})
	defer close(held)
	for range many {
		go func() {
			runtime.LockOSThread()
			threads <- syscall.Gettid()
			<-held
		}()
	}
	for range many {
		require.NotEqual(t, os.Getpid(), <-threads)
	}
}
