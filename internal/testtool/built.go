package testtool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/flock"
)

// buildTimeout is how long the tests of a package wait for a build. After that, they no longer do.
const buildTimeout = 40 * time.Minute

// waitEnds is when the tests of this package stop waiting. The first that waits sets it.
var waitEnds = sync.OnceValue(func() time.Time { return time.Now().Add(buildTimeout) })

// Built requires files that a script builds into a directory. While the script holds the file
// "lock" there, Built waits for them. If one is missing then, the test is skipped, or fails if
// every tool is required.
func Built(t testing.TB, script, dir string, names ...string) {
	t.Helper()
	built(t, script, dir, Required(), names)
}

// BuiltOrSkip is Built for what not even CI requires: what takes so long to build that a machine
// without it leaves it out, and says so.
func BuiltOrSkip(t testing.TB, script, dir string, names ...string) {
	t.Helper()
	built(t, script, dir, false, names)
}

func built(t testing.TB, script, dir string, required bool, names []string) {
	t.Helper()
	name, err := await(dir, names, waitEnds)
	switch {
	case err != nil:
		t.Fatalf("%s: %v", script, err)
	case name == "":
	case required:
		t.Fatalf("%s is required and not in %s: %s builds it. If it ran beside the tests, its last"+
			" lines say what failed", name, dir, script)
	default:
		t.Skipf("not run: needs %s, which %s builds", name, script)
	}
}

// await waits until all files are in a directory, its build has ended, or the time has. It returns
// the first file that is missing. Each file appears when it is complete.
func await(dir string, names []string, ends func() time.Time) (missing string, err error) {
	for {
		// The build may end while this looks for files, so look for the build first.
		building, err := locked(filepath.Join(dir, "lock"))
		if err != nil {
			return "", err
		}
		i := slices.IndexFunc(names, func(name string) bool {
			_, err := os.Stat(filepath.Join(dir, name))
			return err != nil
		})
		if i < 0 {
			return "", nil
		}
		if !building {
			return names[i], nil
		}
		if !time.Now().Before(ends()) {
			return "", fmt.Errorf("waited in vain for %s: the build still holds %s", names[i],
				filepath.Join(dir, "lock"))
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// locked reports whether somebody holds the lock of a file. The build does while it runs.
func locked(path string) (bool, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	err = flock.Lock(f, unix.LOCK_SH|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return true, nil
	}
	return false, err
}
