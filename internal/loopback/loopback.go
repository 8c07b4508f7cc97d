// Package loopback has one answer to whether a host is this machine. Whether TLS is needed depends
// on it in several protocols, which share nothing else.
package loopback

import "net/netip"

// Is reports whether a host, a name or an address without a port, is this machine: localhost, or an
// address of the loopback network.
func Is(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}
