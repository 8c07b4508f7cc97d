package dhcp

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"time"
)

// The ports of client and server.
const (
	ClientPort = 68
	ServerPort = 67
)

// Type is a DHCP message type (RFC 2132 9.6).
type Type byte

// The types that a client deals with.
const (
	Discover Type = 1
	Offer    Type = 2
	Request  Type = 3
	Ack      Type = 5
	Nak      Type = 6
)

// The options that we send or understand (RFC 2132; 119 is RFC 3397, 121 is RFC 3442).
const (
	optPad           = 0
	optMask          = 1
	optRouter        = 3
	optDNS           = 6
	optHostname      = 12
	optDomain        = 15
	optMTU           = 26
	optRequestedIP   = 50
	optLease         = 51
	optOverload      = 52
	optType          = 53
	optServer        = 54
	optParameters    = 55
	optMaxSize       = 57
	optRenewal       = 58
	optRebinding     = 59
	optClientID      = 61
	optSearch        = 119
	optStaticRoutes  = 121
	optEnd           = 255
	bootRequest      = 1
	bootReply        = 2
	ethernet         = 1
	fixedSize        = 236 // of a BOOTP message, before the magic cookie
	fileOffset       = 108
	serverNameOffset = 44
	minimumSize      = 300 // BOOTP relays drop shorter ones (RFC 1542 2.1)
	broadcastFlag    = 0x8000
)

var magic = [4]byte{99, 130, 83, 99}

// Query is a client's message.
type Query struct {
	Type     Type
	ID       uint32 // of the exchange
	Hardware [6]byte
	Hostname string // "": none

	Client    netip.Addr // the address that we have and want to keep; zero: none yet
	Requested netip.Addr // that a server has offered; zero: none
	Server    netip.Addr // whose offer that was; zero: none
}

// Bytes is the message, the content of a UDP packet.
func (q Query) Bytes() []byte {
	b := make([]byte, fixedSize, minimumSize)
	b[0], b[1], b[2] = bootRequest, ethernet, byte(len(q.Hardware))
	binary.BigEndian.PutUint32(b[4:], q.ID)
	if q.Client.Is4() {
		copy(b[12:], q.Client.AsSlice())
	} else {
		// Without an address we cannot receive a packet to one.
		binary.BigEndian.PutUint16(b[10:], broadcastFlag)
	}
	copy(b[28:], q.Hardware[:])
	b = append(b, magic[:]...)
	option := func(code byte, value ...byte) {
		b = append(append(b, code, byte(len(value))), value...)
	}
	option(optType, byte(q.Type))
	option(optClientID, append([]byte{ethernet}, q.Hardware[:]...)...)
	option(optMaxSize, 1500>>8, 1500&0xff)
	if q.Requested.Is4() {
		option(optRequestedIP, q.Requested.AsSlice()...)
	}
	if q.Server.Is4() {
		option(optServer, q.Server.AsSlice()...)
	}
	if q.Hostname != "" && len(q.Hostname) < 256 {
		option(optHostname, []byte(q.Hostname)...)
	}
	option(optParameters, optMask, optStaticRoutes, optRouter, optDNS, optHostname, optDomain,
		optMTU, optSearch, optLease, optRenewal, optRebinding)
	b = append(b, optEnd)
	for len(b) < minimumSize {
		b = append(b, optPad)
	}
	return b
}

// Route is a network, and the router to it. A router of 0.0.0.0 means that it is on this link.
type Route struct {
	To  netip.Prefix
	Via netip.Addr
}

// Lease is a server's message: an offer, an acknowledgement, or a refusal.
type Lease struct {
	Type     Type
	ID       uint32
	Hardware [6]byte

	Address  netip.Prefix
	Server   netip.Addr
	Routes   []Route // the default route is one of them
	DNS      []netip.Addr
	Search   []string // domains; one that is only the machine's own domain counts
	Hostname string
	MTU      int           // 0: not said
	Length   time.Duration // 0: for ever
	// Renew is when to ask for more time, half of Length unless the server says otherwise.
	Renew time.Duration
}

var errMalformed = errors.New("malformed DHCP message")

