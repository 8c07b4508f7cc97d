package osfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// TestCallBesideClose checks that a descriptor stays ours until the call on it has ended. Otherwise
// a hole could be punched into a file that has just got the same descriptor.
func TestCallBesideClose(t *testing.T) {
	f := testtool.Must(os.Create(filepath.Join(t.TempDir(), "file")))(t)
	closed := make(chan error, 1)
	require.NoError(t, Call(f, func(fd int) error {
		go func() { closed <- f.Close() }()
		testtool.Eventually(t, func() bool {
			return Call(f, func(int) error { return nil }) != nil
		})
		_, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		return err
	}))
	require.NoError(t, <-closed)
	require.ErrorIs(t, Call(f, func(int) error { return nil }), os.ErrClosed)
}

// TestExtents checks that the last run of data is remembered until somebody forgets it. Otherwise
// each read of a large file on tmpfs would look at all of its pages.
func TestExtents(t *testing.T) {
	const part = 1 << 20
	f := testtool.Must(os.Create(filepath.Join(t.TempDir(), "file")))(t)
	defer func() { require.NoError(t, f.Close()) }()
	for _, at := range []int64{0, part, 3 * part} {
		require.NoError(t, testtool.Err(f.WriteAt(make([]byte, part), at)))
	}
	var x Extents
	check := func(off, length, want int64, wantData bool) {
		t.Helper()
		n, data := testtool.Must2(x.Seek(f, off, length))(t)
		require.Equal(t, want, n)
		require.Equal(t, wantData, data)
	}
	check(0, 4*part, 2*part, true)
	check(2*part, 2*part, part, false)
	check(2*part, 4096, 4096, false)

	hole := func(off int64) {
		require.NoError(t, Call(f, func(fd int) error {
			const mode = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
			return unix.Fallocate(fd, mode, off, part)
		}))
	}
	hole(part)
	check(part/2, 2*part, 3*part/2, true) // nobody said so
	x.Forget()
	check(part/2, 2*part, part/2, true)
	check(part, 4*part, 2*part, false)
	check(3*part, part, part, true)

	require.NoError(t, f.Truncate(5*part))
	check(4*part, 2*part, part, false)
	check(5*part, part, part, true) // behind the end: a hole there would be zeros in a copy
}

// TestNameless: nothing is left in the directory, and the file can be used. It never has a name, so
// that a killed process leaves nothing either.
func TestNameless(t *testing.T) {
	dir := t.TempDir()
	watch := testtool.Must(unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC))(t)
	defer unix.Close(watch)
	probe, unnamed := os.OpenFile(dir, os.O_RDWR|unix.O_TMPFILE, 0o600)
	_ = probe.Close()
	_ = testtool.Must(unix.InotifyAddWatch(watch, dir, unix.IN_CREATE))(t)
	if unnamed == nil { // otherwise the file system has no such files
		require.NoError(t, testtool.Must(Nameless(dir))(t).Close())
		_, err := unix.Read(watch, make([]byte, 4096))
		require.ErrorIs(t, err, unix.EAGAIN)
	}
	root := testtool.Must(os.OpenRoot(dir))(t)
	defer root.Close()
	for name, open := range map[string]func() (*os.File, error){
		"by name": func() (*os.File, error) { return Nameless(dir) },
		"in root": func() (*os.File, error) { return NamelessIn(root) },
	} {
		f := testtool.Must(open())(t, name)
		require.NoError(t, testtool.Err(f.WriteAt([]byte("content"), 3)), name)
		got := make([]byte, 10)
		require.NoError(t, testtool.Err(f.ReadAt(got, 0)), name)
		require.Equal(t, "\x00\x00\x00content", string(got), name)
		require.Empty(t, testtool.Must(os.ReadDir(dir))(t), name)
		require.NoError(t, f.Close())
	}
	require.ErrorIs(t, testtool.Err(Nameless(filepath.Join(dir, "none"))), fs.ErrNotExist)
}

