package guestinit

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

type mountPoint struct {
	kind, at string
	flags    uintptr
	data     string
	// optional: programs work without it, and some kernels do not have it
	optional bool
}

const harmless = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// mountPoints are the mounts that programs in a container expect. /run and /tmp are the image's, as
// with container runtimes: programs need the directories in them, with their owners.
var mountPoints = []mountPoint{
	{kind: "proc", at: "/proc", flags: harmless},
	{kind: "sysfs", at: "/sys", flags: harmless},
	{kind: "devtmpfs", at: "/dev", flags: unix.MS_NOSUID, data: "mode=0755"},
	{kind: "devpts", at: "/dev/pts", flags: unix.MS_NOSUID | unix.MS_NOEXEC,
		data: "gid=5,mode=0620,ptmxmode=0666"},
	{kind: "tmpfs", at: "/dev/shm", flags: harmless, data: "mode=1777"},
	{kind: "mqueue", at: "/dev/mqueue", flags: harmless, optional: true},
	{kind: "cgroup2", at: "/sys/fs/cgroup", flags: harmless, optional: true},
}

// onReadOnly are mounts for the writes of programs, on a read-only disk.
var onReadOnly = []mountPoint{
	{kind: "tmpfs", at: "/run", flags: unix.MS_NOSUID | unix.MS_NODEV, data: "mode=0755"},
	{kind: "tmpfs", at: "/tmp", flags: unix.MS_NOSUID | unix.MS_NODEV, data: "mode=1777"},
	{kind: "tmpfs", at: "/var/tmp", flags: unix.MS_NOSUID | unix.MS_NODEV, data: "mode=1777",
		optional: true},
}

// deviceLinks are the links in /dev that programs expect in addition to the kernel's devices.
var deviceLinks = [][2]string{
	{"/proc/self/fd", "/dev/fd"}, {"/proc/self/fd/0", "/dev/stdin"},
	{"/proc/self/fd/1", "/dev/stdout"}, {"/proc/self/fd/2", "/dev/stderr"},
}

// mountAll makes the mounts of a container in the root of the image.
func mountAll(readOnly bool) error {
	list := mountPoints
	if readOnly {
		list = append(append([]mountPoint(nil), mountPoints...), onReadOnly...)
	}
	for _, m := range list {
		// On a read-only disk, the mount fails if the directory is missing.
		_ = os.MkdirAll(m.at, 0o755)
		err := unix.Mount(m.kind, m.at, m.kind, m.flags, m.data)
		if err != nil && !m.optional {
			return fmt.Errorf("%s cannot be mounted on %s of the image: %w", m.kind, m.at, err)
		}
	}
	for _, link := range deviceLinks {
		if err := os.Symlink(link[0], link[1]); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return nil
}

// makeDirectories makes directories that runtimes make, if they are missing.
func makeDirectories(p process) {
	if p.ReadOnly {
		return
	}
	_ = os.Mkdir("/run", 0o755) // it mostly exists
	if os.Mkdir("/tmp", 0o755) == nil {
		_ = os.Chmod("/tmp", 0o1777) // regardless of the umask
	}
	for _, dir := range p.Volumes {
		_ = os.MkdirAll(dir, 0o755) // the program will report it
	}
}

// networkFiles are files that the init writes for programs while the machine runs.
var networkFiles = []string{"resolv.conf", "hosts", "hostname"}

// networkDir is the directory of the networkFiles in the initramfs.
const networkDir = "/run"

// openNetworkFiles opens the init's files while their directory can still be reached.
func openNetworkFiles() (files []*os.File, err error) {
	for _, name := range networkFiles {
		f, err := os.OpenFile(filepath.Join(networkDir, name), unix.O_PATH, 0)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	return files, nil
}

// bindNetworkFiles mounts the init's files over those of the image, as container runtimes do, so
// that they do not stay on the disk. It leaves anything but a file in the image as it is, and
// reports that.
func bindNetworkFiles(files []*os.File, say io.Writer) error {
	for i, f := range files {
		at, err := networkFile("/etc/" + networkFiles[i])
		if err != nil {
			fmt.Fprintf(say, "kubevirt-disk-init: %v\n", err)
			f.Close()
			continue
		}
		source := fmt.Sprintf("/proc/self/fd/%d", f.Fd())
		err = unix.Mount(source, at, "", unix.MS_BIND, "")
		f.Close()
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%s cannot be mounted: %w", at, err)
		}
	}
	return nil
}

// networkFile returns the file of the image that a name leads to, and makes it if it is missing. In
// an image, it may be a link to /dev/null, or not be a file: then programs see that.
func networkFile(name string) (string, error) {
	at := followLinks(name)
	_ = os.MkdirAll(filepath.Dir(at), 0o755)
	// On a read-only disk, it cannot be made, and there is nothing to mount on.
	const exclusive = os.O_CREATE | os.O_EXCL | os.O_WRONLY
	if empty, err := os.OpenFile(at, exclusive, 0o644); err == nil {
		empty.Close()
	}
	switch info, err := os.Stat(at); {
	case errors.Is(err, os.ErrNotExist):
		return at, nil
	case err != nil:
		return "", fmt.Errorf("%s of the image stays as it is: %w", name, err)
	case !info.Mode().IsRegular():
		return "", fmt.Errorf("%s of the image stays as it is: %q is not a regular file", name, at)
	}
	return at, nil
}

// maxLinks is as many symbolic links as the kernel follows.
const maxLinks = 40

// followLinks returns the target of a path, even if no file exists there: images have links to
// files of a systemd that does not run.
func followLinks(file string) string {
	for range maxLinks {
		to, err := os.Readlink(file)
		if err != nil {
			return file
		}
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(file), to)
		}
		file = to
	}
	return file
}

// loadModules loads all modules of the initramfs, in the order that adapter/initrd has recorded. A
// module without a device does nothing.
func loadModules(dir string, insert func(file string) error) error {
	names, err := os.ReadFile(filepath.Join(dir, "order"))
	for _, name := range strings.Fields(string(names)) {
		if failed := insert(filepath.Join(dir, name+".ko")); failed != nil {
			err = errors.Join(err, fmt.Errorf("kernel module %s: %w", name, failed))
		}
	}
	return err
}

func insertModule(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	err = unix.FinitModule(int(f.Fd()), "", 0)
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EEXIST) {
		return nil // it is for another processor, or is loaded already
	}
	return err
}
