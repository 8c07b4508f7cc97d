// Package initrd makes the initramfs that boots a container image: the static program of
// cmd/kubevirt-disk-init as /init, and the kernel modules that a virtual machine's devices need.
//
// scripts/mkinitrd calls Build when the image kubevirt.io:adapter is made. The binary kubevirt-disk
// does not import this package. The same init and the same kernel package give the same bytes on
// every machine.
//
// All modules are in the directory /lib/modules. /lib/modules/order has their names, one per line,
// in the order in which the init loads them.
//
// The guests of this repository's tests are made with Archive and Modules, too.
package initrd
