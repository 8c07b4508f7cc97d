// Package loopback decides whether a host is this machine. Several protocols that share nothing
// else need TLS unless it is.
package loopback

import "net/netip"

// Is reports whether a host, a name or an address without a port, is this machine: localhost, or an
// address of the loopback network.
func Is(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}
