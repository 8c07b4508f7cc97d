package guestinit

import (
	"net"
	"strings"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/adapter/machine"
)

// lifetime is how long a lease is valid; 0: for ever.
func lifetime(l *dhcpv4.DHCPv4) time.Duration {
	t := l.IPAddressLeaseTime(0)
	if t == dhcpv4.MaxLeaseTime {
		return 0
	}
	return t
}

// renewal is when to renew a lease: after half of it, unless the server gives another time.
func renewal(l *dhcpv4.DHCPv4) time.Duration {
	if t := l.IPAddressRenewalTime(0); t > 0 && t <= lifetime(l) {
		return t
	}
	return lifetime(l) / 2
}

// mtuOf is the MTU that a server recommends; 0: none, or less than IPv4 needs (RFC 791).
func mtuOf(l *dhcpv4.DHCPv4) int {
	const least = 68
	mtu, err := dhcpv4.GetUint16(dhcpv4.OptionInterfaceMTU, l.Options)
	if err != nil || mtu < least {
		return 0
	}
	return int(mtu)
}

// addressOf is the address of a lease. A mask with gaps counts as none.
func addressOf(l *dhcpv4.DHCPv4) *net.IPNet {
	bits := 32
	if ones, _ := l.SubnetMask().Size(); ones > 0 {
		bits = ones
	}
	return &net.IPNet{IP: l.YourIPAddr, Mask: net.CIDRMask(bits, 32)}
}

// routesOf are the routes of a lease, by the network card with this number.
func routesOf(l *dhcpv4.DHCPv4, card int) (routes []*netlink.Route) {
	// With classless routes, the router option is to be ignored (RFC 3442).
	list := l.ClasslessStaticRoute()
	if routers := l.Router(); len(list) == 0 && len(routers) > 0 {
		all := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
		list = []*dhcpv4.Route{{Dest: all, Router: routers[0]}}
	}
	const metric = 100 // of the first card; then by their numbers
	for _, r := range list {
		to := &net.IPNet{IP: r.Dest.IP.Mask(r.Dest.Mask), Mask: r.Dest.Mask}
		route := &netlink.Route{LinkIndex: card, Dst: to, Src: l.YourIPAddr,
			Priority: metric + card, Protocol: unix.RTPROT_DHCP}
		if r.Router.IsUnspecified() {
			route.Scope = netlink.SCOPE_LINK
		} else {
			// With a mask of 32 bits, the router is not on the link.
			route.Gw, route.Flags = r.Router, int(netlink.FLAG_ONLINK)
		}
		routes = append(routes, route)
	}
	return routes
}

// searchOf are the domains in which names are looked up: the search list, or else the own domain.
func searchOf(l *dhcpv4.DHCPv4) []string {
	names := readNames(l.Options.Get(dhcpv4.OptionDNSDomainSearchList))
	if domain := nameOf(l.DomainName()); len(names) == 0 && domain != "" {
		return []string{domain}
	}
	return names
}

// nameOf returns a name that can be written into a file of lines, or "". Other text could add lines
// to resolv.conf.
func nameOf(s string) string {
	if s = strings.TrimRight(s, "\x00"); machine.IsName(s) {
		return s
	}
	return ""
}

// maxName is the most bytes of a domain name (RFC 1035 3.1).
const maxName = 255

// readNames reads domain names with DNS's compression (RFC 1035 4.1.4, RFC 3397). A malformed name
// ends the list. The DHCP library is not used: it refuses a whole list in which one pointer leads
// to another, which the RFC allows.
func readNames(b []byte) (names []string) {
	for at := 0; at < len(b); {
		name, next, ok := readName(b, at)
		if !ok {
			return names
		}
		if name != "" {
			names = append(names, name)
		}
		at = next
	}
	return names
}

// readName reads the name at an offset, and returns the offset after it. A pointer must lead
// backwards, so that no name is endless.
func readName(b []byte, at int) (name string, next int, ok bool) {
	var labels []string
	length, limit := 0, at
	for at < len(b) {
		n := int(b[at])
		switch {
		case n == 0:
			return strings.Join(labels, "."), max(next, at+1), true
		case n&0xc0 == 0xc0:
			if at+1 >= len(b) {
				return "", 0, false
			}
			to := n&0x3f<<8 | int(b[at+1])
			if to >= limit {
				return "", 0, false
			}
			next = max(next, at+2)
			at, limit = to, to
		case n&0xc0 != 0 || at+1+n > len(b):
			return "", 0, false
		default:
			label := nameOf(string(b[at+1 : at+1+n]))
			if length += n + 1; label == "" || length > maxName {
				return "", 0, false
			}
			labels = append(labels, label)
			at += 1 + n
		}
	}
	return "", 0, false
}
