package plane

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/testtool"
)

// buildPatience is how long the tests of a package wait for a build. After that, they no longer do.
const buildPatience = 40 * time.Minute

// waitEnds is when the tests of this package stop waiting. The first that waits sets it.
var waitEnds = sync.OnceValue(func() time.Time { return time.Now().Add(buildPatience) })

// Binaries returns the directory where scripts/build-kubernetes.sh has put the binaries that it
// built from the present modules. While the script runs, Binaries waits for those that are named.
// If one is missing then, the test is skipped, or fails if every tool is required.
func Binaries(t testing.TB, names ...string) string {
	t.Helper()
	dir, err := binaries()
	if err != nil {
		t.Fatal(err)
	}
	name, err := await(dir, names, waitEnds)
	switch {
	case err != nil:
		t.Fatal(err)
	case name == "":
	case testtool.Required():
		t.Fatalf("%s is required and not in %s: scripts/build-kubernetes.sh builds it. If it ran"+
			" beside the tests, its last lines say what failed", name, dir)
	default:
		t.Skipf("needs %s, which scripts/build-kubernetes.sh builds", name)
	}
	return dir
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
			return "", fmt.Errorf("waited in vain for scripts/build-kubernetes.sh to build %s: "+
				"it still holds %s", names[i], filepath.Join(dir, "lock"))
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

// binaries names the directory by the same hash as the script.
func binaries() (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	var files []string
	for _, name := range []string{"go.mod", "go.sum"} {
		found, err := filepath.Glob(filepath.Join(root, "integration/kubernetes/parts/*", name))
		if err != nil {
			return "", err
		}
		slices.Sort(found)
		files = append(files, found...)
	}
	sum := sha256.New()
	for _, file := range append(files, filepath.Join(root, "scripts/build-kubernetes.sh")) {
		data, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		sum.Write(data)
	}
	place := os.Getenv("KUBEVIRT_DISK_KUBERNETES")
	if place == "" {
		place = filepath.Join(root, "cache/kubernetes")
	}
	return filepath.Join(place, fmt.Sprintf("%x", sum.Sum(nil))[:16]), nil
}

// Root returns the directory of this module.
func Root() (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("go list -m: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}
