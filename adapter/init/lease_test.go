package guestinit

import (
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"kubevirt.io/disk/internal/testtool"
)

var testCard = &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "eth0", Index: 1 << 20,
	HardwareAddr: net.HardwareAddr{0x52, 0x54, 0, 0x12, 0x34, 0x56}}}

// servers is a network whose DHCP servers are a function. It is also the connection to it.
type servers struct {
	net.PacketConn // nil
	answer         func(*dhcpv4.DHCPv4) *dhcpv4.DHCPv4
	answers        chan []byte
	closed         chan struct{}
	noise          atomic.Value // []byte that come all the time
}

func (s *servers) WriteTo(b []byte, _ net.Addr) (int, error) {
	query, err := dhcpv4.FromBytes(b)
	if err != nil {
		return 0, err
	}
	if a := s.answer(query); a != nil {
		s.answers <- a.ToBytes()
	}
	return len(b), nil
}

func (s *servers) ReadFrom(b []byte) (int, net.Addr, error) {
	select {
	case a := <-s.answers:
		return copy(b, a), nil, nil
	case <-s.closed:
		return 0, nil, net.ErrClosed
	case <-time.After(firstWait / 2):
		noise, _ := s.noise.Load().([]byte)
		return copy(b, noise), nil, nil
	}
}

func (s *servers) Close() error {
	close(s.closed)
	return nil
}

// withServers returns a network with DHCP servers, and the queries that they have got.
func withServers(answer func(*dhcpv4.DHCPv4) *dhcpv4.DHCPv4) (*network, *[]*dhcpv4.DHCPv4) {
	n, queries := newNetwork("", "web", nil), new([]*dhcpv4.DHCPv4)
	n.broadcast = func(string) (net.PacketConn, error) {
		return &servers{answers: make(chan []byte, 8), closed: make(chan struct{}),
			answer: func(query *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
				*queries = append(*queries, query)
				return answer(query)
			}}, nil
	}
	return n, queries
}

var testServer = net.IPv4(10, 0, 2, 2).To4()

// reply is a server's answer to a query.
func reply(t *testing.T, query *dhcpv4.DHCPv4, kind dhcpv4.MessageType) *dhcpv4.DHCPv4 {
	t.Helper()
	return testtool.Must(dhcpv4.NewReplyFromRequest(query, dhcpv4.WithMessageType(kind),
		dhcpv4.WithYourIP(net.IPv4(10, 0, 2, 15)), dhcpv4.WithServerIP(testServer),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(testServer))))(t)
}

// TestAcquire: the first answers are lost. Then the address is asked for that a server has offered,
// of this server, and it may be refused.
func TestAcquire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		number, last := 0, dhcpv4.MessageTypeAck
		n, queries := withServers(func(query *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
			switch number++; {
			case number <= 2:
				return nil
			case query.MessageType() == dhcpv4.MessageTypeDiscover:
				return reply(t, query, dhcpv4.MessageTypeOffer)
			}
			return reply(t, query, last)
		})
		l := testtool.Must(n.acquire(testCard))(t)
		require.Equal(t, "10.0.2.15", l.YourIPAddr.String())
		require.Len(t, *queries, 4)
		for _, q := range *queries {
			require.True(t, q.IsBroadcast())
			require.Equal(t, "web", q.HostName())
			require.Equal(t, append([]byte{1}, testCard.HardwareAddr...),
				q.GetOneOption(dhcpv4.OptionClientIdentifier))
			require.True(t, q.IsOptionRequested(dhcpv4.OptionClasslessStaticRoute))
		}
		request := (*queries)[3]
		require.Equal(t, dhcpv4.MessageTypeRequest, request.MessageType())
		require.Equal(t, "10.0.2.15", request.RequestedIPAddress().String())
		require.Equal(t, testServer, request.ServerIdentifier())

		number, last = 0, dhcpv4.MessageTypeNak
		require.ErrorIs(t, testtool.Err(n.acquire(testCard)), errRefused)
	})
}

// TestUnwantedAnswers: answers of another kind do not keep a query waiting for ever.
func TestUnwantedAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, _ := withServers(nil)
		n.broadcast = func(string) (net.PacketConn, error) {
			s := &servers{closed: make(chan struct{})}
			s.answer = func(query *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
				s.noise.Store(reply(t, query, dhcpv4.MessageTypeNak).ToBytes())
				return nil
			}
			return s, nil
		}
		require.EqualError(t, testtool.Err(n.acquire(testCard)), "no DHCP server answers")
	})
}

// TestRenew: a server that does not answer is asked again, until the lease has ended, which may be
// soon.
func TestRenew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		silent := 2 * renewTries
		n, queries := withServers(func(query *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
			if silent--; silent >= 0 {
				return nil
			}
			return reply(t, query, dhcpv4.MessageTypeAck)
		})
		l := &dhcpv4.DHCPv4{YourIPAddr: net.IPv4(10, 0, 2, 15)}
		renewed := testtool.Must(n.renew(testCard, l, time.Now().Add(time.Minute)))(t)
		require.Equal(t, dhcpv4.MessageTypeAck, renewed.MessageType())
		for _, q := range *queries {
			require.Equal(t, "10.0.2.15", q.ClientIPAddr.String())
			require.Equal(t, dhcpv4.MessageTypeRequest, q.MessageType())
			require.Nil(t, q.RequestedIPAddress())
			require.False(t, q.IsBroadcast())
		}
		silent = 1 << 20
		_, err := n.renew(testCard, l, time.Now().Add(time.Hour))
		require.EqualError(t, err, "no DHCP server answers")
	})
}

