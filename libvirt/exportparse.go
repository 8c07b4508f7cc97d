package libvirt

import (
	"strconv"
	"strings"
	"time"

	"libvirt.org/go/libvirtxml"
)

// ParseExport reads a <disk> element with an NBD source into an export and a device, as ParseDisk
// does for iSCSI.
func ParseExport(document string) (Export, Device, error) {
	disk, err := decodeDisk(document)
	if err != nil {
		return Export{}, Device{}, err
	}
	return ExportFromDisk(disk)
}

// ExportFromDisk is ParseExport for an element that is already parsed, for example one of a
// libvirtxml.Domain.
func ExportFromDisk(disk *libvirtxml.DomainDisk) (Export, Device, error) {
	p := problems{name: exportXMLName}
	network, err := networkOf(disk, "nbd")
	if err != nil {
		return Export{}, Device{}, err
	}
	shown := shownBy(disk)
	e := Export{Name: network.Name, TLS: network.TLS == "yes", AccessMode: shown.AccessMode,
		ReadOnly: shown.ReadOnly, Serial: shown.Serial, WWN: shown.WWN, BlockSize: shown.BlockSize}
	e.parseHost(network.Hosts, &p)
	if r := network.Reconnect; r != nil && r.Delay != "" {
		seconds, err := strconv.ParseUint(r.Delay, 10, 31)
		if err != nil {
			p.add("Export.Reconnect", "%q is not a number of seconds", r.Delay)
		}
		e.Reconnect = time.Duration(seconds) * time.Second
	}
	if disk.Auth != nil || network.Auth != nil {
		p.add("disk/auth", "NBD has no passwords: leave it out")
	}
	d := device(disk, &p)
	refuseForeign(disk, &p)
	e, d = e.withDefaults(), d.withDefaults()
	if len(p.list) == 0 {
		e.checkWith(d, &p)
	}
	if err := p.err(); err != nil {
		return Export{}, Device{}, err
	}
	return e, d, nil
}

// parseHost reads the only <host>.
func (e *Export) parseHost(hosts []libvirtxml.DomainDiskSourceHost, p *problems) {
	if len(hosts) != 1 {
		p.add("disk/source/host", "there are %d: want one", len(hosts))
		return
	}
	host := hosts[0]
	switch host.Transport {
	case "unix":
		e.Socket = host.Socket
		if e.Socket == "" {
			p.add("Export.Socket", "it is missing: want the path of a socket")
		}
	case "", "tcp":
	default:
		p.add("disk/source/host/@transport", "NBD does not use the transport %q: want unix or tcp",
			host.Transport)
		return
	}
	e.Portal.Host = host.Name
	if host.Port != "" {
		var err error
		e.Portal.Port, err = parsePort(host.Port)
		p.addError("disk/source/host/@port", err)
	}
}

// exportXMLName translates the path of a Go field to its place in the XML.
func exportXMLName(field string) string {
	names := map[string]string{
		"Export.Name": "disk/source/@name", "Export.Socket": "disk/source/host/@socket",
		"Export.Portal": "disk/source/host", "Export.Portal.Host": "disk/source/host/@name",
		"Export.TLS": "disk/source/@tls", "Export.Reconnect": "disk/source/reconnect/@delay",
	}
	if name, ok := names[field]; ok {
		return name
	}
	if rest, ok := strings.CutPrefix(field, "Export."); ok {
		field = "LUN." + rest
	}
	return xmlName(field)
}
