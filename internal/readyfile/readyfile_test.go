package readyfile

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

func testReadyFile(path string) File {
	return File{Path: path, Name: "--ready-file (READY_FILE)"}
}

func TestReadyFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "healthy")
	r := testReadyFile(path)
	require.NoError(t, r.Clear(), "none is there")
	require.NoError(t, r.Write())
	info := testtool.Must(os.Stat(path))(t)
	require.Equal(t, os.FileMode(0o644), info.Mode())
	files := testtool.Must(os.ReadDir(dir))(t)
	require.Len(t, files, 1, "nothing temporary is left")
	require.NoError(t, r.Remove())
	require.NoFileExists(t, path)
	require.NoError(t, r.Write(), "again")
	require.NoError(t, os.Remove(path))
	require.NoError(t, r.Remove(), "it was removed already")
	var none File
	require.NoError(t, none.Clear())
	require.NoError(t, none.Write())
	require.NoError(t, none.Remove())

	require.NoError(t, os.MkdirAll(filepath.Join(path, "sub"), 0o755))
	require.Error(t, r.Clear())
	require.Error(t, r.Write())
	require.NoError(t, r.Remove())
	require.DirExists(t, path, "the directory is not this daemon's")
	files = testtool.Must(os.ReadDir(dir))(t)
	require.Len(t, files, 1)
}

// TestReadyFileLeavesWhatIsNotItsOwn replaces the file while the disks are made. A daemon that
// fails or stops leaves the replacement alone.
func TestReadyFileLeavesWhatIsNotItsOwn(t *testing.T) {
	for name, place := range map[string]func(path string) error{
		"a file": func(path string) error {
			return os.WriteFile(path, []byte("precious"), 0o644)
		},
		"a like file": func(path string) error {
			return os.WriteFile(path, []byte("reader"), 0o644)
		},
		"a directory": func(path string) error { return os.Mkdir(path, 0o755) },
		"a link":      func(path string) error { return os.Symlink("/nowhere", path) },
		"a pipe":      func(path string) error { return unix.Mkfifo(path, 0o644) },
	} {
		for _, ready := range []bool{false, true} {
			path := filepath.Join(t.TempDir(), "healthy")
			r := testReadyFile(path)
			require.NoError(t, r.Clear())
			if ready {
				require.NoError(t, r.Write())
				require.NoError(t, os.Remove(path))
			}
			require.NoError(t, place(path))
			if !ready {
				require.ErrorContains(t, r.Write(), "would take the place of", name)
			}
			require.NoError(t, r.Remove(), name)
			require.NoError(t, testtool.Err(os.Lstat(path)), name)
		}
	}
}

// TestReadyFileIsRemovedWhateverItHolds: a person may have written into the file. It is removed
// nevertheless, so that no probe takes a stopped daemon for ready.
func TestReadyFileIsRemovedWhateverItHolds(t *testing.T) {
	r := testReadyFile(filepath.Join(t.TempDir(), "healthy"))
	require.NoError(t, r.Write())
	require.NoError(t, os.WriteFile(r.Path, []byte("yes"), 0o644))
	require.NoError(t, r.Remove())
	require.NoFileExists(t, r.Path)
}

// TestReadyFileOfTwo: the first daemon that becomes ready gets the file. The other one neither
// takes it over nor removes it.
func TestReadyFileOfTwo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "healthy")
	first, second := testReadyFile(path), testReadyFile(path)
	require.NoError(t, first.Clear())
	require.NoError(t, second.Clear(), "both start")
	require.NoError(t, first.Write())
	for _, take := range []func() error{second.Write, second.Clear} {
		err := take()
		require.ErrorContains(t, err, "of another running daemon")
		require.ErrorContains(t, err, "--ready-file (READY_FILE)")
	}
	require.NoError(t, second.Remove())
	require.FileExists(t, path)
	require.NoError(t, first.Remove())
	require.NoFileExists(t, path)

	require.NoError(t, first.Write())
	require.NoError(t, first.made.Close()) // as kill -9 does
	require.NoError(t, second.Clear())
	require.NoFileExists(t, path)
}

// TestReadyFileWithoutSpace limits files to three bytes, like a full file system. The limit applies
// to a whole process, so the test runs in a process of its own: this one may have to write a log
// for go test.
func TestReadyFileWithoutSpace(t *testing.T) {
	const limited = "KUBEVIRT_DISK_TEST_LIMITED"
	if os.Getenv(limited) == "" {
		cmd := exec.Command(os.Args[0], "-test.v", "-test.run=^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), limited+"=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "--- PASS: "+t.Name())
		return
	}
	dir := t.TempDir()
	r := testReadyFile(filepath.Join(dir, "healthy"))
	require.NoError(t, r.Clear())
	var before unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_FSIZE, &before))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 3, Max: before.Max}))
	err := r.Write()
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &before))
	require.ErrorIs(t, err, unix.EFBIG)
	require.ErrorContains(t, err, "--ready-file (READY_FILE)")
	require.Empty(t, testtool.Must(os.ReadDir(dir))(t))
	require.NoError(t, r.Remove())
}

func TestReadyFileInNoDirectory(t *testing.T) {
	r := testReadyFile(filepath.Join(t.TempDir(), "none", "healthy"))
	err := r.Clear()
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.ErrorContains(t, err, "--ready-file (READY_FILE)")
}

// TestReadyFileBehindALink: the directory may be reached by a link, such as /var/run.
func TestReadyFileBehindALink(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(dir, link))
	f := &File{Path: filepath.Join(link, "ready")}
	require.NoError(t, f.Clear())
	require.NoError(t, f.Write())
	require.FileExists(t, filepath.Join(dir, "ready"))
	require.NoError(t, f.Remove())
	require.NoFileExists(t, filepath.Join(dir, "ready"))
}

// TestOneOfTwoGetsTheFile: of two daemons that become ready at once, one fails, and the file stays
// the other one's.
func TestOneOfTwoGetsTheFile(t *testing.T) {
	for range 50 {
		path := filepath.Join(t.TempDir(), "ready")
		both := []*File{{Path: path}, {Path: path}}
		var got atomic.Int32
		var all sync.WaitGroup
		for _, f := range both {
			all.Go(func() {
				if f.Write() == nil {
					got.Add(1)
				}
			})
		}
		all.Wait()
		require.EqualValues(t, 1, got.Load())
		for _, f := range both {
			if f.made == nil {
				require.NoError(t, f.Remove())
			}
		}
		require.FileExists(t, path)
	}
}
