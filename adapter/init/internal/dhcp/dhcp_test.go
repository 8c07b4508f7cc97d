package dhcp

import (
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

var mac = [6]byte{0x52, 0x54, 0, 0x12, 0x34, 0x56}

// answer is a server's message with these options.
func answer(options ...byte) []byte {
	b := make([]byte, fixedSize)
	b[0], b[1], b[2] = bootReply, ethernet, 6
	binary.BigEndian.PutUint32(b[4:], 0x01020304)
	copy(b[16:], []byte{10, 0, 2, 15})
	copy(b[28:], mac[:])
	return append(append(append(b, magic[:]...), options...), optEnd)
}

func TestQuery(t *testing.T) {
	b := Query{Type: Request, ID: 0x01020304, Hardware: mac, Hostname: "web",
		Requested: netip.MustParseAddr("10.0.2.15"),
		Server:    netip.MustParseAddr("10.0.2.2")}.Bytes()
	require.Len(t, b, 300)
	require.Equal(t, "0101060001020304000080000000000000000000", hex.EncodeToString(b[:20]))
	require.Equal(t, "63825363"+"350103"+"3d0701525400123456"+"390205dc"+"32040a00020f"+
		"36040a000202"+"0c03776562"+"370b017903060c0f1a77333a3b"+"ff",
		hex.EncodeToString(b[236:236+51]))

	renewal := Query{Type: Request, ID: 1, Hardware: mac,
		Client: netip.MustParseAddr("10.0.2.15")}.Bytes()
	require.Equal(t, "00000a00020f", hex.EncodeToString(renewal[10:16]), "no broadcast flag")
}

func TestParse(t *testing.T) {
	l := testtool.Must(Parse(answer(
		optType, 1, byte(Ack), optMask, 4, 255, 255, 255, 0, optServer, 4, 10, 0, 2, 2,
		optRouter, 4, 10, 0, 2, 2, optDNS, 8, 10, 0, 2, 3, 1, 1, 1, 1,
		optHostname, 3, 'w', 'e', 'b', optDomain, 2, 'a', 'b', optMTU, 2, 5, 0x78,
		optLease, 4, 0, 0, 14, 16)))(t)
	require.Equal(t, Lease{Type: Ack, ID: 0x01020304, Hardware: mac,
		Address: netip.MustParsePrefix("10.0.2.15/24"), Server: netip.MustParseAddr("10.0.2.2"),
		Routes: []Route{{To: netip.MustParsePrefix("0.0.0.0/0"),
			Via: netip.MustParseAddr("10.0.2.2")}},
		DNS:    []netip.Addr{netip.MustParseAddr("10.0.2.3"), netip.MustParseAddr("1.1.1.1")},
		Search: []string{"ab"}, Hostname: "web", MTU: 1400,
		Length: time.Hour, Renew: 30 * time.Minute}, l)
}

// TestParseRoutes: a server of KubeVirt gives a route to its gateway, and the rest through it.
func TestParseRoutes(t *testing.T) {
	l, err := Parse(answer(optType, 1, byte(Offer), optRouter, 4, 9, 9, 9, 9, optStaticRoutes, 14,
		32, 169, 254, 1, 1, 0, 0, 0, 0, 0, 169, 254, 1, 1))
	require.NoError(t, err)
	require.Equal(t, []Route{
		{To: netip.MustParsePrefix("169.254.1.1/32"), Via: netip.MustParseAddr("0.0.0.0")},
		{To: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("169.254.1.1")},
	}, l.Routes)
	require.Zero(t, l.Renew, "for ever")
	require.Equal(t, 32, l.Address.Bits())
}

// TestSearch reads compressed names, over two parts of the option, and one that would add a line to
// resolv.conf.
func TestSearch(t *testing.T) {
	l := testtool.Must(Parse(answer(optType, 1, byte(Ack),
		optSearch, 9, 3, 's', 'v', 'c', 2, 'c', 'd', 0, 2,
		optSearch, 6, 'n', 's', 0xc0, 0, 0xc0, 4)))(t)
	require.Equal(t, []string{"svc.cd", "ns.svc.cd", "cd"}, l.Search)

	require.Empty(t, readNames([]byte("\x05a\nb c\x00")))
	require.Empty(t, readNames([]byte{0xc0, 0}), "a loop")
	require.Empty(t, readNames([]byte{1, 'a', 0xc0, 0}), "a loop")
	require.Equal(t, []string{"a"}, readNames([]byte{1, 'a', 0, 63}))
}

func TestPacket(t *testing.T) {
	b := Packet([]byte("message"), netip.Addr{}, netip.MustParseAddr("255.255.255.255"))
	require.Equal(t, "450000230000000040117acb00000000ffffffff00440043000f0000",
		hex.EncodeToString(b[:28]))
	_, ok := Unpack(b)
	require.False(t, ok, "to a server")
	b[21], b[23] = ServerPort, ClientPort
	message, ok := Unpack(b)
	require.True(t, ok)
	require.Equal(t, "message", string(message))
	for n := range b {
		_, ok := Unpack(b[:n])
		require.False(t, ok, n)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(answer(optType, 1, byte(Ack), optOverload, 1, 3, optLease, 4, 0, 0, 0, 1))
	f.Add(answer(optType, 1, byte(Offer), optSearch, 5, 1, 'a', 0, 0xc0, 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := Parse(b)
		if err != nil {
			return
		}
		require.True(t, l.Address.IsValid())
		require.LessOrEqual(t, l.Renew, max(l.Length, 0))
		for _, name := range append(l.Search, l.Hostname) {
			require.NotContains(t, name, "\n")
			require.NotContains(t, name, " ")
		}
		for _, r := range l.Routes {
			require.True(t, r.To.IsValid())
		}
		message, ok := Unpack(Packet(b, netip.Addr{}, netip.IPv4Unspecified()))
		require.False(t, ok, message)
	})
}
