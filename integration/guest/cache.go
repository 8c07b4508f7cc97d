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
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// kernelPackage depends on the package of Debian's current kernel.
const kernelPackage = "linux-image-amd64"

// FetchError says that packages could not be fetched: apt-get is missing, does not know one of
// them, or has no network.
type FetchError struct {
	Packages []string
	Output   string // what apt-get printed
	Err      error
}

func (e *FetchError) Error() string {
	return fmt.Sprintf("the Debian packages %s cannot be fetched: %v: %s",
		strings.Join(e.Packages, ", "), e.Err, strings.TrimSpace(e.Output))
}

func (e *FetchError) Unwrap() error { return e.Err }

// Made ends a test whose guest could not be made: the test is skipped if packages could not be
// fetched, unless everything is required.
func Made(t testing.TB, err error) {
	t.Helper()
	if errors.As(err, new(*FetchError)) {
		testtool.Needs(t, "packages: "+err.Error(), false)
	}
	require.NoError(t, err)
}

// Release is a release of Debian other than this machine's.
type Release struct {
	Suite  string // "trixie"
	Mirror string // the address of a mirror
}

// cache is a directory of unpacked packages: PACKAGE/root is the tree, PACKAGE/control its control
// paragraph. A package is there completely or not at all. While the cache is open, a lock keeps
// other processes out.
type cache struct {
	dir  string
	lock *os.File
	apt  []string // arguments of apt-get
	own  bool     // apt-get has lists of its own here
}

func openCache(dir string, release *Release) (*cache, error) {
	if release != nil {
		dir = filepath.Join(dir, release.Suite)
	}
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
	c := &cache{dir: dir, lock: lock, apt: []string{"-q", "-o", "APT::Sandbox::User=root",
		"-o", "Acquire::Retries=3"}}
	if release != nil {
		if err := c.lists(release); err != nil {
			c.close()
			return nil, err
		}
	}
	return c, nil
}

// keyring has the keys that Debian's releases are signed with.
const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"

// lists has apt-get use lists of that release, beside those of the machine.
func (c *cache) lists(release *Release) error {
	c.own = true
	home := filepath.Join(c.dir, ".apt")
	for _, sub := range []string{"lists/partial", "archives/partial", "etc"} {
		if err := os.MkdirAll(filepath.Join(home, sub), 0o755); err != nil {
			return err
		}
	}
	status, sources := filepath.Join(home, "status"), filepath.Join(home, "etc", "sources.list")
	if err := os.WriteFile(status, nil, 0o644); err != nil {
		return err
	}
	for key, value := range map[string]string{"Dir::State::lists": filepath.Join(home, "lists"),
		"Dir::State::status": status, "Dir::Cache": home, "Dir::Etc::sourcelist": sources,
		"Dir::Etc::sourceparts": filepath.Join(home, "etc")} {
		c.apt = append(c.apt, "-o", key+"="+value)
	}
	return os.WriteFile(sources, []byte(fmt.Sprintf("deb [signed-by=%s] %s %s main\n", keyring,
		release.Mirror, release.Suite)), 0o644)
}

// close releases the lock.
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

