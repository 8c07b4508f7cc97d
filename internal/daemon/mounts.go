package daemon

import (
	"bufio"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Mounts returns the directories that may be mounts of volumes for disks: the writable ones,
// without the directories in own, those around them and in them, and the system's. If nobody may
// read the list of mounts, there are none.
func Mounts(own []string) ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return mountsIn(f, own)
}

// mountsIn reads a list of mounts in the form of /proc/self/mountinfo (proc(5)).
func mountsIn(mounts io.Reader, own []string) (found []string, err error) {
	lines := bufio.NewScanner(mounts)
	for lines.Scan() {
		before, after, _ := strings.Cut(lines.Text(), " - ")
		fields, source := strings.Fields(before), strings.Fields(after)
		if len(fields) < 6 || len(source) < 1 || slices.Contains(notForDisks, source[0]) ||
			slices.Contains(strings.Split(fields[5], ","), "ro") {
			continue
		}
		// Spaces and the like are octal escapes, as in Go.
		dir, err := strconv.Unquote(`"` + strings.ReplaceAll(fields[4], `"`, `\"`) + `"`)
		if err != nil || isOwn(dir, own) || slices.Contains(found, dir) {
			continue
		}
		if !cannotHaveDisks(dir) {
			found = append(found, dir)
		}
	}
	return found, lines.Err()
}

// cannotHaveDisks reports whether a mount is no directory that this user may write. With any other
// error it may be the claim: without it, the machine would get new disks.
func cannotHaveDisks(dir string) bool {
	info, err := os.Stat(dir)
	if err == nil && !info.IsDir() {
		return true
	}
	if err == nil {
		err = unix.Access(dir, unix.W_OK|unix.X_OK)
	}
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) ||
		errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EROFS)
}

// notForDisks are file systems in memory, or the container's own.
var notForDisks = []string{"proc", "sysfs", "tmpfs", "devtmpfs", "devpts", "mqueue",
	"cgroup", "cgroup2", "overlay", "securityfs", "debugfs", "tracefs", "bpf", "pstore",
	"hugetlbfs", "ramfs", "binfmt_misc", "nsfs", "configfs", "fusectl"}

// isOwn reports whether a directory is one of own, is in one or has one in it, or is the system's.
func isOwn(dir string, own []string) bool {
	below := func(a, b string) bool {
		rel, err := filepath.Rel(b, a)
		return err == nil && filepath.IsLocal(rel)
	}
	for _, system := range []string{"/proc", "/sys", "/dev", "/etc"} {
		if below(dir, system) {
			return true
		}
	}
	for _, o := range own {
		// A mount point may have another name by a link, as /var/run and /run.
		if real, err := filepath.EvalSymlinks(o); err == nil {
			o = real
		}
		if o != "" && (below(dir, o) || below(o, dir)) {
			return true
		}
	}
	return false
}
