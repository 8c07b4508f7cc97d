package vmdisk

import (
	"cmp"
	"slices"

	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/libvirt"
)

// firstPort is the port of the first disk of a pod. Each disk has the next one.
const firstPort = libvirt.DefaultPort

// FirstPagesPort is the port of the pages of the first disk of a pod. Each disk has the next one.
const FirstPagesPort = 9260

// loopback is the address of a disk in the pod of its VM.
const loopback = "127.0.0.1"

// Domain describes how the domain of a VM reaches the disks of its pod.
type Domain struct {
	// Host is where the disks listen: an address, or a DNS name. "": the VM runs in the pod itself,
	// and uses 127.0.0.1.
	Host string
	// Credential is the CHAP user, and the libvirt secret that holds the password.
	Credential libvirt.Credential
	// Initiator is the iSCSI name with which QEMU logs in, from libvirt.InitiatorName. "": QEMU's
	// own.
	Initiator string
}

// AddToDomain adds the disks to a domain, and a virtio controller for SCSI if a disk needs one and
// there is none. They get the settings of the domain's other virtio devices: see libvirt.Virtio. A
// virt-handler calls it.
func AddToDomain(devices *libvirtxml.DomainDeviceList, disks []Disk, d Domain) error {
	if err := check(disks, "disks"); err != nil {
		return err
	}
	used := make(map[string]bool)
	for _, disk := range devices.Disks {
		if disk.Target != nil {
			used[disk.Target.Dev] = true
		}
	}
	var p problems
	var all []libvirtxml.DomainDisk
	common, scsi := libvirt.VirtioOf(devices), false
	for i, disk := range disks {
		device := disk.device(d.Initiator)
		one, err := libvirt.Disk(disk.lun(cmp.Or(d.Host, loopback), i, d.Credential), device)
		if err != nil {
			return err
		}
		if used[disk.Device] {
			p.add("disks", "the domain has a device %q already: want another one for %s",
				disk.Device, disk.Image)
		}
		common.Disk(one)
		scsi = scsi || one.Target.Bus == string(libvirt.BusSCSI)
		all = append(all, *one)
	}
	if err := p.err(); err != nil {
		return err
	}
	devices.Disks = append(devices.Disks, all...)
	if scsi && !hasController(devices) {
		devices.Controllers = append(devices.Controllers, common.SCSIController())
	}
	return nil
}

func hasController(devices *libvirtxml.DomainDeviceList) bool {
	return slices.ContainsFunc(devices.Controllers, func(c libvirtxml.DomainController) bool {
		return c.Type == "scsi"
	})
}

// lun is the LUN of the disk with this place in the list.
func (d Disk) lun(host string, place int, credential libvirt.Credential) libvirt.LUN {
	return libvirt.LUN{
		Portals:    []libvirt.Portal{{Host: host, Port: uint16(firstPort + place)}},
		TargetName: d.targetName(),
		Number:     1,
		Credential: credential,
		AccessMode: d.AccessMode,
		ReadOnly:   d.ReadOnly,
		BlockSize:  d.BlockSize,
	}
}

func (d Disk) device(initiator string) libvirt.Device {
	return libvirt.Device{Dev: d.Device, Bus: d.Bus, Initiator: initiator}
}

// targetName differs for each disk of a pod: an initiator takes two portals of one name for two
// paths to the same disk.
func (d Disk) targetName() string { return "iqn.2017-01.io.kubevirt:disk." + d.Device }
