package osfile

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

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
