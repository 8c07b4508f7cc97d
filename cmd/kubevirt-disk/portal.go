package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/nbd"
)

// parsePortal reads ADDRESS:PORT. Without a port it uses defaultPort, and explicit is false. It
// does not resolve names: an address decides who can reach a disk, and that of a name may change.
func parsePortal(s string, defaultPort uint16) (p options.Address, explicit bool, err error) {
	bare := s
	if strings.HasPrefix(s, "[") && strings.HasSuffix(s, "]") {
		bare = s[1 : len(s)-1]
	}
	if addr, err := parseIP(bare); err == nil {
		return options.Address{Addr: addr, Port: defaultPort}, false, nil
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return p, false, fmt.Errorf("%q is not an address: want 0.0.0.0:3260, [::1]:3260, or "+
			":3260 for all addresses", s)
	}
	if p.Port, err = parsePort(port); err == nil && host != "" {
		p.Addr, err = parseIP(host)
	}
	if err != nil {
		return options.Address{}, false, fmt.Errorf("%q: %w", s, err)
	}
	return p, true, nil
}

// parseIP reads an address, or localhost, which needs no look-up.
func parseIP(s string) (netip.Addr, error) {
	if s == "localhost" {
		return loopback4(), nil
	}
	addr, err := netip.ParseAddr(s)
	if err != nil {
		err = fmt.Errorf("%q is not an IP address (names are not looked up)", s)
	}
	return addr.Unmap(), err
}

func loopback4() netip.Addr { return netip.AddrFrom4([4]byte{127, 0, 0, 1}) }

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("%q is not a port: want 0 to 65535", s)
	}
	return uint16(n), nil
}

// portals resolves --listen, --port and the default. chap: initiators must authenticate.
func (l loader) portals(c *config, chap bool) []options.Address {
	if !l.iscsi(c) {
		return nil
	}
	port, portSet := uint16(defaultPort), l.Source(keyPort) != ""
	if portSet {
		p, err := parsePort(l.Text(keyPort))
		if err != nil {
			l.Problems.Add(l.Source(keyPort), "%v", err)
			return nil
		}
		port = p
	}
	elements := l.List(keyListen)
	if len(elements) == 0 {
		if chap {
			return []options.Address{{Addr: netip.IPv4Unspecified(), Port: port}}
		}
		return []options.Address{{Addr: loopback4(), Port: port}}
	}
	var all []options.Address
	for _, e := range elements {
		p, explicit, err := parsePortal(e, port)
		switch {
		case err != nil:
			l.Problems.Add(l.Source(keyListen), "%v", err)
			continue
		case explicit && portSet && p.Port != port:
			l.Problems.Add(l.Source(keyListen)+" and "+l.Source(keyPort),
				"%q has another port than %d: give the port only once", e, port)
			continue
		}
		all = append(all, p)
	}
	return all
}

// iscsi reads --iscsi. Without iSCSI there must be another way to the disks. A command has NBD.
func (l loader) iscsi(c *config) bool {
	on, err := settings.ParseTruth(l.Text(keyISCSI))
	switch {
	case err != nil:
		l.Problems.Add(l.Source(keyISCSI), "%v", err)
	case on:
	case len(l.List(keyNBD)) == 0 && l.Text(keyVhostUser) == "" && len(c.command) == 0:
		l.Problems.Add(l.Source(keyISCSI), "leaves no way to the disks: set %s or %s",
			nameOf(keyNBD), nameOf(keyVhostUser))
	default:
		for _, key := range []string{keyListen, keyPort} {
			if l.Source(key) != "" {
				l.Problems.Add(l.Source(key), "is for iSCSI, which %s has turned off",
					l.Source(keyISCSI))
			}
		}
		return false
	}
	return true
}

const nbdPort = 10809 // IANA's

// nbd resolves --nbd.
func (l loader) nbd(files options.NBDTLS) (all []options.NBDPortal) {
	source := l.Source(keyNBD)
	secure := files.Cert != "" && files.Key != "" && files.ClientCA != ""
	if !secure && files != (options.NBDTLS{}) {
		l.Problems.Add("TLS of NBD", "takes three files: set %s, %s and %s", nameOf(keyNBDTLSCert),
			nameOf(keyNBDTLSKey), nameOf(keyNBDClientCA))
	}
	for _, e := range l.List(keyNBD) {
		var p options.NBDPortal
		if path, ok := strings.CutPrefix(e, "unix:"); ok {
			p.Socket = path
			if path == "" {
				l.Problems.Add(source, "%q names no socket: want unix:PATH", e)
				continue
			}
		} else {
			var err error
			if p.Address, _, err = parsePortal(e, nbdPort); err != nil {
				l.Problems.Add(source, "%q is not an address of NBD: want unix:PATH, or "+
					"127.0.0.1:%d", e, nbdPort)
				continue
			}
			if !secure && !p.Address.Loopback() {
				l.Problems.Add(source, "%s can be reached from elsewhere, and NBD asks clients "+
					"for nothing without TLS: use a Unix socket or an address of loopback, or set "+
					"%s, %s and %s", p, nameOf(keyNBDTLSCert), nameOf(keyNBDTLSKey),
					nameOf(keyNBDClientCA))
				continue
			}
		}
		all = append(all, p)
	}
	return all
}

var errNoAuth = errors.New("without CHAP everybody who reaches the portal could read and write " +
	"the disks: set CHAP_USERNAME and CHAP_PASSWORD, or listen on 127.0.0.1 only, or accept it " +
	"with INSECURE_NO_AUTH=true (--insecure-no-auth)")

// checkExposure refuses portals beyond loopback without CHAP.
func (l loader) checkExposure(portals []options.Address, chap, accepted bool) {
	if chap || accepted {
		return
	}
	for _, p := range portals {
		if !p.Loopback() {
			l.Problems.Add(l.Name(keyListen), "%s is not a loopback address, and %v", p, errNoAuth)
		}
	}
}

// remotes is a field that takes disks of other servers.
func remotes(at *[]options.Remote) settings.Landing {
	return settings.Landing{At: at, Set: func(given []string) error {
		var wrong []error
		for i, text := range given {
			parsed, err := nbd.ParseURI(text)
			u := options.Remote(parsed)
			switch {
			case err != nil: // the error does not repeat the text, which may have a password
				wrong = append(wrong, fmt.Errorf("disk %d: %w", i+1, err))
			case slices.Contains(*at, u):
				wrong = append(wrong, fmt.Errorf("%q is named twice", text))
			default:
				*at = append(*at, u)
			}
		}
		return errors.Join(wrong...)
	}}
}

// checkRemotes finds settings of --disk that contradict each other.
func (l loader) checkRemotes(r options.Remotes) {
	secure := func(u options.Remote) bool { return u.TLS }
	if (r.Cert == "") != (r.Key == "") {
		l.Problems.Add("TLS of --"+keyDisk, "takes a certificate and its key: set %s and %s",
			nameOf(keyDiskTLSCert), nameOf(keyDiskTLSKey))
	}
	for _, key := range []string{keyDiskTLSCert, keyDiskServerCA} {
		if l.Source(key) != "" && !slices.ContainsFunc(r.Disks, secure) {
			l.Problems.Add(l.Source(key), "is for disks of nbds://, and %s names none",
				nameOf(keyDisk))
		}
	}
}