// unpack returns the trees of packages and of the libraries that they need. The packages come last,
// so that their files win.
func (c *cache) unpack(names []string) ([]string, error) {
	if err := c.fetchClosure(names); err != nil {
		return nil, err
	}
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
		for _, library := range libraries(depends) {
			if err := visit(library); err != nil {
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

// fetchClosure fetches packages and the libraries that they need into the cache. It fetches one
// level of dependencies at a time, because apt-get takes longer to start than to fetch.
func (c *cache) fetchClosure(names []string) error {
	seen := map[string]bool{}
	for level := names; len(level) > 0; {
		if err := c.require(level); err != nil {
			return err
		}
		var next []string
		for _, name := range level {
			seen[name] = true
		}
		for _, name := range level {
			_, depends, err := c.fetch(name)
			if err != nil {
				return err
			}
			for _, library := range libraries(depends) {
				if !seen[library] {
					seen[library] = true
					next = append(next, library)
				}
			}
		}
		level = next
	}
	return nil
}

// libraries are the dependencies that a program needs to start. The others (debconf, udev, an init
// system) are for the installation, or busybox replaces them.
func libraries(depends []string) []string {
	return slices.DeleteFunc(depends,
		func(name string) bool { return !strings.HasPrefix(name, "lib") })
}

// fetch returns a package's tree and its dependencies, from the cache or with apt-get.
func (c *cache) fetch(name string) (tree string, depends []string, err error) {
	if err := c.require([]string{name}); err != nil {
		return "", nil, err
	}
	control, err := os.ReadFile(filepath.Join(c.dir, name, "control"))
	if err != nil {
		return "", nil, err
	}
	return filepath.Join(c.dir, name, "root"), dependencies(string(control)), nil
}

// require downloads the packages that are not in the cache.
func (c *cache) require(names []string) error {
	var missing []string
	for _, name := range names {
		_, err := os.Stat(filepath.Join(c.dir, name, "control"))
		if errors.Is(err, fs.ErrNotExist) {
			missing = append(missing, name)
		} else if err != nil {
			return err
		}
	}
	if len(missing) == 0 {
		return nil
	}
	work, err := os.MkdirTemp(c.dir, ".new-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	debs, err := c.download(work, missing)
	if err != nil {
		return err
	}
	for name, deb := range debs {
		if err := install(deb, filepath.Join(work, name), filepath.Join(c.dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// download fetches packages into a directory and returns their files by name.
func (c *cache) download(dir string, names []string) (map[string]string, error) {
	// By default apt-get downloads as a user that cannot write into this directory, and warns about
	// it. Retry, because a mirror may fail once.
	get := func(args ...string) ([]byte, error) {
		cmd := exec.Command("apt-get", append(slices.Clone(c.apt), args...)...)
		cmd.Dir = dir
		return cmd.CombinedOutput()
	}
	all := append([]string{"download"}, names...)
	out, err := get(all...)
	if err != nil && (os.Geteuid() == 0 || c.own) {
		// A fresh machine has no package lists, and those of an old one name files that are gone.
		if more, updateErr := get("update"); updateErr != nil {
			return nil, &FetchError{Packages: names, Output: string(out) + string(more),
				Err: updateErr}
		}
		out, err = get(all...)
	}
	if err != nil {
		return nil, &FetchError{Packages: names, Output: string(out), Err: err}
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil {
		return nil, err
	}
	debs := map[string]string{}
	for _, file := range files {
		name, _, _ := strings.Cut(filepath.Base(file), "_")
		debs[name] = file
	}
	for _, name := range names {
		if debs[name] == "" {
			return nil, &FetchError{Packages: names, Output: string(out),
				Err: fmt.Errorf("apt-get fetched no file for %s", name)}
		}
	}
	return debs, nil
}

// install unpacks a package into a work directory, then moves it to its place.
func install(deb, work, home string) error {
	if err := os.Mkdir(work, 0o755); err != nil {
		return err
	}
	if out, err := exec.Command("dpkg-deb", "-x", deb,
		filepath.Join(work, "root")).CombinedOutput(); err != nil {
		return fmt.Errorf("unpack %s: %w: %s", deb, err, out)
	}
	if err := plain(filepath.Join(work, "root")); err != nil {
		return fmt.Errorf("unpack %s: %w", deb, err)
	}
	control, err := exec.Command("dpkg-deb", "-f", deb).Output()
	if err != nil {
		return fmt.Errorf("read %s: %w", deb, err)
	}
	if err := os.WriteFile(filepath.Join(work, "control"), control, 0o644); err != nil {
		return err
	}
	return os.Rename(work, home)
}

// plain has the modules of an unpacked kernel where Debian 12's are, and as they are there: those
// of later releases lie below /usr and are packed. It needs xz.
func plain(tree string) error {
	modules := filepath.Join(tree, "usr", "lib", "modules")
	if _, err := os.Stat(modules); err != nil {
		return nil
	}
	if out, err := exec.Command("find", modules, "-name", "*.ko.xz", "-exec", "xz", "-d", "{}",
		"+").CombinedOutput(); err != nil {
		return fmt.Errorf("xz: %w: %s", err, out)
	}
	if err := os.MkdirAll(filepath.Join(tree, "lib"), 0o755); err != nil {
		return err
	}
	return os.Rename(modules, filepath.Join(tree, "lib", "modules"))
}

// dependencies lists the packages that a control paragraph depends on, without versions, and only
// the first of alternatives.
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
