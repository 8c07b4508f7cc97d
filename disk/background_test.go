package disk

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"
)

// unreadable makes every read of an open file fail, until back is called.
func unreadable(t *testing.T, f *os.File) (back func()) {
	other, err := os.OpenFile(f.Name(), os.O_WRONLY, 0)
	require.NoError(t, err)
	defer other.Close()
	fd := int(f.Fd())
	good, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	require.NoError(t, err)
	require.NoError(t, unix.Dup3(int(other.Fd()), fd, unix.O_CLOEXEC))
	return func() {
		require.NoError(t, unix.Dup3(good, fd, unix.O_CLOEXEC))
		require.NoError(t, unix.Close(good))
	}
}

// identifying is what is to identify an image of one backing file, and what it logs.
func identifying(t *testing.T) (*background, *observer.ObservedLogs) {
	dir := t.TempDir()
	content := block('a', 3*fingerprintChunk)
	put(t, dir, "base.raw", content, 0)
	qemuImg(t, dir, "create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "top.qcow2")
	img := openImage(t, filepath.Join(dir, "top.qcow2"))
	work, err := openWorkDir(t.TempDir(), "top.qcow2", false)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, work.close()) })
	core, logs := observer.New(zap.WarnLevel)
	return &background{img: img, dir: work, log: zap.New(core), retry: time.Millisecond, state: &state{Chain: img.unhashed()}}, logs
}

// An image that cannot be read for a while is known at the next start all the same: otherwise the disk is made again, or refused.
func TestImageIsIdentifiedAfterErrors(t *testing.T) {
	b, logs := identifying(t)
	want, err := b.img.fingerprint(t.Context(), b.img.contents())
	require.NoError(t, err)
	back := unreadable(t, b.img.top.below.file)
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.keepIdentifying(t.Context(), t.Context(), b.img.contents())
	}()
	require.Eventually(t, func() bool { return logs.Len() > 1 }, 10*time.Second, time.Millisecond)
	back()
	<-done
	require.Equal(t, want, b.state.Chain)
	require.False(t, b.unsaved)
	require.Zero(t, logs.FilterMessage("a later start will not know the image again").Len())
}

// A disk that is copied is not kept from being complete by an image that cannot be read, as in a part that holds nothing of the disk.
func TestCompleteDiskDoesNotWaitForItsImage(t *testing.T) {
	b, logs := identifying(t)
	defer unreadable(t, b.img.top.below.file)()
	b.retry = time.Hour
	copying, copied := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.keepIdentifying(t.Context(), copying, b.img.contents())
	}()
	require.Eventually(t, func() bool { return logs.Len() == 1 }, 10*time.Second, time.Millisecond)
	copied()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("it goes on")
	}
	require.False(t, identified(b.state.Chain))
	require.Equal(t, 1, logs.FilterMessage("a later start will not know the image again").Len())
}
