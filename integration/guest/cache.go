package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// kernelPackage depends on the package of Debian's current kernel.
const kernelPackage = "linux-image-amd64"

// FetchError says that a package could not be had: apt-get is missing, knows no such package, or has no network.
type FetchError struct {
	Package string
	Output  string // what apt-get printed
	Err     error
}

func (e *FetchError) Error() string {
	return fmt.Sprintf("the Debian package %s cannot be fetched: %v: %s", e.Package, e.Err, strings.TrimSpace(e.Output))
}

func (e *FetchError) Unwrap() error { return e.Err }

// cache is a directory of unpacked packages: PACKAGE/root is the tree, PACKAGE/control its control paragraph. A package is
// there completely or not at all. It is locked against other processes while it is open.
type cache struct {
	dir  string
	lock *os.File
}

func openCache(dir string) (*cache, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		lock.Close()
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	return &cache{dir: dir, lock: lock}, nil
}

// close gives the lock back.
func (c *cache) close() { c.lock.Close() }

// kernel returns the tree of the kernel's package.
func (c *cache) kernel() (string, error) {
	_, depends, err := c.fetch(kernelPackage)
	if err != nil {
		return "", err
	}
	for _, name := range depends {
		if strings.HasPrefix(name, "linux-image-") {
			tree, _, err := c.fetch(name)
			return tree, err
		}
	}
	return "", fmt.Errorf("%s depends on no kernel, only on %v", kernelPackage, depends)
}

// unpack returns the trees of packages and of the libraries that they need, those of the packages last, as these are to win.
func (c *cache) unpack(names []string) ([]string, error) {
	var trees []string
	seen := map[string]bool{}
	var visit func(name string) error
	visit = func(name string) error {
		if seen[name] {
			return nil
		}
		seen[name] = true
		tree, depends, err := c.fetch(name)
		if err != nil {
			return err
		}
		for _, dep := range depends {
			// What a program needs to start is its libraries. Other dependencies (debconf, udev, an init system) are for the
			// installation, or are busybox's part here.
			if !strings.HasPrefix(dep, "lib") {
				continue
			}
			if err := visit(dep); err != nil {
				return err
			}
		}
		trees = append(trees, tree)
		return nil
	}
	for _, name := range names {
		if err := visit(name); err != nil {
			return nil, err
		}
	}
	return trees, nil
}

// fetch returns a package's tree and its dependencies, from the cache or by apt-get.
func (c *cache) fetch(name string) (tree string, depends []string, err error) {
	home := filepath.Join(c.dir, name)
	control, err := os.ReadFile(filepath.Join(home, "control"))
	if errors.Is(err, fs.ErrNotExist) {
		if err := c.download(name, home); err != nil {
			return "", nil, err
		}
		control, err = os.ReadFile(filepath.Join(home, "control"))
	}
	if err != nil {
		return "", nil, err
	}
	return filepath.Join(home, "root"), dependencies(string(control)), nil
}

// download fetches a package and unpacks it beside its place, then moves it there.
func (c *cache) download(name, home string) error {
	work, err := os.MkdirTemp(c.dir, ".new-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	// Not asked to, apt-get downloads as a user that cannot write into this directory, and warns about it.
	get := func(args ...string) *exec.Cmd {
		cmd := exec.Command("apt-get", append([]string{"-q", "-o", "APT::Sandbox::User=root"}, args...)...)
		cmd.Dir = work
		return cmd
	}
	out, err := get("download", name).CombinedOutput()
	if err != nil && os.Geteuid() == 0 {
		// The lists of packages are absent on a fresh machine, and on an old one they name files that are gone.
		if more, updateErr := get("update").CombinedOutput(); updateErr != nil {
			return &FetchError{Package: name, Output: string(out) + string(more), Err: updateErr}
		}
		out, err = get("download", name).CombinedOutput()
	}
	if err != nil {
		return &FetchError{Package: name, Output: string(out), Err: err}
	}
	debs, err := filepath.Glob(filepath.Join(work, "*.deb"))
	if err != nil {
		return err
	}
	if len(debs) != 1 {
		return &FetchError{Package: name, Output: string(out), Err: fmt.Errorf("apt-get left %d files", len(debs))}
	}
	if out, err := exec.Command("dpkg-deb", "-x", debs[0], filepath.Join(work, "root")).CombinedOutput(); err != nil {
		return fmt.Errorf("unpack %s: %w: %s", debs[0], err, out)
	}
	control, err := exec.Command("dpkg-deb", "-f", debs[0]).Output()
	if err != nil {
		return fmt.Errorf("read %s: %w", debs[0], err)
	}
	if err := os.Remove(debs[0]); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(work, "control"), control, 0o644); err != nil {
		return err
	}
	if err := os.Chmod(work, 0o755); err != nil {
		return err
	}
	return os.Rename(work, home)
}

// dependencies lists the packages that a control paragraph depends on: of alternatives the first, without versions.
func dependencies(control string) []string {
	var names []string
	for line := range strings.Lines(control) {
		field, list, _ := strings.Cut(line, ":")
		if field != "Depends" && field != "Pre-Depends" {
			continue
		}
		for dep := range strings.SplitSeq(list, ",") {
			name, _, _ := strings.Cut(strings.TrimSpace(dep), " ")
			name, _, _ = strings.Cut(name, ":")
			if name != "" && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}
