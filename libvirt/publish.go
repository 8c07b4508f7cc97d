package libvirt

import (
	"fmt"
	"net/netip"
	"strings"

	"libvirt.org/go/libvirtxml"
)

// Publish forwards a port of the host to a port of the guest.
type Publish struct {
	Address     netip.Addr // of the host, IPv4
	Host, Guest uint16     // the ports
	UDP         bool       // otherwise TCP
}

// ParsePublish reads [ADDRESS:]PORT:PORT[/tcp|/udp], first the host's port. Without an address only
// this host reaches it.
func ParsePublish(text string) (p Publish, err error) {
	wrong := fmt.Errorf("%q is not [ADDRESS:]PORT:PORT with an IPv4 address, such as 8080:80 or "+
		"0.0.0.0:8080:80", text)
	ports, protocol, named := strings.Cut(text, "/")
	if named && protocol != "tcp" && protocol != "udp" {
		return p, fmt.Errorf("%q: the protocol is tcp or udp", text)
	}
	p.UDP = protocol == "udp"
	p.Address = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	parts := strings.Split(ports, ":")
	if len(parts) == 3 {
		if p.Address, err = netip.ParseAddr(parts[0]); err != nil || !p.Address.Is4() {
			return p, wrong
		}
		parts = parts[1:]
	}
	if len(parts) != 2 {
		return p, wrong
	}
	for i, to := range []*uint16{&p.Host, &p.Guest} {
		if *to, err = parsePort(parts[i]); err != nil {
			return p, wrong
		}
	}
	return p, nil
}

func (p Publish) protocol() string {
	if p.UDP {
		return "udp"
	}
	return "tcp"
}

func (p Publish) String() string {
	return fmt.Sprintf("%v:%d:%d/%s", p.Address, p.Host, p.Guest, p.protocol())
}

// publishing are QEMU's arguments for a network card with these ports. libvirt itself forwards
// ports only by passt, which many hosts do not have. The card is in a high slot, because libvirt
// assigns slots from the first one on.
func publishing(list []Publish) *libvirtxml.DomainQEMUCommandline {
	network := "user,id=publish"
	for _, p := range list {
		network += fmt.Sprintf(",hostfwd=%s:%v:%d-:%d", p.protocol(), p.Address, p.Host, p.Guest)
	}
	c := new(libvirtxml.DomainQEMUCommandline)
	for _, arg := range []string{"-netdev", network, "-device",
		"virtio-net-pci,netdev=publish,bus=pcie.0,addr=0x10,romfile="} {
		c.Args = append(c.Args, libvirtxml.DomainQEMUCommandlineArg{Value: arg})
	}
	return c
}
