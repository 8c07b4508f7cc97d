package rtnl

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

var order = binary.NativeEndian

// message is a request under construction: header, fixed part, attributes.
type message []byte

func newMessage(kind, flags uint16, fixed ...byte) message {
	m := make(message, unix.SizeofNlMsghdr, 128)
	order.PutUint16(m[4:], kind)
	order.PutUint16(m[6:], flags|unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	return append(m, fixed...)
}

func (m message) attribute(kind uint16, value []byte) message {
	m = order.AppendUint16(m, uint16(unix.SizeofRtAttr+len(value)))
	m = append(order.AppendUint16(m, kind), value...)
	for len(m)%unix.RTA_ALIGNTO != 0 {
		m = append(m, 0)
	}
	return m
}

func (m message) number(kind uint16, value uint32) message {
	return m.attribute(kind, order.AppendUint32(nil, value))
}

// finish fills in the length and the number that identifies the answer.
func (m message) finish(sequence uint32) []byte {
	order.PutUint32(m[0:], uint32(len(m)))
	order.PutUint32(m[8:], sequence)
	return m
}

// linkUp is struct ifinfomsg with IFF_UP, and the MTU if it is not 0.
func linkUp(index, mtu int) message {
	fixed := make([]byte, unix.SizeofIfInfomsg)
	order.PutUint32(fixed[4:], uint32(index))
	order.PutUint32(fixed[8:], unix.IFF_UP)
	order.PutUint32(fixed[12:], unix.IFF_UP)
	m := newMessage(unix.RTM_NEWLINK, 0, fixed...)
	if mtu > 0 {
		m = m.number(unix.IFLA_MTU, uint32(mtu))
	}
	return m
}

func family(a netip.Addr) byte {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// address is struct ifaddrmsg. kind is RTM_NEWADDR or RTM_DELADDR.
func address(kind uint16, index int, p netip.Prefix) message {
	fixed := make([]byte, unix.SizeofIfAddrmsg)
	fixed[0], fixed[1] = family(p.Addr()), byte(p.Bits())
	order.PutUint32(fixed[4:], uint32(index))
	var flags uint16
	if kind == unix.RTM_NEWADDR {
		flags = unix.NLM_F_CREATE | unix.NLM_F_REPLACE
	}
	m := newMessage(kind, flags, fixed...)
	m = m.attribute(unix.IFA_LOCAL, p.Addr().AsSlice())
	return m.attribute(unix.IFA_ADDRESS, p.Addr().AsSlice())
}

// route is struct rtmsg. Without a router the network is on the link.
func route(r Route) message {
	fixed := make([]byte, unix.SizeofRtMsg)
	fixed[0], fixed[1] = family(r.To.Addr()), byte(r.To.Bits())
	fixed[4], fixed[5], fixed[7] = unix.RT_TABLE_MAIN, unix.RTPROT_DHCP, unix.RTN_UNICAST
	routed := r.Via.IsValid() && !r.Via.IsUnspecified()
	if !routed {
		fixed[6] = unix.RT_SCOPE_LINK
	} else {
		// Networks that are made of addresses with 32 bits have their router on no network.
		order.PutUint32(fixed[8:], unix.RTNH_F_ONLINK)
	}
	m := newMessage(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, fixed...)
	if r.To.Bits() > 0 {
		m = m.attribute(unix.RTA_DST, r.To.Addr().AsSlice())
	}
	if routed {
		m = m.attribute(unix.RTA_GATEWAY, r.Via.AsSlice())
	}
	if r.Source.IsValid() {
		m = m.attribute(unix.RTA_PREFSRC, r.Source.AsSlice())
	}
	return m.number(unix.RTA_OIF, uint32(r.Index)).number(unix.RTA_PRIORITY, r.Metric)
}
