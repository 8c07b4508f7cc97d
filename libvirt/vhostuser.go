package libvirt

import (
	"time"

	"libvirt.org/go/libvirtxml"
)

// MaxQueues is the largest number of queues that kubevirt-disk serves for a disk of VhostUser.
const MaxQueues = 16

// VhostUser is a disk that kubevirt-disk serves by vhost-user-blk: it reads and writes the guest's
// memory itself, so the domain needs the element of SharedMemory, too. Serial number, write cache,
// discards, block size, and whether the disk can be written come from the daemon. The domain has no
// access mode for it. Errors go to the guest: the domain does not pause.
type VhostUser struct {
	Socket string // absolute path, which QEMU may open
	// Queues is at most MaxQueues. 0: QEMU chooses one for each vCPU, so a domain with more vCPUs
	// needs a number.
	Queues uint
	// Reconnect is the pause of QEMU before each try to reconnect, in whole seconds, while the
	// guest's requests wait. 0: it does not try, and they wait for ever.
	Reconnect time.Duration
}

// Disk returns the <disk> element for a domain. The caller may change it. Of the device, only Dev,
// Bus, Kind and BootOrder can be chosen.
func (v VhostUser) Disk(d Device) (*libvirtxml.DomainDisk, error) {
	var p problems
	d = v.check(d, &p)
	if err := p.err(); err != nil {
		return nil, err
	}
	disk := &libvirtxml.DomainDisk{
		Device: string(d.Kind),
		Driver: &libvirtxml.DomainDiskDriver{Name: "qemu", Type: "raw"},
		Source: &libvirtxml.DomainDiskSource{VHostUser: v.source()},
		Target: &libvirtxml.DomainDiskTarget{Dev: d.Dev, Bus: string(d.Bus)},
	}
	if v.Queues > 0 {
		disk.Driver.Queues = &v.Queues
	}
	if d.BootOrder > 0 {
		disk.Boot = &libvirtxml.DomainDeviceBoot{Order: d.BootOrder}
	}
	return disk, nil
}

func (v VhostUser) source() *libvirtxml.DomainDiskSourceVHostUser {
	unix := &libvirtxml.DomainChardevSourceUNIX{Path: v.Socket}
	if v.Reconnect > 0 {
		unix.Reconnect = &libvirtxml.DomainChardevSourceReconnect{Enabled: "yes",
			Timeout: new(uint(v.Reconnect / time.Second))}
	}
	return &libvirtxml.DomainDiskSourceVHostUser{UNIX: unix}
}

// DiskXML returns Disk as indented text without a newline at the end. It is also the document for
// hot-plug, into a domain whose memory is shared.
func (v VhostUser) DiskXML(d Device) (string, error) {
	disk, err := v.Disk(d)
	return text("disk", disk, err)
}

// check validates the disk and a device for it, and returns the device with its defaults.
func (v VhostUser) check(d Device, p *problems) Device {
	checkSocket(p, "VhostUser.Socket", v.Socket)
	if v.Queues > MaxQueues {
		p.add("VhostUser.Queues", "%d: want at most %d", v.Queues, MaxQueues)
	}
	if v.Reconnect < 0 || v.Reconnect%time.Second != 0 {
		p.add("VhostUser.Reconnect", "%s: want whole seconds, from 0", v.Reconnect)
	}
	for field, value := range map[string]string{"Cache": string(d.Cache), "IO": string(d.IO),
		"Discard": string(d.Discard), "DetectZeroes": string(d.DetectZeroes),
		"ErrorPolicy":     string(d.ErrorPolicy),
		"ReadErrorPolicy": string(d.ReadErrorPolicy), "Initiator": d.Initiator} {
		if value != "" {
			p.add("Device."+field, "libvirt has none for a vhost-user disk, which the daemon "+
				"and the guest look after: leave it out")
		}
	}
	d = d.withDefaults()
	d.check(p)
	if d.Bus != BusVirtio {
		p.add("Device.Bus", "%s: a vhost-user disk is on the bus virtio", d.Bus)
	}
	return d
}

// ParseVhostUser reads a <disk type='vhostuser'> element, as ParseDisk does for iSCSI.
func ParseVhostUser(document string) (VhostUser, Device, error) {
	disk, err := decodeDisk(document)
	if err != nil {
		return VhostUser{}, Device{}, err
	}
	return VhostUserFromDisk(disk)
}

// VhostUserFromDisk is ParseVhostUser for an element that is already parsed, for example one of a
// libvirtxml.Domain.
func VhostUserFromDisk(disk *libvirtxml.DomainDisk) (VhostUser, Device, error) {
	if disk.Source == nil || disk.Source.VHostUser == nil {
		return VhostUser{}, Device{}, &FieldError{Field: "disk/@type",
			Problem: `it is not a vhost-user disk: want "vhostuser"`}
	}
	unix := disk.Source.VHostUser.UNIX
	if unix == nil {
		return VhostUser{}, Device{}, &FieldError{Field: "disk/source/@type",
			Problem: `it is not a Unix socket: want "unix"`}
	}
	p := problems{name: vhostUserXMLName}
	v := VhostUser{Socket: unix.Path}
	if r := unix.Reconnect; r != nil && r.Enabled == "yes" && r.Timeout != nil {
		v.Reconnect = time.Duration(*r.Timeout) * time.Second
	}
	if disk.Driver != nil && disk.Driver.Queues != nil {
		v.Queues = *disk.Driver.Queues
	}
	for field, there := range map[string]bool{"serial": disk.Serial != "", "wwn": disk.WWN != "",
		"readonly": disk.ReadOnly != nil, "shareable": disk.Shareable != nil,
		"blockio": disk.BlockIO != nil} {
		if there {
			p.add("disk/"+field, "libvirt takes none for a vhost-user disk: leave it out")
		}
	}
	d := device(disk, &p)
	if d.Cache == CacheDefault {
		d.Cache = ""
	}
	if d.Discard == DiscardIgnore {
		d.Discard = ""
	}
	refuseForeign(disk, &p)
	if len(p.list) == 0 {
		d = v.check(d, &p)
	}
	if err := p.err(); err != nil {
		return VhostUser{}, Device{}, err
	}
	d.Cache, d.Discard = "", ""
	return v, d, nil
}

// vhostUserXMLName translates the path of a Go field to its place in the XML.
func vhostUserXMLName(field string) string {
	names := map[string]string{
		"VhostUser.Socket":    "disk/source/@path",
		"VhostUser.Queues":    "disk/driver/@queues",
		"VhostUser.Reconnect": "disk/source/reconnect/@timeout",
	}
	if name, ok := names[field]; ok {
		return name
	}
	return xmlName(field)
}

// SharedMemory returns the <memoryBacking> element that a domain needs for disks of VhostUser: the
// guest's memory is a memfd that QEMU gives to the daemon. A domain with shared memory, such as one
// in huge pages with this access mode, needs nothing.
func SharedMemory() *libvirtxml.DomainMemoryBacking {
	return &libvirtxml.DomainMemoryBacking{
		MemorySource: &libvirtxml.DomainMemorySource{Type: "memfd"},
		MemoryAccess: &libvirtxml.DomainMemoryAccess{Mode: "shared"},
	}
}

// SharedMemoryXML is the same element as text without a newline at the end.
const SharedMemoryXML = `<memoryBacking>
  <source type="memfd"></source>
  <access mode="shared"></access>
</memoryBacking>`
