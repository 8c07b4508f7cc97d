package libvirt

import (
	"strconv"
	"strings"
	"time"

	"libvirt.org/go/libvirtxml"
)

// DefaultNBDPort is IANA's port of NBD.
const DefaultNBDPort = 10809

// Export is a disk that kubevirt-disk serves by NBD, for a QEMU without an iSCSI driver, such as
// that of KubeVirt's launcher. It has a Socket, a Portal, or both: libvirt then uses the socket.
// The portal is for programs that do not know sockets and lose them when they rewrite the element,
// such as KubeVirt 1.9.
type Export struct {
	Name   string // of the image or the volume, or the number of the LUN; "": the only disk
	Socket string // absolute path of a Unix socket that QEMU may open
	Portal Portal // address; port 0: DefaultNBDPort
	// TLS makes QEMU use TLS at a Portal, with libvirt's client certificate (nbd_tls_x509_cert_dir
	// of qemu.conf). A server on another machine requires it.
	TLS bool
	// Reconnect is how long QEMU holds the guest's requests while it reconnects after a lost
	// connection, in whole seconds. Without it they fail at once. libvirt 9.0.0 ignores it; later
	// releases know it.
	Reconnect time.Duration

	AccessMode AccessMode // "": WriteExclusive
	ReadOnly   bool       // as in LUN
	Serial     string     // as in LUN
	WWN        string     // as in LUN
	BlockSize  int        // as in LUN
}

// withDefaults replaces empty fields with their defaults.
func (e Export) withDefaults() Export {
	if (e.Socket == "" || e.Portal.Host != "") && e.Portal.Port == 0 {
		e.Portal.Port = DefaultNBDPort
	}
	shown := e.shown().withDefaults()
	e.AccessMode, e.ReadOnly, e.WWN = shown.AccessMode, shown.ReadOnly, shown.WWN
	return e
}

// shown is the part of the disk that the guest sees.
func (e Export) shown() LUN {
	return LUN{AccessMode: e.AccessMode, ReadOnly: e.ReadOnly, Serial: e.Serial, WWN: e.WWN,
		BlockSize: e.BlockSize}
}

// For returns the export without the parts of its identity that the device cannot show, like
// LUN.For.
func (e Export) For(d Device) Export {
	shown := e.shown().For(d)
	e.Serial, e.WWN = shown.Serial, shown.WWN
	return e
}

// checkWith validates an export whose defaults are filled in, and the device for it.
func (e Export) checkWith(d Device, p *problems) {
	e.check(p)
	translated := problems{name: lunFieldOf("Export.")}
	e.shown().checkShown(&translated)
	d.check(&translated)
	checkTogether(e.shown(), d, &translated)
	if d.Kind == KindLUN {
		translated.add("Device.Kind", "NBD takes no SCSI commands: want disk")
	}
	if d.Initiator != "" {
		translated.add("Device.Initiator", "an NBD client is called by its socket or "+
			"certificate: leave it empty")
	}
	p.take(&translated)
}

func (e Export) check(p *problems) {
	if len(e.Name) > 4096 || !printable(e.Name) {
		p.add("Export.Name", "%q is too long or has characters that do not print: want at most "+
			"4096 bytes", e.Name)
	}
	if e.Socket != "" {
		checkSocket(p, "Export.Socket", e.Socket)
		if e.TLS {
			p.add("Export.TLS", "a socket of this machine needs no TLS: leave it out")
		}
	}
	if e.Socket == "" || e.Portal != (Portal{}) {
		p.addError("Export.Portal.Host", checkHost(e.Portal.Host))
	}
	if e.Reconnect < 0 || e.Reconnect%time.Second != 0 {
		p.add("Export.Reconnect", "%s: want whole seconds, from 0", e.Reconnect)
	}
}

// Disk returns the <disk> element that makes an export a disk of a domain. The caller may change
// it.
func (e Export) Disk(d Device) (*libvirtxml.DomainDisk, error) {
	e, d = e.withDefaults(), d.withDefaults()
	var p problems
	e.checkWith(d, &p)
	if err := p.err(); err != nil {
		return nil, err
	}
	disk := d.disk(e.shown())
	disk.Source.Network = e.source()
	return disk, nil
}

func (e Export) source() *libvirtxml.DomainDiskSourceNetwork {
	network := &libvirtxml.DomainDiskSourceNetwork{Protocol: "nbd", Name: e.Name}
	host := libvirtxml.DomainDiskSourceHost{Socket: e.Socket}
	if e.Socket != "" {
		host.Transport = "unix"
	}
	if e.Portal != (Portal{}) {
		host.Name, host.Port = e.Portal.Host, strconv.Itoa(int(e.Portal.Port))
	}
	network.Hosts = []libvirtxml.DomainDiskSourceHost{host}
	if e.TLS {
		network.TLS = "yes"
	}
	if e.Reconnect > 0 {
		network.Reconnect = &libvirtxml.DomainDiskSourceNetworkReconnect{
			Delay: strconv.Itoa(int(e.Reconnect / time.Second))}
	}
	return network
}

// DiskXML returns Disk as indented text without a newline at the end. It is also the document for
// hot-plug.
func (e Export) DiskXML(d Device) (string, error) {
	disk, err := e.Disk(d)
	return text("disk", disk, err)
}

// lunFieldOf translates the path of a Go field of a LUN that another type has, too.
func lunFieldOf(kind string) func(field string) string {
	return func(field string) string {
		if name, ok := strings.CutPrefix(field, "LUN."); ok {
			return kind + name
		}
		return field
	}
}
