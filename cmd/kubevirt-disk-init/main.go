// Command kubevirt-disk-init is process 1 of a virtual machine that runs a container image. It is
// in the initramfs of the image kubevirt.io:adapter; nothing else calls it. See package
// adapter/init.
package main

import (
	"os"

	guestinit "kubevirt.io/disk/adapter/init"
)

func main() { os.Exit(guestinit.Main(os.Args)) }
