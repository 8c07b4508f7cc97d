package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// portal is an address to listen on.
type portal struct {
	addr netip.Addr // the zero Addr: every address of the machine
	port uint16     // 0: a free one
}

func (p portal) String() string {
	host := ""
	if p.addr.IsValid() {
		host = p.addr.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(int(p.port)))
}

// loopback says that only this machine (or this pod) can reach the portal.
func (p portal) loopback() bool { return p.addr.IsValid() && p.addr.IsLoopback() }

// network is what net.Listen takes. An address is bound for its own family, so that 0.0.0.0 and [::] can
// stand side by side; [::] alone takes IPv4 too, as is usual on Linux.
func (p portal) network(all []portal) string {
	switch {
	case !p.addr.IsValid():
		return "tcp"
	case p.addr.Is4():
		return "tcp4"
	case p.addr.IsUnspecified() && !slices.ContainsFunc(all, func(o portal) bool { return o.addr.Is4() && o.port == p.port }):
		return "tcp"
	}
	return "tcp6"
}

// clashes says that only one of two addresses can be bound: they are the same, or one of them stands for every address of the other's family,
// or of both.
func (p portal) clashes(o portal) bool {
	switch {
	case p.port != o.port || p.port == 0:
		return false
	case !p.addr.IsValid() || !o.addr.IsValid():
		return true
	case p.addr.Is4() != o.addr.Is4():
		return false
	}
	return p == o || p.addr.IsUnspecified() || o.addr.IsUnspecified()
}

// parsePortal reads ADDRESS:PORT. Without a port it is defaultPort, and explicit is false. Names are not
// looked up: what a name resolves to decides who can reach a disk, and that may change.
func parsePortal(s string, defaultPort uint16) (p portal, explicit bool, err error) {
	if addr, err := netip.ParseAddr(unbracket(s)); err == nil {
		return portal{addr: addr.Unmap(), port: defaultPort}, false, nil
	}
	if s == "localhost" {
		return portal{addr: loopback4(), port: defaultPort}, false, nil
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return portal{}, false, fmt.Errorf("%q is no address: want 0.0.0.0:3260, [::1]:3260, or :3260 for all addresses", s)
	}
	p.port, err = parsePort(port)
	if err != nil {
		return portal{}, false, fmt.Errorf("%q: %w", s, err)
	}
	switch host {
	case "":
		return p, true, nil
	case "localhost":
		p.addr = loopback4()
		return p, true, nil
	}
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return portal{}, false, fmt.Errorf("%q: %q is no IP address (names are not looked up)", s, host)
	}
	p.addr = addr.Unmap()
	return p, true, nil
}

func unbracket(s string) string {
	if strings.HasPrefix(s, "[") && strings.HasSuffix(s, "]") {
		return s[1 : len(s)-1]
	}
	return s
}

func loopback4() netip.Addr { return netip.AddrFrom4([4]byte{127, 0, 0, 1}) }

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("%q is no port: want 0 to 65535", s)
	}
	return uint16(n), nil
}

// portals resolves --listen, --port and the default. chap says whether initiators must authenticate.
func (l *loader) portals(chap bool) []portal {
	port, portSet := uint16(defaultPort), l.source(keyPort) != ""
	if portSet {
		p, err := parsePort(l.text(keyPort))
		if err != nil {
			l.problems.Add(l.source(keyPort), "%v", err)
			return nil
		}
		port = p
	}
	elements := l.list(keyListen)
	if len(elements) == 0 {
		if chap {
			return []portal{{addr: netip.IPv4Unspecified(), port: port}}
		}
		return []portal{{addr: loopback4(), port: port}}
	}
	var all []portal
	for _, e := range elements {
		p, explicit, err := parsePortal(e, port)
		switch {
		case err != nil:
			l.problems.Add(l.source(keyListen), "%v", err)
			continue
		case explicit && portSet && p.port != port:
			l.problems.Add(l.source(keyListen)+" and "+l.source(keyPort), "%q has another port than %d: give the port only once", e, port)
			continue
		}
		switch i := slices.IndexFunc(all, p.clashes); {
		case i < 0:
		case all[i] == p:
			l.problems.Add(l.source(keyListen), "%s is listed twice", p)
			continue
		default:
			l.problems.Add(l.source(keyListen), "one of %s and %s has the other in it: leave that out", all[i], p)
		}
		all = append(all, p)
	}
	return all
}

// checkPages refuses pages where a portal is: the port would be found taken, by nobody else than this process.
func (l *loader) checkPages(pages *portal, portals []portal) {
	if pages == nil {
		return
	}
	both := func(p portal, all []portal) portal {
		if p.network(all) == "tcp" {
			p.addr = netip.Addr{} // [::] takes IPv4 too, where it is alone
		}
		return p
	}
	at := both(*pages, []portal{*pages})
	if slices.ContainsFunc(portals, func(p portal) bool { return at.clashes(both(p, portals)) }) {
		l.problems.Add(l.name(keyMetricsListen), "port %d is that of the portals, too: choose another one for either, the latter with %s", at.port, nameOf(keyPort))
	}
}

var errNoAuth = errors.New("without CHAP everybody who reaches the portal could read and write the disks: " +
	"set CHAP_USERNAME and CHAP_PASSWORD, or listen on 127.0.0.1 only, or accept it with INSECURE_NO_AUTH=true (--insecure-no-auth)")

// checkExposure refuses portals beyond loopback that nothing protects.
func (l *loader) checkExposure(portals []portal, chap, accepted bool) {
	if chap || accepted {
		return
	}
	for _, p := range portals {
		if !p.loopback() {
			l.problems.Add(l.name(keyListen), "%s is not a loopback address, and %v", p, errNoAuth)
		}
	}
}