// message is a server's message with these options.
func message(options ...dhcpv4.Option) *dhcpv4.DHCPv4 {
	return &dhcpv4.DHCPv4{YourIPAddr: net.IPv4(10, 0, 2, 15),
		Options: dhcpv4.OptionsFromList(options...)}
}

func raw(code dhcpv4.OptionCode, value ...byte) dhcpv4.Option {
	return dhcpv4.OptGeneric(code, value)
}

func TestTimesOfALease(t *testing.T) {
	times := func(options ...dhcpv4.Option) []time.Duration {
		l := message(options...)
		return []time.Duration{lifetime(l), renewal(l)}
	}
	hour := dhcpv4.OptIPAddressLeaseTime(time.Hour)
	require.Equal(t, []time.Duration{0, 0}, times())
	require.Equal(t, []time.Duration{time.Hour, time.Hour / 2}, times(hour))
	require.Equal(t, []time.Duration{time.Hour, time.Minute},
		times(hour, dhcpv4.OptRenewTimeValue(time.Minute)))
	require.Equal(t, []time.Duration{time.Hour, time.Hour / 2},
		times(hour, dhcpv4.OptRenewTimeValue(2*time.Hour)))
	require.Equal(t, []time.Duration{0, 0},
		times(raw(dhcpv4.OptionIPAddressLeaseTime, 255, 255, 255, 255)), "for ever")
}

func TestMTU(t *testing.T) {
	require.Equal(t, 1400, mtuOf(message(raw(dhcpv4.OptionInterfaceMTU, 5, 0x78))))
	require.Zero(t, mtuOf(message(raw(dhcpv4.OptionInterfaceMTU, 0, 67))))
	require.Zero(t, mtuOf(message(raw(dhcpv4.OptionInterfaceMTU, 1))))
}

// TestRoutes: a server of KubeVirt gives a route to its gateway, and the rest through it. A server
// without classless routes names a router.
func TestRoutes(t *testing.T) {
	texts := func(l *dhcpv4.DHCPv4) (texts []string) {
		for _, r := range routesOf(l, 2) {
			require.Equal(t, 102, r.Priority)
			via := "link"
			if r.Scope != netlink.SCOPE_LINK {
				via = r.Gw.String()
			}
			texts = append(texts, r.Dst.String()+" "+via)
		}
		return texts
	}
	router := dhcpv4.OptRouter(net.IPv4(9, 9, 9, 9))
	require.Equal(t, []string{"0.0.0.0/0 9.9.9.9"}, texts(message(router)))
	const classless = dhcpv4.OptionClasslessStaticRoute
	require.Equal(t, []string{"169.254.1.1/32 link", "0.0.0.0/0 169.254.1.1", "10.0.0.0/7 9.9.9.8"},
		texts(message(router, raw(classless, 32, 169, 254, 1, 1, 0, 0, 0, 0,
			0, 169, 254, 1, 1, 7, 11, 9, 9, 9, 8))))
	require.Equal(t, []string{"0.0.0.0/0 9.9.9.9"},
		texts(message(router, raw(classless, 33, 1, 2, 3, 4, 5, 1, 2, 3, 4))))

	require.Equal(t, "10.0.2.15/32", addressOf(message()).String())
	require.Equal(t, "10.0.2.15/24",
		addressOf(message(dhcpv4.OptSubnetMask(net.CIDRMask(24, 32)))).String())
	require.Equal(t, "10.0.2.15/32",
		addressOf(message(dhcpv4.OptSubnetMask(net.IPMask{255, 0, 255, 0}))).String())
}

// TestSearch reads compressed names, and one that would add a line to resolv.conf.
func TestSearch(t *testing.T) {
	domain := dhcpv4.OptDomainName("ab\x00")
	require.Equal(t, []string{"ab"}, searchOf(message(domain)))
	require.Empty(t, searchOf(message(dhcpv4.OptDomainName("a\nb"))))
	require.Equal(t, []string{"svc.cd", "ns.svc.cd", "x.ns.svc.cd"},
		searchOf(message(domain, raw(dhcpv4.OptionDNSDomainSearchList,
			3, 's', 'v', 'c', 2, 'c', 'd', 0, 2, 'n', 's', 0xc0, 0, 1, 'x', 0xc0, 8))))

	require.Empty(t, readNames([]byte("\x05a\nb c\x00")))
	require.Empty(t, readNames([]byte{0xc0, 0}), "a loop")
	require.Empty(t, readNames([]byte{1, 'a', 0xc0, 0}), "a loop")
	require.Equal(t, []string{"a"}, readNames([]byte{1, 'a', 0, 63}))
}

func FuzzAnswer(f *testing.F) {
	f.Add(message(dhcpv4.OptRouter(testServer)).ToBytes())
	f.Add(message(raw(dhcpv4.OptionDNSDomainSearchList, 1, 'a', 0, 0xc0, 0)).ToBytes())
	f.Add(message(raw(dhcpv4.OptionClasslessStaticRoute, 33, 1, 2, 3, 4, 5, 1, 2, 3, 4)).ToBytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := dhcpv4.FromBytes(b)
		if err != nil {
			return
		}
		require.LessOrEqual(t, renewal(l), lifetime(l))
		require.NotZero(t, addressOf(l).String())
		require.GreaterOrEqual(t, mtuOf(l), 0)
		for _, name := range append(searchOf(l), nameOf(l.HostName())) {
			require.NotContains(t, name, "\n")
			require.NotContains(t, name, " ")
		}
		for _, r := range routesOf(l, 2) {
			require.True(t, r.Dst.Contains(r.Dst.IP))
		}
	})
}
