package options

import (
	"net"
	"net/netip"
	"slices"
	"strconv"
)

// Address is an address to listen on.
type Address struct {
	Addr netip.Addr // zero: every address of the machine
	Port uint16     // 0: a free one
}

func (a Address) String() string {
	host := ""
	if a.Addr.IsValid() {
		host = a.Addr.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(int(a.Port)))
}

// Loopback says that only this machine (or this pod) can reach the address.
func (a Address) Loopback() bool { return a.Addr.IsValid() && a.Addr.IsLoopback() }

// Network returns the network for net.Listen, given all addresses to listen on. 0.0.0.0 and [::]
// side by side are each bound for their own family. [::] alone takes IPv4 too, as is usual on
// Linux.
func (a Address) Network(all []Address) string {
	other4 := func(o Address) bool { return o.Addr.Is4() && o.Port == a.Port }
	switch {
	case !a.Addr.IsValid():
		return "tcp"
	case a.Addr.Is4():
		return "tcp4"
	case a.Addr.IsUnspecified() && !slices.ContainsFunc(all, other4):
		return "tcp"
	}
	return "tcp6"
}

// Reachable replaces an address that stands for every address by one that a client on this machine
// can use.
func Reachable(address string) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	switch host {
	case "0.0.0.0", "":
		host = "127.0.0.1"
	case "::":
		host = "::1"
	}
	return net.JoinHostPort(host, port)
}
