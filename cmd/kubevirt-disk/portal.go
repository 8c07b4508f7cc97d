package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"kubevirt.io/disk/internal/daemon"
)

// parsePortal reads ADDRESS:PORT. Without a port it uses defaultPort, and explicit is false. It
// does not resolve names: the result decides who can reach a disk, and it may change.
func parsePortal(s string, defaultPort uint16) (p daemon.Address, explicit bool, err error) {
	if addr, err := netip.ParseAddr(unbracket(s)); err == nil {
		return daemon.Address{Addr: addr.Unmap(), Port: defaultPort}, false, nil
	}
	if s == "localhost" {
		return daemon.Address{Addr: loopback4(), Port: defaultPort}, false, nil
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return daemon.Address{}, false, fmt.Errorf("%q is not an address: want 0.0.0.0:3260, "+
			"[::1]:3260, or :3260 for all addresses", s)
	}
	p.Port, err = parsePort(port)
	if err != nil {
		return daemon.Address{}, false, fmt.Errorf("%q: %w", s, err)
	}
	switch host {
	case "":
		return p, true, nil
	case "localhost":
		p.Addr = loopback4()
		return p, true, nil
	}
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return daemon.Address{}, false, fmt.Errorf("%q: %q is not an IP address (names are not "+
			"looked up)", s, host)
	}
	p.Addr = addr.Unmap()
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
		return 0, fmt.Errorf("%q is not a port: want 0 to 65535", s)
	}
	return uint16(n), nil
}

// portals resolves --listen, --port and the default. Chap says whether initiators must
// authenticate.
func (l *loader) portals(chap bool) []daemon.Address {
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
			return []daemon.Address{{Addr: netip.IPv4Unspecified(), Port: port}}
		}
		return []daemon.Address{{Addr: loopback4(), Port: port}}
	}
	var all []daemon.Address
	for _, e := range elements {
		p, explicit, err := parsePortal(e, port)
		switch {
		case err != nil:
			l.problems.Add(l.source(keyListen), "%v", err)
			continue
		case explicit && portSet && p.Port != port:
			l.problems.Add(l.source(keyListen)+" and "+l.source(keyPort),
				"%q has another port than %d: give the port only once", e, port)
			continue
		}
		switch i := slices.IndexFunc(all, p.Clashes); {
		case i < 0:
		case all[i] == p:
			l.problems.Add(l.source(keyListen), "%s is listed twice", p)
			continue
		default:
			l.problems.Add(l.source(keyListen),
				"one of %s and %s includes the other: leave the other out", all[i], p)
		}
		all = append(all, p)
	}
	return all
}

// checkPages refuses pages on the port of a portal. Otherwise this process would find the port
// taken by itself.
func (l *loader) checkPages(pages *daemon.Address, portals []daemon.Address) {
	if pages == nil {
		return
	}
	both := func(p daemon.Address, all []daemon.Address) daemon.Address {
		if p.Network(all) == "tcp" {
			p.Addr = netip.Addr{} // [::] takes IPv4 too if it is alone
		}
		return p
	}
	at := both(*pages, []daemon.Address{*pages})
	if slices.ContainsFunc(portals,
		func(p daemon.Address) bool { return at.Clashes(both(p, portals)) }) {
		l.problems.Add(l.name(keyMetricsListen),
			"the portals use port %d too: choose another port for one of them, for the portals "+
				"with %s", at.Port, nameOf(keyPort))
	}
}

var errNoAuth = errors.New("without CHAP everybody who reaches the portal could read and write " +
	"the disks: " +
	"set CHAP_USERNAME and CHAP_PASSWORD, or listen on 127.0.0.1 only, or accept it with " +
	"INSECURE_NO_AUTH=true (--insecure-no-auth)")

// checkExposure refuses portals beyond loopback without CHAP.
func (l *loader) checkExposure(portals []daemon.Address, chap, accepted bool) {
	if chap || accepted {
		return
	}
	for _, p := range portals {
		if !p.Loopback() {
			l.problems.Add(l.name(keyListen), "%s is not a loopback address, and %v", p, errNoAuth)
		}
	}
}
