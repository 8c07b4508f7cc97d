package initrd

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Options are the inputs of an initramfs. Both fields are required.
type Options struct {
	// Init is the path of the static program that becomes process 1.
	Init string
	// KernelTree is the directory of an unpacked Debian kernel package (dpkg-deb -x). The package
	// decides the architecture of the initramfs; Init must have the same.
	KernelTree string
}

// required are the drivers that all of our machines need, built into the kernel or not.
var required = []string{"virtio_pci", "virtio_blk", "virtio_scsi", "sd_mod", "virtio_net",
	"virtio_console", "ext4"}

// useful are drivers that some kernels lack, such as those of another architecture: for other ways
// to attach a disk, for the power button, and for entropy.
var useful = []string{"virtio_mmio", "ahci", "nvme", "virtio_rng", "virtio_balloon", "crc32c_intel",
	"button", "evdev"}

// modulesDir is the directory in which the init looks for modules.
const modulesDir = "lib/modules/"

// Build returns an initramfs.
func Build(opt Options) ([]byte, error) {
	program, err := os.ReadFile(opt.Init)
	if err != nil {
		return nil, fmt.Errorf("initrd: %w", err)
	}
	modules, err := chooseModules(opt.KernelTree)
	if err != nil {
		return nil, fmt.Errorf("initrd: %w", err)
	}
	var a Archive
	for _, dir := range []string{"dev", "proc", "sys", "run", "disk"} {
		a.Dir(dir)
	}
	// Without it, the first process gets no standard output from the kernel.
	a.CharDevice("dev/console", 5, 1)
	a.File("init", 0o755, program)
	for _, name := range modules.order {
		content, err := modules.Content(name)
		if err != nil {
			return nil, fmt.Errorf("initrd: %w", err)
		}
		a.File(modulesDir+name+".ko", 0o644, content)
	}
	a.File(modulesDir+"order", 0o644, []byte(strings.Join(modules.order, "\n")+"\n"))
	return a.Bytes(), nil
}

// Kernel returns the path of the kernel in an unpacked Debian package.
func Kernel(tree string) (string, error) {
	found, err := filepath.Glob(filepath.Join(tree, "boot", "vmlinuz-*"))
	if err != nil {
		return "", err
	}
	if len(found) != 1 {
		return "", fmt.Errorf("%s/boot has %d kernels, want one", tree, len(found))
	}
	return found[0], nil
}

// chooseModules selects the kernel modules that our machines may need.
func chooseModules(tree string) (*Modules, error) {
	m, err := listModules(tree)
	if err != nil {
		return nil, err
	}
	for _, name := range required {
		if err := m.choose(name); err != nil {
			return nil, err
		}
	}
	for _, name := range useful {
		if m.paths[name] == "" {
			continue
		}
		if err := m.choose(name); err != nil {
			return nil, err
		}
	}
	return m, nil
}
