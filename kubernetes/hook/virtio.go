package hook

import (
	"encoding/xml"
	"slices"
	"strconv"

	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/libvirt"
)

// s390x is an architecture without PCI, as a VirtualMachineInstance calls it.
const s390x = "s390x"

// virtio is what every virtio device of the machine gets. KubeVirt has given it to those that are
// in the domain. If there are none, the machine says what they would have had.
func (e *edit) virtio(m *machine) libvirt.Virtio {
	var all libvirtxml.DomainDeviceList
	for _, c := range e.deviceElements("disk", "controller", "memballoon", "rng", "interface") {
		var one libvirtxml.DomainDeviceList
		text := slices.Concat([]byte("<devices>"), e.before[c.start:c.end], []byte("</devices>"))
		if xml.Unmarshal(text, &one) != nil {
			continue // what we do not understand says nothing
		}
		all.Disks = append(all.Disks, one.Disks...)
		all.Controllers = append(all.Controllers, one.Controllers...)
		all.RNGs = append(all.RNGs, one.RNGs...)
		all.Interfaces = append(all.Interfaces, one.Interfaces...)
		if one.MemBalloon != nil {
			all.MemBalloon = one.MemBalloon
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

// encrypted reports whether the machine asks for encrypted memory that devices must respect.
func (m *machine) encrypted() bool {
	l := m.Spec.Domain.LaunchSecurity
	return l != nil && (l.SEV != nil || l.SNP != nil || m.Spec.Architecture == s390x)
}

// deviceElements are the devices of some kinds.
func (e *edit) deviceElements(kinds ...string) (found []*element) {
	if e.devices == nil {
		return nil
	}
	for _, c := range e.devices.children {
		if slices.Contains(kinds, c.name) {
			found = append(found, c)
		}
	}
	return found
}
