// Package guestinit is process 1 of a virtual machine that runs a container image. Its directory is
// called init, but a package for import cannot have that name; cmd/kubevirt-disk-init is the
// program.
//
// The kernel starts the program from the initramfs of adapter/initrd. Main does this, in order:
//
//   - it loads the modules of the initramfs (modules.go), finds the disk by its serial number,
//     grows the file system to the size of the disk, and mounts it (disk.go)
//   - meanwhile it sets up the network: lo, DHCP (lease.go, answer.go), recommendations of IPv6
//     routers (routers.go), DNS (network.go)
//   - it reads the image's configuration and the options of the host (spec.go), and starts a child,
//     which makes the disk its root, mounts the file systems of a container, becomes the image's
//     user, and executes the entry point (stage.go, mounts.go, user.go, exec.go)
//   - it reaps processes, and passes signals on to the entry point. The power button, Ctrl-Alt-Del
//     or the host's word on the port send it the stop signal, and kill it after the time of grace
//     (supervise.go, stop.go)
//   - when the entry point has ended: it ends the other processes, makes the disk clean, reports
//     the exit status on the port and on the console, and switches the machine off (report.go)
//
// The init itself stays in the initramfs, and only its child has the disk as its root. So it can
// unmount the disk at the end, and needs nothing of the image.
//
// It guarantees that the machine is switched off whatever fails, with a reason on the console, and
// that the disk is clean when it reports the exit status. adapter/machine has the words and
// parameters that it shares with the host.
package guestinit