// TestReadCached: what the page cache has is read, what it lacks is not waited for, and a read at
// the file's end is answered as ReadAt does.
func TestReadCached(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	want := bytes.Repeat([]byte("content."), 1<<17)
	require.NoError(t, os.WriteFile(path, want, 0o600))
	f := testtool.Must(os.Open(path))(t)
	defer f.Close()
	got := make([]byte, 8192)
	n := testtool.Must(ReadCached(f, got, 4096))(t)
	require.Equal(t, want[4096:4096+8192], got[:n])
	require.ErrorIs(t, testtool.Err(ReadCached(f, got, int64(len(want))-100)), unix.EAGAIN)
	_, err := ReadCached(f, got, int64(len(want)))
	require.Equal(t, io.EOF, err)
	n = testtool.Must(ReadCached(f, nil, 0))(t)
	require.Zero(t, n)

	require.NoError(t, f.Sync())
	require.NoError(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
	for off := int64(0); off < int64(len(want)); off += int64(len(got)) {
		// A file system in memory keeps it, so both answers are right.
		if _, err := ReadCached(f, got, off); err != nil {
			require.ErrorIs(t, err, unix.EAGAIN)
			require.NoError(t, testtool.Err(f.ReadAt(got, off)))
		}
		require.Equal(t, want[off:off+int64(len(got))], got)
	}
}

// TestReadCachedBesideClose: a layer of a disk is closed while somebody still reads it. Such a read
// fails, and never meets another file that has got the same descriptor since. The race detector
// looks on.
func TestReadCachedBesideClose(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, make([]byte, 4096), 0o600))
	for range 50 {
		f := testtool.Must(os.Open(path))(t)
		read := testtool.Go(func() (err error) {
			for p := make([]byte, 4096); err == nil || err == unix.EAGAIN; {
				_, err = ReadCached(f, p, 0)
			}
			return err
		})
		require.NoError(t, f.Close())
		require.ErrorIs(t, <-read, os.ErrClosed)
	}
}

// withoutNoReplace tells the test binary that it is the process whose renameat2(2) fails.
const withoutNoReplace = "KUBEVIRT_DISK_TEST_WITHOUT_NOREPLACE"

// TestMove: a file is moved, and renamed, and never replaces another one; also on a file system
// that cannot do both in one step, as NFS.
func TestMove(t *testing.T) {
	dir := testtool.Must(filepath.EvalSymlinks(t.TempDir()))(t)
	from, to := filepath.Join(dir, "a"), filepath.Join(dir, "b", "a")
	require.NoError(t, os.Mkdir(filepath.Dir(to), 0o700))
	require.NoError(t, os.WriteFile(from, nil, 0o600))
	require.NoError(t, Move(from, to))
	require.NoError(t, os.WriteFile(from, nil, 0o600))
	require.ErrorIs(t, Move(from, to), fs.ErrExist)
	require.ErrorIs(t, Move(from+"none", to+"new"), fs.ErrNotExist)
	require.NoError(t, Rename(from, from+"new", unix.RENAME_NOREPLACE))
	require.NoError(t, os.WriteFile(from, nil, 0o600))
	require.ErrorIs(t, Rename(from, from+"new", unix.RENAME_NOREPLACE), fs.ErrExist)
	if os.Getenv(withoutNoReplace) != "" {
		return
	}
	strace, err := exec.LookPath("strace")
	testtool.Needs(t, "strace", err == nil)
	testtool.Needs(t, "the right to trace a process",
		exec.Command(strace, "-o", os.DevNull, "true").Run() == nil)
	child := exec.Command(strace, "-f", "-o", os.DevNull, "-e", "trace=renameat2",
		"-e", "inject=renameat2:error=EINVAL", os.Args[0], "-test.run=^TestMove$")
	child.Env = append(os.Environ(), withoutNoReplace+"=yes")
	out, err := child.CombinedOutput()
	require.NoError(t, err, string(out))
}

