package machines

import (
	encoding "encoding/binary" // binary is a function of the tests
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/stretchr/testify/require"
)

// The settings that a machine on a lan gets. The MTU changes when the machine renews its lease,
// after a second.
const (
	lanHostname   = "from-dhcp"
	lanDomain     = "lan.example"
	lanFirstMTU   = 1400
	lanRenewedMTU = 1380
)

var (
	lanServer   = net.IPv4(192, 0, 2, 1).To4()
	lanClient   = net.IPv4(192, 0, 2, 77).To4()
	lanDNS      = net.IPv4(192, 0, 2, 53).To4()
	lanRouter   = netip.MustParseAddr("fe80::1")
	lanPrefix   = netip.MustParsePrefix("2001:db8:7::/64")
	lanDNS6     = netip.MustParseAddr("2001:db8:7::53")
	lanHardware = [6]byte{2, 0, 0, 0, 0, 1} // of the server and the router
)

// newLAN makes a network with a DHCP server and an IPv6 router, and nothing else. It returns QEMU's
// network options for one machine.
func newLAN(t *testing.T) (netdev string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "lan-") // the names of sockets are short
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	ours, theirs := filepath.Join(dir, "lan"), filepath.Join(dir, "machine")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: ours, Net: "unixgram"})
	require.NoError(t, err)
	ended := make(chan struct{})
	t.Cleanup(func() {
		conn.Close()
		<-ended
	})
	go func() {
		defer close(ended)
		var l lan
		frame := make([]byte, 1<<16)
		for {
			n, from, err := conn.ReadFromUnix(frame)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			for _, answer := range l.answers(frame[:n]) {
				_, _ = conn.WriteToUnix(answer, from) // the machine may be gone
			}
		}
	}()
	return "dgram,id=net,local.type=unix,local.path=" + theirs +
		",remote.type=unix,remote.path=" + ours
}

const (
	etherHeader = 14
	ipv4Header  = 20
	ipv6Header  = 40
	udpHeader   = 8
	icmp6       = 58
)

// lan is the rest of the network of one machine.
type lan struct {
	renewed bool // the machine has renewed its lease
}

// answers returns the frames that answer a frame of the machine to the DHCP server or the router.
// The router answers only after the lease was renewed, so that DHCP always comes first.
func (l *lan) answers(frame []byte) (all [][]byte) {
	if len(frame) < etherHeader+ipv6Header {
		return nil
	}
	packet := frame[etherHeader:]
	switch encoding.BigEndian.Uint16(frame[12:]) {
	case 0x0800:
		const server = 67
		header := int(packet[0]&15) * 4
		if packet[9] != 17 || len(packet) < header+udpHeader ||
			encoding.BigEndian.Uint16(packet[header+2:]) != server {
			return nil
		}
		query, err := dhcpv4.FromBytes(packet[header+udpHeader:])
		if err != nil {
			return nil
		}
		l.renewed = l.renewed || isRenewal(query)
		if answer := lease(query); answer != nil {
			all = append(all, answer)
		}
	case 0x86dd:
		const solicitation = 133
		if packet[6] != icmp6 || len(packet) == ipv6Header || packet[ipv6Header] != solicitation {
			return nil
		}
	default:
		return nil
	}
	if l.renewed {
		all = append(all, advertisement())
	}
	return all
}

// isRenewal reports whether a client already has the address.
func isRenewal(query *dhcpv4.DHCPv4) bool { return lanClient.Equal(query.ClientIPAddr) }

// lease answers a message of a DHCP client.
func lease(query *dhcpv4.DHCPv4) []byte {
	kind, known := map[dhcpv4.MessageType]dhcpv4.MessageType{
		dhcpv4.MessageTypeDiscover: dhcpv4.MessageTypeOffer,
		dhcpv4.MessageTypeRequest:  dhcpv4.MessageTypeAck,
	}[query.MessageType()]
	if !known {
		return nil
	}
	mtu, renewal := lanFirstMTU, time.Second
	if isRenewal(query) {
		mtu, renewal = lanRenewedMTU, time.Hour
	}
	answer, err := dhcpv4.NewReplyFromRequest(query, dhcpv4.WithMessageType(kind),
		dhcpv4.WithYourIP(lanClient), dhcpv4.WithNetmask(net.CIDRMask(24, 32)),
		dhcpv4.WithRouter(lanServer), dhcpv4.WithDNS(lanDNS), dhcpv4.WithLeaseTime(3600),
		dhcpv4.WithOption(dhcpv4.OptRenewTimeValue(renewal)),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(lanServer)),
		dhcpv4.WithOption(dhcpv4.OptHostName(lanHostname)),
		dhcpv4.WithOption(dhcpv4.OptDomainName(lanDomain)),
		dhcpv4.WithGeneric(dhcpv4.OptionInterfaceMTU,
			encoding.BigEndian.AppendUint16(nil, uint16(mtu))))
	if err != nil {
		return nil
	}
	b := answer.ToBytes()
	ip := make([]byte, ipv4Header+udpHeader)
	ip[0], ip[8], ip[9] = 0x45, 64, 17
	encoding.BigEndian.PutUint16(ip[2:], uint16(len(ip)+len(b)))
	copy(ip[12:], lanServer)
	copy(ip[16:], []byte{255, 255, 255, 255})
	encoding.BigEndian.PutUint16(ip[10:], internetSum(ip[:ipv4Header]))
	udp := ip[ipv4Header:]
	udp[1], udp[3] = 67, 68
	encoding.BigEndian.PutUint16(udp[4:], uint16(udpHeader+len(b)))
	return ethernet(net.HardwareAddr{255, 255, 255, 255, 255, 255}, 0x0800, append(ip, b...))
}

// advertisement is an IPv6 router's message to all nodes (RFC 4861 4.2): a prefix for addresses,
// and a name server (RFC 8106 5.1).
func advertisement() []byte {
	lasting := []byte{0, 0, 14, 16} // seconds: an hour
	m := []byte{134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0}
	m = append(m, 3, 4, byte(lanPrefix.Bits()), 0xc0)
	m = append(append(append(m, lasting...), lasting...), 0, 0, 0, 0)
	m = append(m, lanPrefix.Addr().AsSlice()...)
	m = append(append(m, 25, 3, 0, 0), lasting...)
	m = append(m, lanDNS6.AsSlice()...)

	everybody := netip.MustParseAddr("ff02::1")
	ip := make([]byte, ipv6Header)
	ip[0], ip[6], ip[7] = 6<<4, icmp6, 255
	encoding.BigEndian.PutUint16(ip[4:], uint16(len(m)))
	copy(ip[8:], lanRouter.AsSlice())
	copy(ip[24:], everybody.AsSlice())
	pseudo := append(append([]byte(nil), ip[8:]...), 0, 0, 0, byte(len(m)), 0, 0, 0, icmp6)
	encoding.BigEndian.PutUint16(m[2:], internetSum(append(pseudo, m...)))
	return ethernet(net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}, 0x86dd, append(ip, m...))
}

func ethernet(to net.HardwareAddr, kind uint16, packet []byte) []byte {
	frame := append(append([]byte(nil), to...), lanHardware[:]...)
	return append(encoding.BigEndian.AppendUint16(frame, kind), packet...)
}

// internetSum is the checksum of RFC 1071 over an even number of bytes.
func internetSum(b []byte) uint16 {
	sum := uint32(0)
	for ; len(b) >= 2; b = b[2:] {
		sum += uint32(encoding.BigEndian.Uint16(b))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
