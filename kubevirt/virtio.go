package kubevirt

import (
	"slices"
	"strconv"

	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/libvirt"
)

// s390x is an architecture without PCI, by its name in a VirtualMachineInstance.
const s390x = "s390x"

// virtio has the settings of every virtio device of the machine: those of devices in the domain, or
// else those that KubeVirt would derive from the machine.
//
// Only settings that any virtio device needs are read from a device: an edit gives a replaced disk
// another source and another type, and the result must be the same before and after it.
func (e *edit) virtio(m *machine) libvirt.Virtio {
	var all libvirtxml.DomainDeviceList
	for _, c := range e.deviceElements() {
		model, driver := c.attribute("model"), c.child("driver")
		iommu := driver.attribute("iommu")
		switch c.name {
		case "disk":
			d := &libvirtxml.DomainDiskDriver{IOMMU: iommu}
			if n, err := strconv.ParseUint(driver.attribute("queues"), 10, 16); err == nil {
				d.Queues = new(uint(n))
			}
			all.Disks = append(all.Disks, libvirtxml.DomainDisk{Model: model, Driver: d,
				Target: &libvirtxml.DomainDiskTarget{Bus: c.child("target").attribute("bus")}})
		case "controller":
			all.Controllers = append(all.Controllers, libvirtxml.DomainController{Model: model,
				Driver: &libvirtxml.DomainControllerDriver{IOMMU: iommu}})
		case "memballoon":
			all.MemBalloon = &libvirtxml.DomainMemBalloon{Model: model,
				Driver: &libvirtxml.DomainMemBalloonDriver{IOMMU: iommu}}
		case "rng":
			all.RNGs = append(all.RNGs, libvirtxml.DomainRNG{Model: model,
				Driver: &libvirtxml.DomainRNGDriver{IOMMU: iommu}})
		case "interface":
			all.Interfaces = append(all.Interfaces, libvirtxml.DomainInterface{
				Model:  &libvirtxml.DomainInterfaceModel{Type: c.child("model").attribute("type")},
				Driver: &libvirtxml.DomainInterfaceDriver{IOMMU: iommu}})
		}
	}
	v := libvirt.VirtioOf(&all)
	v.IOMMU = v.IOMMU || m.encrypted() || slices.Contains([]string{"sev", "sev-snp", "s390-pv"},
		e.root.child("launchSecurity").attribute("type"))
	devices := m.Spec.Domain.Devices
	if v.Model == "" && devices.UseVirtioTransitional && m.Spec.Architecture != s390x {
		v.Model = "virtio-transitional"
	}
	if v.Queues == 0 && devices.BlockMultiQueue {
		n, _ := strconv.ParseUint(e.root.child("vcpu").words(), 10, 16)
		v.Queues = max(uint(n), 1)
	}
	return v
}

// encrypted reports whether the machine has encrypted memory, which devices must take into account.
func (m *machine) encrypted() bool {
	l := m.Spec.Domain.LaunchSecurity
	return l != nil && (l.SEV != nil || l.SNP != nil || m.Spec.Architecture == s390x)
}

// deviceElements are the devices of the domain.
func (e *edit) deviceElements() []*element {
	if e.devices == nil {
		return nil
	}
	return e.devices.children
}
