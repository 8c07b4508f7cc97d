package libvirt

import (
	"cmp"
	"strings"

	"libvirt.org/go/libvirtxml"
)

// Virtio are the settings that all virtio devices of a domain share because its guest needs them,
// also devices that are added later. The zero value changes nothing.
type Virtio struct {
	// Model is virtio-transitional for guests with drivers older than virtio 1.0,
	// virtio-non-transitional for others, or virtio without PCI, as on s390x. "": libvirt chooses.
	Model string
	// IOMMU is for guests with encrypted memory (SEV, Secure Execution): a device reaches only the
	// memory that the guest has opened for it.
	IOMMU bool
	// Queues is the number of queues of each disk; 0: libvirt chooses.
	Queues uint
}

// The models of virtio devices.
const (
	virtioModel      = "virtio"
	nonTransitional  = "virtio-non-transitional"
	transitional     = "virtio-transitional"
	virtioController = "virtio-scsi"
	on               = "on"
)

// VirtioOf returns the common settings of a domain's devices. Disks come first, because only they
// have queues. Devices without any of these settings are ignored.
func VirtioOf(devices *libvirtxml.DomainDeviceList) (v Virtio) {
	see := func(model, iommu string) {
		switch model {
		case virtioModel, nonTransitional, transitional:
			v.Model = cmp.Or(v.Model, model)
		}
		v.IOMMU = v.IOMMU || iommu == on
	}
	for _, d := range devices.Disks {
		if d.Target == nil || d.Target.Bus != string(BusVirtio) {
			continue
		}
		driver := cmp.Or(d.Driver, new(libvirtxml.DomainDiskDriver))
		see(d.Model, driver.IOMMU)
		if v.Queues == 0 && driver.Queues != nil {
			v.Queues = *driver.Queues
		}
	}
	for _, d := range devices.Controllers {
		see(d.Model, cmp.Or(d.Driver, new(libvirtxml.DomainControllerDriver)).IOMMU)
	}
	if d := devices.MemBalloon; d != nil {
		see(d.Model, cmp.Or(d.Driver, new(libvirtxml.DomainMemBalloonDriver)).IOMMU)
	}
	for _, d := range devices.RNGs {
		see(d.Model, cmp.Or(d.Driver, new(libvirtxml.DomainRNGDriver)).IOMMU)
	}
	for _, d := range devices.Interfaces {
		see(cmp.Or(d.Model, new(libvirtxml.DomainInterfaceModel)).Type,
			cmp.Or(d.Driver, new(libvirtxml.DomainInterfaceDriver)).IOMMU)
	}
	return v
}

// Disk applies the settings to a disk. It changes neither the disk's own settings nor disks of
// other buses.
func (v Virtio) Disk(d *libvirtxml.DomainDisk) {
	if d.Target == nil || d.Target.Bus != string(BusVirtio) {
		return
	}
	d.Model = cmp.Or(d.Model, v.Model)
	d.Driver = cmp.Or(d.Driver, new(libvirtxml.DomainDiskDriver))
	if v.IOMMU && d.Driver.IOMMU == "" {
		d.Driver.IOMMU = on
	}
	if v.Queues > 0 && d.Driver.Queues == nil {
		d.Driver.Queues = &v.Queues
	}
}

// SCSIController returns a controller for disks of BusSCSI with these settings.
func (v Virtio) SCSIController() libvirtxml.DomainController {
	c := libvirtxml.DomainController{Type: "scsi", Model: virtioController}
	if strings.HasPrefix(v.Model, virtioModel+"-") {
		c.Model = v.Model
	}
	if v.IOMMU {
		c.Driver = &libvirtxml.DomainControllerDriver{IOMMU: on}
	}
	return c
}
