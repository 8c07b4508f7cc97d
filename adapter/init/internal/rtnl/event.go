package rtnl

import (
	"encoding/binary"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/adapter/init/internal/dhcp"
)

// Event is something that the kernel has learnt about an interface.
type Event struct {
	Index int
	// Address is an IPv6 address beyond the link that can be used now. Zero: the event is about
	// something else.
	Address netip.Addr
	// DNS or Search are recommended by an IPv6 router for some time (RFC 8106); 0: not any more.
	DNS      []netip.Addr
	Search   []string
	Lifetime time.Duration
}

// The router's options about DNS (RFC 8106 5.1, 5.2), and the size of their fixed part.
const (
	optDNS     = 25
	optSearch  = 31
	optFixed   = 8
	optUnit    = 8  // the length of an option is in units of bytes
	userOption = 16 // the size of struct nduseroptmsg
	tentative  = unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED
)

type part struct {
	kind     uint16
	sequence uint32
	body     []byte
}

// split cuts a datagram of netlink into its messages. A malformed message ends it.
func split(b []byte) (parts []part) {
	for len(b) >= unix.SizeofNlMsghdr {
		n := int(order.Uint32(b))
		if n < unix.SizeofNlMsghdr || n > len(b) {
			return parts
		}
		parts = append(parts, part{kind: order.Uint16(b[4:]), sequence: order.Uint32(b[8:]),
			body: b[unix.SizeofNlMsghdr:n]})
		b = b[min(len(b), (n+3)&^3):]
	}
	return parts
}

func events(b []byte) (list []Event) {
	for _, p := range split(b) {
		switch p.kind {
		case unix.RTM_NEWADDR:
			if e, ok := newAddress(p.body); ok {
				list = append(list, e)
			}
		case unix.RTM_NEWNDUSEROPT:
			list = append(list, routerOptions(p.body)...)
		}
	}
	return list
}

// newAddress reads a message about an IPv6 address.
func newAddress(b []byte) (e Event, ok bool) {
	if len(b) < unix.SizeofIfAddrmsg || b[0] != unix.AF_INET6 || b[2]&tentative != 0 ||
		b[3] != unix.RT_SCOPE_UNIVERSE {
		return e, false
	}
	e.Index = int(order.Uint32(b[4:]))
	for rest := b[unix.SizeofIfAddrmsg:]; len(rest) >= unix.SizeofRtAttr; {
		n := int(order.Uint16(rest))
		if n < unix.SizeofRtAttr || n > len(rest) {
			return e, false
		}
		if order.Uint16(rest[2:]) == unix.IFA_ADDRESS && n == unix.SizeofRtAttr+16 {
			e.Address = netip.AddrFrom16([16]byte(rest[unix.SizeofRtAttr:]))
			return e, true
		}
		rest = rest[min(len(rest), (n+3)&^3):]
	}
	return e, false
}

// routerOptions reads struct nduseroptmsg and the options after it, which are as they came from the
// network. Each option is an event. A malformed option ends it.
func routerOptions(b []byte) (list []Event) {
	if len(b) < userOption || b[0] != unix.AF_INET6 {
		return nil
	}
	index := int(order.Uint32(b[4:]))
	length := int(order.Uint16(b[2:]))
	if length > len(b)-userOption {
		return nil
	}
	for rest := b[userOption : userOption+length]; len(rest) >= optFixed; {
		n := int(rest[1]) * optUnit
		if n == 0 || n > len(rest) {
			break
		}
		value := rest[optFixed:n]
		e := Event{Index: index,
			Lifetime: time.Duration(binary.BigEndian.Uint32(rest[4:])) * time.Second}
		switch rest[0] {
		case optDNS:
			for ; len(value) >= 16; value = value[16:] {
				e.DNS = append(e.DNS, netip.AddrFrom16([16]byte(value)))
			}
		case optSearch:
			e.Search = dhcp.RouterNames(value)
		}
		if len(e.DNS) > 0 || len(e.Search) > 0 {
			list = append(list, e)
		}
		rest = rest[n:]
	}
	return list
}