// Parse reads a server's message.
func Parse(b []byte) (Lease, error) {
	if len(b) < fixedSize+len(magic) || b[0] != bootReply || b[1] != ethernet || b[2] != 6 ||
		[4]byte(b[fixedSize:]) != magic {
		return Lease{}, errMalformed
	}
	l := Lease{ID: binary.BigEndian.Uint32(b[4:]), Hardware: [6]byte(b[28:])}
	options, err := readOptions(b[fixedSize+len(magic):])
	if err != nil {
		return Lease{}, err
	}
	// An option may continue where the names of a boot server would be (RFC 2131 4.1).
	if over := options[optOverload]; len(over) == 1 {
		for _, part := range []struct{ bit, from, to int }{
			{1, fileOffset, fixedSize}, {2, serverNameOffset, fileOffset},
		} {
			if int(over[0])&part.bit == 0 {
				continue
			}
			more, err := readOptions(b[part.from:part.to])
			if err != nil {
				return Lease{}, err
			}
			for code, value := range more {
				options[code] = append(options[code], value...)
			}
		}
	}
	if len(options[optType]) != 1 {
		return Lease{}, errMalformed
	}
	l.Type = Type(options[optType][0])
	l.fill(netip.AddrFrom4([4]byte(b[16:])), options)
	return l, nil
}

// readOptions reads the options up to their end. Parts of a long option are joined (RFC 3396).
func readOptions(b []byte) (map[byte][]byte, error) {
	options := map[byte][]byte{}
	for len(b) > 0 {
		code := b[0]
		if code == optEnd {
			return options, nil
		}
		if code == optPad {
			b = b[1:]
			continue
		}
		if len(b) < 2 || len(b) < 2+int(b[1]) {
			return nil, errMalformed
		}
		end := 2 + int(b[1])
		options[code] = append(options[code], b[2:end]...)
		b = b[end:]
	}
	return options, nil
}

// fill takes the values of the options. It ignores malformed ones.
func (l *Lease) fill(address netip.Addr, options map[byte][]byte) {
	bits := 32
	if mask := options[optMask]; len(mask) == 4 {
		bits = leadingOnes(binary.BigEndian.Uint32(mask))
	}
	l.Address = netip.PrefixFrom(address, bits)
	if servers := addresses(options[optServer]); len(servers) > 0 {
		l.Server = servers[0]
	}
	// A server that sends classless routes wants the router ignored (RFC 3442).
	if routes, ok := readRoutes(options[optStaticRoutes]); ok {
		l.Routes = routes
	} else if routers := addresses(options[optRouter]); len(routers) > 0 {
		l.Routes = []Route{{To: netip.PrefixFrom(netip.IPv4Unspecified(), 0), Via: routers[0]}}
	}
	l.DNS = addresses(options[optDNS])
	l.Search = readNames(options[optSearch])
	if domain := text(options[optDomain]); len(l.Search) == 0 && domain != "" {
		l.Search = []string{domain}
	}
	l.Hostname = text(options[optHostname])
	if mtu := options[optMTU]; len(mtu) == 2 {
		l.MTU = int(binary.BigEndian.Uint16(mtu))
	}
	l.Length = seconds(options[optLease])
	if l.Renew = seconds(options[optRenewal]); l.Renew == 0 || l.Renew > l.Length {
		l.Renew = l.Length / 2
	}
}

// leadingOnes is the length of a prefix with this mask. Bits after a gap do not count.
func leadingOnes(mask uint32) int {
	n := 0
	for ; n < 32 && mask&(1<<31) != 0; n++ {
		mask <<= 1
	}
	return n
}

func addresses(b []byte) (list []netip.Addr) {
	for ; len(b) >= 4; b = b[4:] {
		list = append(list, netip.AddrFrom4([4]byte(b)))
	}
	return list
}

// infinite is a lease that does not end.
const infinite = 0xffffffff

func seconds(b []byte) time.Duration {
	if len(b) != 4 || binary.BigEndian.Uint32(b) == infinite {
		return 0
	}
	return time.Duration(binary.BigEndian.Uint32(b)) * time.Second
}

// readRoutes reads classless routes (RFC 3442): the length of a prefix, as many of its bytes as
// count, and a router.
func readRoutes(b []byte) (routes []Route, ok bool) {
	for len(b) > 0 {
		bits := int(b[0])
		used := (bits + 7) / 8
		if bits > 32 || len(b) < 1+used+4 {
			return nil, false
		}
		var network [4]byte
		copy(network[:], b[1:1+used])
		routes = append(routes, Route{
			To:  netip.PrefixFrom(netip.AddrFrom4(network), bits).Masked(),
			Via: netip.AddrFrom4([4]byte(b[1+used:])),
		})
		b = b[1+used+4:]
	}
	return routes, len(routes) > 0
}
