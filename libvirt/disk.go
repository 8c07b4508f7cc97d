package libvirt

import (
	"cmp"
	"strconv"

	"libvirt.org/go/libvirtxml"
)

// Disk returns the <disk> element that makes a LUN a disk of a domain. The caller may change it.
func Disk(l LUN, d Device) (*libvirtxml.DomainDisk, error) {
	l, d = l.withDefaults(), d.withDefaults()
	var p problems
	l.check(&p)
	d.check(&p)
	checkTogether(l, d, &p)
	if err := p.err(); err != nil {
		return nil, err
	}
	if l.NBD != nil {
		return l.NBD.Disk(d)
	}
	return d.disk(l), nil
}

// Storage is the source of a disk that is not a LUN of kubevirt-disk, for Device.Disk.
type Storage struct {
	Source     *libvirtxml.DomainDiskSource
	Auth       *libvirtxml.DomainDiskAuth // nil: none
	AccessMode AccessMode                 // "": WriteExclusive
	ReadOnly   bool
}

// Disk returns a <disk> element for storage other than a LUN of kubevirt-disk: another target, a
// block device, a raw file. The source and its credential are not checked.
func (d Device) Disk(s Storage) (*libvirtxml.DomainDisk, error) {
	d = d.withDefaults()
	l := LUN{AccessMode: s.AccessMode, ReadOnly: s.ReadOnly}.withDefaults()
	var p problems
	known(&p, "Storage.AccessMode", l.AccessMode, accessModes())
	if s.Source == nil {
		p.add("Storage.Source", "it is missing")
	}
	d.check(&p)
	checkTogether(l, d, &p)
	if err := p.err(); err != nil {
		return nil, err
	}
	disk := d.disk(l)
	disk.Source, disk.Auth = s.Source, s.Auth
	return disk, nil
}

// SourceName is the name by which QEMU and libvirt find a LUN of a target: TARGET/LUN, where a LUN
// above 255 has the two bits of the flat addressing method (SAM-5 4.7.7).
func SourceName(target string, lun int) string {
	return target + "/" + strconv.Itoa(QEMULUN(lun))
}

// disk renders a LUN and a device that were checked.
func (d Device) disk(l LUN) *libvirtxml.DomainDisk {
	disk := &libvirtxml.DomainDisk{
		Device: string(d.Kind),
		Driver: &libvirtxml.DomainDiskDriver{
			Name:         "qemu",
			Type:         "raw",
			Cache:        string(d.Cache),
			IO:           string(d.IO),
			ErrorPolicy:  string(d.ErrorPolicy),
			RErrorPolicy: string(d.ReadErrorPolicy),
			Discard:      string(d.Discard),
			DetectZeros:  string(d.DetectZeroes),
		},
		Auth:   auth(l.Credential),
		Source: &libvirtxml.DomainDiskSource{Network: source(l, d)},
		Target: &libvirtxml.DomainDiskTarget{Dev: d.Dev, Bus: string(d.Bus)},
		Serial: l.Serial,
		WWN:    l.WWN,
	}
	if l.BlockSize > shortBlock && d.Kind == KindDisk {
		disk.BlockIO = &libvirtxml.DomainDiskBlockIO{LogicalBlockSize: uint(l.BlockSize),
			PhysicalBlockSize: uint(l.BlockSize)}
	}
	if l.ReadOnly {
		disk.ReadOnly = &libvirtxml.DomainDiskReadOnly{}
	}
	if l.AccessMode != WriteExclusive {
		disk.Shareable = &libvirtxml.DomainDiskShareable{}
	}
	if d.BootOrder > 0 {
		disk.Boot = &libvirtxml.DomainDeviceBoot{Order: d.BootOrder}
	}
	return disk
}

func source(l LUN, d Device) *libvirtxml.DomainDiskSourceNetwork {
	network := &libvirtxml.DomainDiskSourceNetwork{Protocol: "iscsi",
		Name: SourceName(l.TargetName, l.Number)}
	for _, portal := range l.Portals {
		network.Hosts = append(network.Hosts, libvirtxml.DomainDiskSourceHost{Name: portal.Host,
			Port: strconv.Itoa(int(portal.Port))})
	}
	if d.Initiator != "" {
		network.Initiator = &libvirtxml.DomainDiskSourceNetworkInitiator{
			IQN: &libvirtxml.DomainDiskSourceNetworkIQN{Name: d.Initiator}}
	}
	return network
}

func auth(c Credential) *libvirtxml.DomainDiskAuth {
	if c.isZero() {
		return nil
	}
	secret := &libvirtxml.DomainDiskSecret{Type: "iscsi", UUID: c.SecretUUID}
	if c.SecretUUID == "" {
		secret.Usage = c.SecretUsage
	}
	return &libvirtxml.DomainDiskAuth{Username: c.Username, Secret: secret}
}

// DiskXML returns Disk as indented text without a newline at the end.
func DiskXML(l LUN, d Device) (string, error) {
	disk, err := Disk(l, d)
	return text("disk", disk, err)
}

// HotplugXML returns the document for virDomainAttachDeviceFlags and virDomainDetachDeviceFlags,
// and for `virsh attach-device` and `virsh detach-device`. It is DiskXML, with an error for a
// device that cannot be plugged into a running domain. With BusSCSI the domain should already have
// a controller of model virtio-scsi; otherwise libvirt plugs in another model.
func HotplugXML(l LUN, d Device) (string, error) {
	if d.withDefaults().Bus == BusSATA {
		return "", &FieldError{Field: "Device.Bus",
			Problem: "sata disks cannot be hot-plugged: want scsi or virtio"}
	}
	return DiskXML(l, d)
}

// Secret returns the <secret> element for a disk with this credential. libvirt keeps the secret
// across restarts, and its clients cannot read it. Without a usage name the secret gets its UUID as
// one, because libvirt lets disks use only secrets for iSCSI. The value, which is the CHAP
// password, is set separately.
func Secret(c Credential) (*libvirtxml.Secret, error) {
	c = c.withDefaults()
	var p problems
	c.checkReference(&p, "Credential")
	if err := p.err(); err != nil {
		return nil, err
	}
	usage := cmp.Or(c.SecretUsage, c.SecretUUID)
	return &libvirtxml.Secret{
		Ephemeral: "no",
		Private:   "yes",
		UUID:      c.SecretUUID,
		Usage:     &libvirtxml.SecretUsage{Type: "iscsi", Target: usage},
	}, nil
}

// SecretXML returns Secret as indented text without a newline at the end. It is the document for
// virSecretDefineXML and `virsh secret-define`.
func SecretXML(c Credential) (string, error) {
	secret, err := Secret(c)
	return text("secret", secret, err)
}
