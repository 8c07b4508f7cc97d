// Package libvirt turns what a handler knows of a LUN into what libvirt wants to see: the <disk>
// element of a domain, the same for hot-plug, and the <secret> that the disk's credential refers
// to. It also goes the other way, from a <disk> back to the LUN.
//
// A LUN says what is served and where; a Device says how the virtual machine sees it. The zero
// Device is a virtio disk named vda, with the cache mode that the first wrapper's handler used. The
// results are types of libvirt.org/go/libvirtxml, so that a handler merges them into its own domain
// and sets whatever else it needs:
//
//	initiator, err := libvirt.InitiatorName("", domain.UUID)
//	disk, err := libvirt.Disk(lun, libvirt.Device{Dev: "sda", Initiator: initiator})
//	domain.Devices.Disks = append(domain.Devices.Disks, *disk)
//
// InitiatorName gives each machine a name of its own, by which the target knows the two machines of
// a live migration apart.
//
// Secrets are only referred to, by usage or UUID. No value of a secret is ever taken or rendered
// here: define the element of Secret, and give libvirt the value by virSecretSetValue or `virsh
// secret-set-value --file`.
//
// What is wrong with an argument is told all at once: the error joins a FieldError for each field,
// and errors.As finds the first.
//
// The package imports libvirtxml and the standard library, nothing of the server.
package libvirt
