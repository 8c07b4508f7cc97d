// Package libvirt turns the description of a LUN into libvirt's XML: the <disk> element of a
// domain, the same for hot-plug, and the <secret> for the disk's credential. It also turns a <disk>
// back into the LUN. For a disk image in a local file, see File.
//
// A LUN describes the served disk, a Device how the virtual machine sees it. The zero Device is a
// virtio disk named vda, with the cache mode of the original wrapper's handler. The results are
// types of libvirt.org/go/libvirtxml. So a program can add them to its own domain and set anything
// else:
//
//	initiator, err := libvirt.InitiatorName("", domain.UUID)
//	disk, err := libvirt.Disk(lun, libvirt.Device{Dev: "sda", Initiator: initiator})
//	domain.Devices.Disks = append(domain.Devices.Disks, *disk)
//
// InitiatorName gives each machine its own name, by which the target distinguishes the two machines
// of a live migration.
//
// Disks only refer to secrets, by usage or UUID. This package never takes or renders the value of a
// secret. Define the element that Secret returns, and give libvirt the value with virSecretSetValue
// or `virsh secret-set-value --file`.
//
// An error reports everything that is wrong with an argument: it joins a FieldError for each field,
// and errors.As finds the first.
//
// The package imports libvirtxml and the standard library, and nothing of the server.
package libvirt
