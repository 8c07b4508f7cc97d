package libvirt

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"libvirt.org/go/libvirtxml"
)

// ParseDisk reads a <disk> element into a LUN and a device. The element may come from Disk or from
// libvirt. Missing parts get libvirt's defaults: the port, the cache mode CacheDefault,
// DiscardIgnore. Elements that have nothing to do with the LUN (alias, address, statistics and the
// like) are ignored. Elements that change what the guest sees of it, such as encryption, are
// errors, and so is any disk that Disk would not make.
func ParseDisk(document string) (LUN, Device, error) {
	disk, err := decodeDisk(document)
	if err != nil {
		return LUN{}, Device{}, err
	}
	return FromDisk(disk)
}

// decodeDisk decodes a document that has only a <disk> element.
func decodeDisk(document string) (*libvirtxml.DomainDisk, error) {
	decoder := xml.NewDecoder(strings.NewReader(document))
	var disk libvirtxml.DomainDisk
	if err := decoder.Decode(&disk); err != nil {
		return nil, fmt.Errorf("not a <disk> element: %w", err)
	}
	for {
		switch token, err := decoder.Token(); t := token.(type) {
		case xml.StartElement:
			return nil,
				fmt.Errorf("<%s> follows the <disk> element: want nothing after it", t.Name.Local)
		default:
			if errors.Is(err, io.EOF) {
				return &disk, nil
			}
			if err != nil {
				return nil, fmt.Errorf("after the <disk> element: %w", err)
			}
		}
	}
}

// FromDisk is ParseDisk for an element that is already parsed, for example one of a
// libvirtxml.Domain.
func FromDisk(disk *libvirtxml.DomainDisk) (LUN, Device, error) {
	p := problems{name: xmlName}
	network, err := networkOf(disk, "iscsi")
	if err != nil {
		return LUN{}, Device{}, err
	}
	l := shownBy(disk)
	l.Portals = portals(network.Hosts, &p)
	l.TargetName, l.Number = sourceName(network.Name, &p)
	given := disk.Auth
	if given == nil {
		given = network.Auth // libvirt accepts it here too
	}
	l.Credential = credential(given, &p)
	d := device(disk, &p)
	refuseForeign(disk, &p)
	l, d = l.withDefaults(), d.withDefaults()
	if len(p.list) == 0 {
		// If there are problems already, these checks would only repeat them.
		l.check(&p)
		d.check(&p)
		checkTogether(l, d, &p)
	}
	if err := p.err(); err != nil {
		return LUN{}, Device{}, err
	}
	return l, d, nil
}

// networkOf returns the source of a disk that uses a protocol.
func networkOf(disk *libvirtxml.DomainDisk, protocol string) (*libvirtxml.DomainDiskSourceNetwork,
	error) {
	if disk.Source == nil || disk.Source.Network == nil {
		return nil, &FieldError{Field: "disk/@type",
			Problem: `it is not a network disk: want "network"`}
	}
	network := disk.Source.Network
	if network.Protocol != protocol {
		return nil, &FieldError{Field: "disk/source/@protocol",
			Problem: fmt.Sprintf("%q is another protocol: want %s", network.Protocol, protocol)}
	}
	return network, nil
}

// shownBy returns the part of a LUN that the guest sees.
func shownBy(disk *libvirtxml.DomainDisk) LUN {
	l := LUN{Serial: disk.Serial, WWN: disk.WWN, ReadOnly: disk.ReadOnly != nil}
	if disk.BlockIO != nil && disk.BlockIO.LogicalBlockSize != shortBlock {
		l.BlockSize = int(disk.BlockIO.LogicalBlockSize)
	}
	switch {
	case disk.Shareable == nil:
		l.AccessMode = WriteExclusive
	case l.ReadOnly:
		l.AccessMode = ReadShared
	default:
		l.AccessMode = WriteShared
	}
	return l
}

func portals(hosts []libvirtxml.DomainDiskSourceHost, p *problems) []Portal {
	var all []Portal
	for i, host := range hosts {
		portal := Portal{Host: host.Name, Port: DefaultPort}
		if host.Transport != "" && host.Transport != "tcp" {
			p.add(fmt.Sprintf("disk/source/host[%d]/@transport", i+1),
				"iSCSI does not use the transport %q: want tcp", host.Transport)
		}
		if host.Port != "" {
			var err error
			portal.Port, err = parsePort(host.Port)
			p.addError(fmt.Sprintf("disk/source/host[%d]/@port", i+1), err)
		}
		all = append(all, portal)
	}
	return all
}

// sourceName splits TARGET/LUN.
func sourceName(name string, p *problems) (target string, number int) {
	target, lun, ok := strings.Cut(name, "/")
	if !ok {
		p.add("disk/source/@name", "%q has no LUN, so libvirt would use LUN 0: want "+
			"TARGET/LUN, from 1", name)
		return target, 0
	}
	address, err := strconv.ParseUint(lun, 10, 15)
	if err != nil {
		p.add("disk/source/@name", "%q: %q is not a LUN: want 1 to %d", name, lun, MaxLUN)
	}
	return target, numberOf(int(address))
}

