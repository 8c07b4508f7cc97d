// Package initrd makes the initramfs that boots a container image: the static program of
// cmd/kubevirt-disk-init as /init, and the kernel modules that a virtual machine's devices need.
//
// scripts/mkinitrd calls Build when the image kubevirt.io:adapter is made. Nothing of the product's
// binary imports this package. The same init and the same kernel package give the same bytes, on
// every machine.
//
// The modules lie flat in /lib/modules. /lib/modules/index tells the init about them, a line each:
//
//	module NAME NEEDS...   a module, and what must be loaded before it, in that order
//	alias PATTERN NAME     the module for the devices whose modalias the pattern matches
//
// Archive and Modules are also what the guests of this repository's tests are made with.
package initrd
