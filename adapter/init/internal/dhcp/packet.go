package dhcp

import (
	"encoding/binary"
	"net/netip"
)

const (
	ipHeader  = 20
	udpHeader = 8
	protoUDP  = 17
)

// Packet wraps a client's message into UDP and IPv4. An unspecified source is 0.0.0.0.
func Packet(message []byte, from, to netip.Addr) []byte {
	total := ipHeader + udpHeader + len(message)
	b := make([]byte, ipHeader+udpHeader, total)
	b[0] = 4<<4 | ipHeader/4
	binary.BigEndian.PutUint16(b[2:], uint16(total))
	b[8], b[9] = 64, protoUDP
	if from.Is4() {
		copy(b[12:], from.AsSlice())
	}
	copy(b[16:], to.AsSlice())
	binary.BigEndian.PutUint16(b[10:], checksum(b[:ipHeader]))
	udp := b[ipHeader:]
	binary.BigEndian.PutUint16(udp[0:], ClientPort)
	binary.BigEndian.PutUint16(udp[2:], ServerPort)
	binary.BigEndian.PutUint16(udp[4:], uint16(udpHeader+len(message)))
	// A checksum of 0 means none (RFC 768); Ethernet has its own.
	return append(b, message...)
}

// Unpack returns the message in a packet of IPv4 if it is UDP to a DHCP client, and not a fragment.
// The checksum of UDP is not looked at: between virtual machines it may be left to the hardware,
// that is, be wrong.
func Unpack(b []byte) (message []byte, ok bool) {
	if len(b) < ipHeader || b[0]>>4 != 4 || b[9] != protoUDP {
		return nil, false
	}
	header, total := int(b[0]&15)*4, int(binary.BigEndian.Uint16(b[2:]))
	const fragment = 0x3fff // more fragments, and the offset
	if header < ipHeader || total > len(b) || total < header+udpHeader ||
		binary.BigEndian.Uint16(b[6:])&fragment != 0 {
		return nil, false
	}
	udp := b[header:total]
	length := int(binary.BigEndian.Uint16(udp[4:]))
	if binary.BigEndian.Uint16(udp[2:]) != ClientPort || length < udpHeader || length > len(udp) {
		return nil, false
	}
	return udp[udpHeader:length], true
}

// checksum is the Internet's (RFC 1071).
func checksum(b []byte) uint16 {
	var sum uint32
	for ; len(b) >= 2; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