func credential(a *libvirtxml.DomainDiskAuth, p *problems) Credential {
	if a == nil {
		return Credential{}
	}
	c := Credential{Username: a.Username}
	if a.Secret == nil {
		p.add("disk/auth/secret", "it is missing: want the reference to a libvirt secret")
		return c
	}
	if a.Secret.Type != "iscsi" {
		p.add("disk/auth/secret/@type", "a secret of type %q is not for an iSCSI disk: want iscsi",
			a.Secret.Type)
	}
	c.SecretUsage, c.SecretUUID = a.Secret.Usage, a.Secret.UUID
	if c.SecretUUID != "" {
		c.SecretUsage = ""
	}
	if c.SecretUsage == "" && c.SecretUUID == "" {
		p.add("disk/auth/secret", "it has neither usage nor uuid: want one of them")
	}
	return c
}

func device(disk *libvirtxml.DomainDisk, p *problems) Device {
	d := Device{Kind: Kind(disk.Device), Cache: CacheDefault, Discard: DiscardIgnore}
	if driver := disk.Driver; driver != nil {
		if driver.Name != "" && driver.Name != "qemu" {
			p.add("disk/driver/@name", "%q is another driver: want qemu", driver.Name)
		}
		if driver.Type != "" && driver.Type != "raw" {
			p.add("disk/driver/@type", "%q is a format inside the LUN: want raw", driver.Type)
		}
		if driver.Cache != "" {
			d.Cache = Cache(driver.Cache)
		}
		if driver.Discard != "" {
			d.Discard = Discard(driver.Discard)
		}
		d.IO, d.DetectZeroes = IO(driver.IO), Zeroes(driver.DetectZeros)
		d.ErrorPolicy, d.ReadErrorPolicy = ErrorPolicy(driver.ErrorPolicy),
			ErrorPolicy(driver.RErrorPolicy)
	}
	if disk.Target == nil || disk.Target.Dev == "" {
		p.add("disk/target/@dev", "it is missing: want the device name")
	} else {
		d.Dev, d.Bus = disk.Target.Dev, Bus(disk.Target.Bus)
	}
	if disk.Boot != nil {
		d.BootOrder = disk.Boot.Order
	}
	network := disk.Source.Network // nil: it is a vhost-user disk
	if network != nil && network.Initiator != nil && network.Initiator.IQN != nil {
		d.Initiator = network.Initiator.IQN.Name
	}
	return d
}

// refuseForeign refuses elements that make the guest's disk something other than the LUN.
func refuseForeign(disk *libvirtxml.DomainDisk, p *problems) {
	refuse := func(is bool, field, what string) {
		if is {
			p.add(field, "the guest's disk is not the LUN but %s", what)
		}
	}
	refuse(disk.Encryption != nil, "disk/encryption", "what is encrypted in it")
	refuse(disk.Source.Encryption != nil, "disk/source/encryption", "what is encrypted in it")
	refuse(disk.Source.Slices != nil, "disk/source/slices", "a part of it")
	network := disk.Source.Network
	refuse(network != nil && network.Snapshot != nil, "disk/source/snapshot", "a snapshot")
	refuse(disk.Transient != nil, "disk/transient", "an overlay that is thrown away")
}

var hostField = regexp.MustCompile(`^LUN\.Portals\[(\d+)\]\.Host$`)

// xmlName translates the path of a Go field to its place in the XML. Other text stays unchanged.
func xmlName(field string) string {
	if m := hostField.FindStringSubmatch(field); m != nil {
		i, err := strconv.Atoi(m[1])
		if err == nil {
			return fmt.Sprintf("disk/source/host[%d]/@name", i+1)
		}
	}
	names := map[string]string{
		"LUN.Portals": "disk/source/host", "LUN.TargetName": "disk/source/@name",
		"LUN.Number":                 "disk/source/@name",
		"LUN.Credential.Username":    "disk/auth/@username",
		"LUN.Credential.SecretUsage": "disk/auth/secret/@usage",
		"LUN.Credential.SecretUUID":  "disk/auth/secret/@uuid", "LUN.Serial": "disk/serial",
		"LUN.WWN": "disk/wwn", "LUN.BlockSize": "disk/blockio/@logical_block_size",
		"Device.Dev": "disk/target/@dev", "Device.Bus": "disk/target/@bus",
		"Device.Kind": "disk/@device", "Device.Cache": "disk/driver/@cache",
		"Device.IO": "disk/driver/@io", "Device.Discard": "disk/driver/@discard",
		"Device.DetectZeroes":    "disk/driver/@detect_zeroes",
		"Device.ErrorPolicy":     "disk/driver/@error_policy",
		"Device.ReadErrorPolicy": "disk/driver/@rerror_policy",
		"Device.Initiator":       "disk/source/initiator/iqn/@name",
	}
	if name, ok := names[field]; ok {
		return name
	}
	return field
}
