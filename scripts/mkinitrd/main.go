// Command mkinitrd writes the files that boot a container image, vmlinuz and initrd, into a
// directory. It makes them from an unpacked Debian kernel package and the static program
// kubevirt-disk-init:
//
//	mkinitrd KERNEL-TREE INIT DIRECTORY
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"kubevirt.io/disk/adapter/initrd"
)

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: mkinitrd KERNEL-TREE INIT DIRECTORY")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, "mkinitrd:", err)
		os.Exit(1)
	}
}

func run(tree, program, dir string) error {
	kernel, err := initrd.Kernel(tree)
	if err != nil {
		return err
	}
	image, err := os.ReadFile(kernel)
	if err != nil {
		return err
	}
	content, err := initrd.Build(initrd.Options{Init: program, KernelTree: tree})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "vmlinuz"), image, 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "initrd"), content, 0o644)
}
