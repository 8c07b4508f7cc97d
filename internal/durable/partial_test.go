package durable

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/testtool"
)

// TestCreateFollowsNoLink: a link under the name of a partial file is removed, and the file that it
// leads to stays as it is.
func TestCreateFollowsNoLink(t *testing.T) {
	dir := t.TempDir()
	foreign, path := filepath.Join(t.TempDir(), "foreign"), filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(foreign, []byte("keep"), 0o600))
	for _, link := range []func(from, to string) error{os.Symlink, os.Link} {
		require.NoError(t, link(foreign, path+PartialSuffix))
		require.NoError(t, Replace(nil, path, []byte("new"), "", (*os.File).Sync))
		text := testtool.Must(os.ReadFile(foreign))(t)
		require.Equal(t, "keep", string(text))
		text = testtool.Must(Read(path))(t)
		require.Equal(t, "new", string(text))
	}
	require.Len(t, testtool.Must(os.ReadDir(dir))(t), 1, "without a spare, none is made")
}

// TestLockedForWriting: what a killed process has left, and what is to be replaced, is opened for
// writing. NFS gives an exclusive lock of nothing else: the first could never be written again, and
// the other would be replaced although somebody uses it.
func TestLockedForWriting(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for name, write := range map[string]func() (*Partial, error){
		path + PartialSuffix: func() (*Partial, error) { return Create(path, 0o600) },
		path:                 func() (*Partial, error) { return CreateNamed(path, 0o600, nil) },
	} {
		require.NoError(t, os.WriteFile(name, []byte("former"), 0o600))
		events := testtool.Must(unix.InotifyInit1(unix.IN_CLOEXEC))(t)
		defer unix.Close(events)
		_ = testtool.Must(unix.InotifyAddWatch(events, name,
			unix.IN_CLOSE_WRITE|unix.IN_CLOSE_NOWRITE))(t)
		require.NoError(t, testtool.Must(write())(t).Finish(nil))
		text := make([]byte, unix.SizeofInotifyEvent)
		_ = testtool.Must(unix.Read(events, text))(t)
		require.EqualValues(t, unix.IN_CLOSE_WRITE, binary.NativeEndian.Uint32(text[4:]), name)
	}
}

// TestWrite: a file gets its name when all of it is there, has the mode that was asked for, and
// writers take turns. After an error the old one stays.
func TestWrite(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))
	path := filepath.Join(t.TempDir(), "file")
	put := func(text string) func(*os.File) error {
		return func(f *os.File) error {
			_, err := f.WriteString(text)
			return err
		}
	}
	require.NoError(t, Write(path, 0o644, put("one")))
	failure := errors.New("failure")
	require.ErrorIs(t, Write(path, 0o644, func(f *os.File) error {
		return errors.Join(put("broken")(f), failure)
	}), failure)
	held := testtool.Must(Create(path, 0o600))(t)
	done := testtool.Go(func() error { return Write(path, 0o644, put("two")) })
	testtool.Waits(t, done)
	require.NoError(t, held.Finish(put("held")(held.File)))
	require.NoError(t, <-done)
	require.Equal(t, "two", string(testtool.Must(os.ReadFile(path))(t)))
	info := testtool.Must(os.Stat(path))(t)
	require.Equal(t, os.FileMode(0o644), info.Mode().Perm())
	require.NoFileExists(t, path+PartialSuffix)
}

// TestCreateNamed: a file that somebody uses is not replaced, and neither is one that was not there
// when the new one was begun.
func TestCreateNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	read := func() string {
		text := testtool.Must(os.ReadFile(path))(t)
		return string(text)
	}
	put := func(text string) { require.NoError(t, os.WriteFile(path, []byte(text), 0o600)) }

	p := testtool.Must(CreateNamed(path, 0o600, nil))(t)
	put("somebody's")
	require.ErrorContains(t, p.Finish(nil), "somebody else")
	require.Equal(t, "somebody's", read())

	p = testtool.Must(CreateNew(path, 0o600))(t)
	require.ErrorContains(t, p.FinishSynced(nil), "somebody else")
	require.Equal(t, "somebody's", read())

	p = testtool.Must(CreateNamed(path, 0o600, nil))(t)
	require.NoError(t, os.Remove(path))
	put("another's")
	require.ErrorContains(t, p.Finish(nil), "somebody else")
	require.Equal(t, "another's", read())

	user := testtool.Must(os.Open(path))(t)
	require.NoError(t, flock.Lock(user, unix.LOCK_SH))
	require.ErrorAs(t, testtool.Err(CreateNamed(path, 0o600, nil)), new(*LockedError))
	require.NoError(t, user.Close())
	qemu := testtool.Must(os.Open(path))(t)
	lock := unix.Flock_t{Type: unix.F_RDLCK, Start: 101, Len: 1} // it may write
	require.NoError(t, unix.FcntlFlock(qemu.Fd(), unix.F_OFD_SETLK, &lock))
	require.ErrorContains(t, testtool.Err(CreateNamed(path, 0o600, nil)), "QEMU")
	require.NoError(t, qemu.Close())
	_, err := CreateNamed(path, 0o600, func(former *os.File) error {
		text := testtool.Must(io.ReadAll(former))(t)
		return errors.New(string(text) + " must stay")
	})
	require.EqualError(t, err, "another's must stay")
	p = testtool.Must(CreateNamed(path, 0o600, nil))(t)
	_, err = p.File.WriteString("mine")
	require.NoError(t, p.Finish(err))
	require.Equal(t, "mine", read())
	require.NoFileExists(t, path+PartialSuffix)
}

// TestPowerCutAfterAReplacement: a file that was replaced a moment ago has the new content after a
// power cut, whether or not the file system has brought the name to storage by itself.
func TestPowerCutAfterAReplacement(t *testing.T) {
	for _, names := range []bool{true, false} {
		dir, cut := filetest.PowerCut(t)
		path := filepath.Join(dir, "file")
		former, now := filetest.Block('a', 1<<20), filetest.Block('b', 1<<20)
		require.NoError(t, Write(path, 0o600, func(f *os.File) error {
			_, err := f.Write(former)
			return err
		}))
		p := testtool.Must(CreateNamed(path, 0o600, nil))(t)
		_, err := p.File.Write(now)
		require.NoError(t, p.Finish(err))

		cut(names)
		got := testtool.Must(os.ReadFile(path))(t)
		require.True(t, bytes.Equal(got, now), "%d bytes, names: %t", len(got), names)
	}
}

// TestCreateInTurn: all of many processes that write a file at once do, one after the other.
func TestCreateInTurn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	var all errgroup.Group
	for range 64 {
		all.Go(func() error {
			p, err := CreateInTurn(path, 0o600)
			if err != nil {
				return err
			}
			time.Sleep(time.Millisecond) // the others wait for it
			return p.Finish(nil)
		})
	}
	require.NoError(t, all.Wait())
	require.ErrorIs(t, testtool.Err(CreateInTurn(path+"/missing/file", 0o600)), unix.ENOTDIR)
	require.ErrorIs(t, testtool.Err(CreateInTurn(path+".missing/file", 0o600)), fs.ErrNotExist)
}
