// Package guest makes a small Linux guest for tests: Debian's kernel, and an initramfs with
// busybox, a test's script, and the kernel modules and packages that the test names. It installs
// nothing on this machine. It fetches packages with apt-get, unpacks them into a directory, and
// keeps them for the next run. It works on Debian and its derivatives, on amd64.
//
// QEMU boots the guest without a boot loader and without a disk of its own:
//
//	qemu-system-x86_64 -kernel KERNEL -initrd INITRD \
//	    -append "console=ttyS0 quiet panic=-1" -nographic -no-reboot ...
//
// The script's standard output and standard error go to the console. When the script ends, the
// guest prints Ended and the exit status, and powers off.
package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"kubevirt.io/disk/adapter/initrd"
)

// Ended begins the guest's last line. A space and the exit status of Options.Init follow.
const Ended = "guest: the script has ended with status"

// Options describe a guest.
type Options struct {
	// Init is a script for /bin/sh, which is dash. When it runs, /proc, /sys, /dev and /run are
	// mounted, busybox's commands are in PATH, and Modules are loaded. It needs no "#!" line.
	Init string

	// Modules are the names of kernel modules, for example "virtio_scsi". They are loaded in this
	// order, each after its dependencies.
	Modules []string

	// Packages are Debian packages. They are unpacked into the guest's root, with the libraries
	// that they depend on. Their commands take precedence over busybox's.
	Packages []string

	// Files are additional files by their absolute paths. A file that begins with "#!" is
	// executable.
	Files map[string]string

	// CacheDir keeps the fetched packages, about 500 MiB for the kernel. Processes may share it.
	CacheDir string

	// Release is the release of Debian that packages and kernel are from; nil: this machine's.
	Release *Release
}

// Build writes a guest's kernel and initramfs into the existing directory dir, and returns their
// paths, for QEMU. The error is a *FetchError if a package cannot be fetched. Build needs xz.
func Build(dir string, opt Options) (kernel, initrd string, err error) {
	return buildWith(dir, opt, func(packed, to string) error {
		unpacked := filepath.Join(filepath.Dir(packed), "vmlinux") // for the next guest, too
		if _, err := os.Stat(unpacked); errors.Is(err, fs.ErrNotExist) {
			err = unpackKernel(packed, unpacked)
			if err != nil {
				return err
			}
		}
		return copyFile(unpacked, to)
	})
}

// buildWith is Build with what makes the kernel of Debian's.
func buildWith(dir string, opt Options, makeKernel func(packed, to string) error) (kernel,
	ramfs string, err error) {
	if opt.CacheDir == "" {
		return "", "", errors.New("guest: CacheDir is empty: name the directory that keeps the " +
			"packages")
	}
	cache, err := openCache(opt.CacheDir, opt.Release)
	if err != nil {
		return "", "", fmt.Errorf("guest: %w", err)
	}
	defer cache.close()
	kernelTree, err := cache.kernel()
	if err != nil {
		return "", "", fmt.Errorf("guest: %w", err)
	}
	// Busybox's own shell would prefer its applets to the commands of a package.
	trees, err := cache.unpack(append([]string{"busybox-static", "dash"}, opt.Packages...))
	if err != nil {
		return "", "", fmt.Errorf("guest: %w", err)
	}
	packed, err := initrd.Kernel(kernelTree)
	if err != nil {
		return "", "", fmt.Errorf("guest: %w", err)
	}
	kernel = filepath.Join(dir, "vmlinuz")
	ramfs = filepath.Join(dir, "initrd")
	if err := makeKernel(packed, kernel); err != nil {
		return "", "", fmt.Errorf("guest: %w", err)
	}
	if err := writeInitrd(ramfs, kernelTree, trees, opt); err != nil {
		return "", "", fmt.Errorf("guest: %w", err)
	}
	return kernel, ramfs, nil
}

func copyFile(from, to string) error {
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, content, 0o644)
}

func writeInitrd(path, kernelTree string, trees []string, opt Options) error {
	modules, err := initrd.FindModules(kernelTree, opt.Modules)
	if err != nil {
		return err
	}
	a := newArchive()
	for _, dir := range []string{"dev", "proc", "sys", "run", "tmp", "mnt", "etc", "root",
		"var/lib"} {
		a.dir(dir)
	}
	// Without this device, the kernel gives the first process no standard output.
	a.device("dev/console", 5, 1)
	for _, tree := range trees {
		if err := addTree(a, tree); err != nil {
			return err
		}
	}
	if err := addModules(a, modules); err != nil {
		return err
	}
	for name, content := range opt.Files {
		mode := fs.FileMode(0o644)
		if strings.HasPrefix(content, "#!") {
			mode = 0o755
		}
		a.file(name, mode, []byte(content))
	}
	a.file("init", 0o755, []byte(firstProcess))
	a.file("etc/modules", 0o644, []byte(strings.Join(opt.Modules, "\n")+"\n"))
	a.file("script", 0o755, []byte("#!/bin/sh\n"+opt.Init))
	return os.WriteFile(path, a.Bytes(), 0o644)
}

// unwanted are directories of packages, relative to the root, that no test needs. The hardware
// database is bigger than the rest of udev, and is only read when it is compiled.
var unwanted = []string{"usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/lintian",
	"usr/share/bash-completion", "usr/share/info",
	"usr/lib/udev/hwdb.d"}

// addTree adds an unpacked package.
func addTree(a *archive, tree string) error {
	return filepath.WalkDir(tree, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(tree, path)
		if err != nil {
			return err
		}
		if slices.Contains(unwanted, name) {
			return filepath.SkipDir
		}
		switch entry.Type() {
		case fs.ModeDir:
			a.dir(name)
		case fs.ModeSymlink:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			a.symlink(name, to)
		case 0:
			info, err := entry.Info()
			if err != nil {
				return err
			}
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			a.file(name, info.Mode().Perm(), content)
		}
		return nil
	})
}

// firstProcess is /init of every guest. It runs the script as a child, so the script can neither
// keep the guest running nor make the kernel panic because the first process has ended.
const firstProcess = `#!/bin/busybox sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs devtmpfs /dev
/bin/busybox mount -t tmpfs tmpfs /run
# The kernel's complaints are in its log. On the console they would split the script's lines.
echo 1 >/proc/sys/kernel/printk
# Commands that a package brought stay; these are the errors.
/bin/busybox --install -s 2>/dev/null
while read -r module; do
	[ -z "$module" ] || modprobe "$module" || echo "guest: module $module cannot be loaded"
done </etc/modules
/bin/sh /script </dev/console
echo "` + Ended + ` $?"
sync
poweroff -f
`