// TestOpenDir checks that the fallback for systems without openat2 gives the same answers.
func TestOpenDir(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	require.NoError(t, os.MkdirAll("a/b", 0o700))
	filetest.Put(t, dir, "a/file", []byte("x"), 0)
	require.NoError(t, os.Symlink("b", "a/link"))
	require.NoError(t, os.Symlink("a", "link"))
	for path, want := range map[string]error{"a/b": nil, "./a/b/": nil, ".": nil, "/": nil,
		dir + "/a": nil, "a/none": unix.ENOENT, "a/file": unix.ENOTDIR,
		"a/link": unix.ELOOP, "link": unix.ELOOP, "link/b": unix.ELOOP, dir + "/link/b": unix.ELOOP,
		"a/link/..": unix.ELOOP, "a/b/..": nil} {
		for _, open := range []func(string) (int, error){openDir, walkDir} {
			fd, err := open(path)
			if want == nil {
				require.NoError(t, err, path)
				require.NoError(t, unix.Close(fd))
			} else {
				require.True(t, errors.Is(err, want), "%s: %v", path, err)
			}
		}
	}
}

// ends fails the test if a call does not end.
func ends(t *testing.T, call func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		call()
	}()
	testtool.Await(t, done, "it waits for somebody to open the other end")
}

// TestOpenFound opens what others have put there: nothing but a regular file counts, and nothing
// waits.
func TestOpenFound(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	require.NoError(t, syscall.Mkfifo(at("fifo"), 0o600))
	require.NoError(t, os.Mkdir(at("dir"), 0o700))
	require.NoError(t, os.WriteFile(at("file"), []byte("x"), 0o600))
	require.NoError(t, os.Symlink("file", at("link")))
	require.NoError(t, os.Symlink("fifo", at("link to fifo")))
	l := testtool.Must(net.Listen("unix", at("socket")))(t)
	defer l.Close()
	root := testtool.Must(OpenRoot(dir))(t)
	defer root.Close()
	for name, want := range map[string]string{"fifo": "a named pipe", "dir": "a directory",
		"link to fifo": "a named pipe", "socket": "a socket", "file": "", "link": ""} {
		for _, open := range []func() (*os.File, error){
			func() (*os.File, error) { return OpenRegular(at(name)) },
			func() (*os.File, error) { return OpenRegularIn(root, name) },
		} {
			ends(t, func() {
				f, err := open()
				if want == "" && err == nil {
					err = f.Close()
				}
				if want == "" {
					require.NoError(t, err)
					return
				}
				require.ErrorAs(t, err, new(*NotRegularError))
				require.ErrorContains(t, err, want)
			})
		}
		ends(t, func() {
			_, err := OpenRoot(at(name))
			require.Equal(t, name == "dir", err == nil)
			_, err = OpenDir(at(name))
			require.Equal(t, name == "dir", err == nil)
		})
	}
	require.ErrorContains(t, testtool.Err(OpenRegular("/dev/zero")), "a character device")
	ends(t, func() {
		_, err := readWithin(at("fifo"), time.Millisecond) // nobody writes to it
		require.ErrorContains(t, err, "did not end")
	})
}

// TestOpenRegularFile: a file is made and written to, and what has the name already is opened only
// if it is a regular file.
func TestOpenRegularFile(t *testing.T) {
	dir := t.TempDir()
	file, fifo := filepath.Join(dir, "file"), filepath.Join(dir, "fifo")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	require.ErrorIs(t, testtool.Err(OpenRegularFile(file, os.O_RDWR, 0)), os.ErrNotExist)
	for range 2 {
		f := testtool.Must(OpenRegularFile(file, os.O_RDWR|os.O_CREATE, 0o600))(t)
		require.NoError(t, testtool.Err(f.WriteAt([]byte("text"), 0)))
		require.NoError(t, f.Close())
	}
	_, err := OpenRegularFile(fifo, os.O_RDWR|os.O_CREATE, 0o600)
	require.ErrorAs(t, err, new(*NotRegularError))
}

// TestReadText reads the pipe of a process substitution, and no more than settings have.
func TestReadText(t *testing.T) {
	r, w := testtool.Must2(os.Pipe())(t)
	defer r.Close()
	require.NoError(t, testtool.Err(w.WriteString("text")))
	require.NoError(t, w.Close())
	text := testtool.Must(ReadText(filepath.Join("/proc/self/fd", fmt.Sprint(r.Fd()))))(t)
	require.Equal(t, "text", string(text))
	large := filepath.Join(t.TempDir(), "large")
	require.NoError(t, os.WriteFile(large, make([]byte, MaxText+1), 0o600))
	require.ErrorContains(t, testtool.Err(ReadText(large)), "larger than")
}
