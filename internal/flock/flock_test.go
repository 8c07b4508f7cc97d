package flock

import (
	"bytes"
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestLock checks that openings of one file exclude each other, and that the error names the file.
func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	open := func() *os.File {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		require.NoError(t, err)
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	one, other, third := open(), open(), open()
	require.NoError(t, Lock(one, unix.LOCK_SH))
	require.NoError(t, Lock(other, unix.LOCK_SH|unix.LOCK_NB), "both may read")

	err := Lock(third, unix.LOCK_EX|unix.LOCK_NB)
	require.ErrorIs(t, err, unix.EWOULDBLOCK)
	require.ErrorContains(t, err, path)

	require.NoError(t, other.Close())
	got := make(chan error)
	go func() { got <- Lock(third, unix.LOCK_EX) }()
	require.NoError(t, one.Close())
	require.NoError(t, <-got, "closed files have no locks")
	require.ErrorIs(t, Lock(open(), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// TestWaitBriefly checks that it takes the lock of a directory as soon as it is free, and returns
// even if it is not.
func TestWaitBriefly(t *testing.T) {
	path := t.TempDir()
	open := func() *os.File {
		dir, err := os.Open(path)
		require.NoError(t, err)
		t.Cleanup(func() { _ = dir.Close() })
		return dir
	}
	held, waits := open(), open()
	WaitBriefly(held)
	require.ErrorIs(t, Lock(waits, unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK)
	WaitBriefly(waits)
	require.ErrorIs(t, Lock(waits, unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK, "it gave up")

	require.NoError(t, held.Close())
	WaitBriefly(waits)
	require.ErrorIs(t, Lock(open(), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK, "it has it")
}

// TestClaim: one owner at a time has a file until it has renamed or removed it, and the next one
// gets a file of its own. A killed process's file is taken over or discarded; a file with an owner
// is not.
func TestClaim(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "part")
	require.NoError(t, os.WriteFile(path, []byte("left"), 0o600))
	first, err := Claim(t.Context(), path)
	require.NoError(t, err)
	info, err := first.Stat()
	require.NoError(t, err)
	require.EqualValues(t, 4, info.Size())
	require.NoError(t, Discard(path))
	require.FileExists(t, path)
	ended, end := context.WithCancel(t.Context())
	end()
	_, err = Claim(ended, path)
	require.ErrorIs(t, err, context.Canceled)

	claimed := make(chan *os.File, 1)
	go func() {
		second, err := Claim(t.Context(), path)
		assert.NoError(t, err)
		claimed <- second
	}()
	require.Empty(t, claimed)
	require.NoError(t, os.Rename(path, filepath.Join(dir, "whole")))
	require.NoError(t, first.Close())
	second := <-claimed
	info, err = second.Stat()
	require.NoError(t, err)
	require.Zero(t, info.Size(), "it is another file")

	require.NoError(t, second.Close())
	require.NoError(t, Discard(path))
	require.NoFileExists(t, path)
	require.NoError(t, Discard(path))
	require.FileExists(t, filepath.Join(dir, "whole"))

	require.NoError(t, os.Symlink("whole", path))
	_, err = Claim(t.Context(), path)
	require.ErrorContains(t, err, path, "it is not for a link to say where something is written")
}

// TestOpenForTheLock: who owns a directory removes what others have left there, and may only read.
func TestOpenForTheLock(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Chmod(filepath.Dir(dir), 0o755))
	require.NoError(t, os.Chmod(dir, 0o777))
	path := filepath.Join(dir, "left")
	require.NoError(t, os.WriteFile(path, nil, 0o444))
	discarded := make(chan error)
	go func() {
		runtime.LockOSThread() // for good, so that the thread ends with the goroutine
		if os.Geteuid() == 0 {
			assert.NoError(t, unix.Setfsuid(65534))
		}
		discarded <- Discard(path)
	}()
	require.NoError(t, <-discarded)
	require.NoFileExists(t, path)
}

// TestOwnDir: directories of running processes are found until they end. What a killed one has left
// is removed, and nothing else.
func TestOwnDir(t *testing.T) {
	in := t.TempDir()
	other := filepath.Join(in, "mine")
	require.NoError(t, os.Mkdir(other, 0o700))
	killed, err := NewOwnDir(in, "own-")
	require.NoError(t, err)
	one, err := NewOwnDir(in, "own-")
	require.NoError(t, err)
	require.ElementsMatch(t, []string{killed.Path, one.Path}, OwnDirs(in, "own-"))
	require.NoError(t, killed.lock.Close()) // as the kernel does
	events, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(events)
	_, err = unix.InotifyAddWatch(events, in, unix.IN_CREATE|unix.IN_MOVED_TO)
	require.NoError(t, err)
	two, err := NewOwnDir(in, "own-")
	require.NoError(t, err)
	text := make([]byte, 4096)
	n, err := unix.Read(events, text)
	require.NoError(t, err)
	at := bytes.LastIndex(text[:n], []byte(filepath.Base(two.Path)))
	require.Positive(t, at)
	require.EqualValues(t, unix.IN_MOVED_TO|unix.IN_ISDIR,
		binary.NativeEndian.Uint32(text[at-unix.SizeofInotifyEvent+4:]),
		"it has its name when it is locked, or others remove it")
	require.NoDirExists(t, killed.Path)
	require.ElementsMatch(t, []string{one.Path, two.Path}, OwnDirs(in, "own-"))
	require.NoError(t, one.Remove())
	require.NoError(t, two.Remove())
	require.Empty(t, OwnDirs(in, "own-"))
	require.DirExists(t, other)
	require.NoError(t, (*OwnDir)(nil).Remove())
}
