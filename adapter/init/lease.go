package guestinit

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/insomniacslk/dhcp/iana"
	"github.com/vishvananda/netlink"
)

// A DHCP server gets this time for its first answer, and twice as long for each later one. It is
// shorter than RFC 2131 4.1 proposes, because the server is mostly on the same host.
const (
	firstWait     = time.Second / 4
	discoverTries = 7 // 32 seconds
	requestTries  = 4
	renewTries    = 2
)

// errRefused means that a server refused the requested address (DHCPNAK).
var errRefused = errors.New("the DHCP server has refused the address")

// lease gets an address for a card, and renews it as long as the machine runs.
func (n *network) lease(c netlink.Link) {
	warned := false
	for {
		l, err := n.acquire(c)
		if err == nil {
			err = n.configure(c, l, nil)
		}
		if err != nil {
			// Report it once: a network without a DHCP server is no error.
			if !warned {
				n.say("%s has no IPv4 address yet: %v", c.Attrs().Name, err)
				warned = true
			}
			time.Sleep(firstWait)
			continue
		}
		if l = n.keep(c, l); l == nil {
			return
		}
		n.drop(c, l)
		warned = false
	}
}

// keep renews a lease. It returns the last lease when that has expired, or nil if it never expires.
func (n *network) keep(c netlink.Link, l *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
	for lifetime(l) > 0 {
		end := time.Now().Add(lifetime(l))
		time.Sleep(renewal(l))
		renewed, err := n.renew(c, l, end)
		if err == nil {
			err = n.configure(c, renewed, l)
		}
		if err != nil {
			n.say("%s: the lease of %v is not renewed: %v", c.Attrs().Name, l.YourIPAddr, err)
			return l
		}
		l = renewed
	}
	return nil
}

// renew extends the lease until it has expired. It broadcasts instead of asking the server of the
// lease (RFC 2131 4.3.2, REBINDING): that server gets the broadcast, too, and if it is gone,
// another one answers.
func (n *network) renew(c netlink.Link, l *dhcpv4.DHCPv4, end time.Time) (*dhcpv4.DHCPv4, error) {
	query := n.query(c, dhcpv4.MessageTypeRequest)
	query.ClientIPAddr = l.YourIPAddr
	for {
		answer, err := n.ask(c, query, renewTries, dhcpv4.MessageTypeAck, dhcpv4.MessageTypeNak)
		left := time.Until(end)
		if err == nil || errors.Is(err, errRefused) || left < time.Second {
			return answer, err
		}
		time.Sleep(min(time.Minute, left/2)) // RFC 2131 4.4.5
	}
}

// acquire gets a new lease.
func (n *network) acquire(c netlink.Link) (*dhcpv4.DHCPv4, error) {
	query := n.query(c, dhcpv4.MessageTypeDiscover)
	query.SetBroadcast() // without an address we only receive broadcasts
	offer, err := n.ask(c, query, discoverTries, dhcpv4.MessageTypeOffer)
	if err != nil {
		return nil, err
	}
	query.UpdateOption(dhcpv4.OptMessageType(dhcpv4.MessageTypeRequest))
	query.UpdateOption(dhcpv4.OptRequestedIPAddress(offer.YourIPAddr))
	if server := offer.ServerIdentifier(); server != nil {
		query.UpdateOption(dhcpv4.OptServerIdentifier(server))
	}
	return n.ask(c, query, requestTries, dhcpv4.MessageTypeAck, dhcpv4.MessageTypeNak)
}

// query makes a message to DHCP servers. It does not use the library's constructors: they keep a
// processor busy until the kernel has entropy, which may take long after the start.
func (n *network) query(c netlink.Link, kind dhcpv4.MessageType) *dhcpv4.DHCPv4 {
	hardware := c.Attrs().HardwareAddr
	m := &dhcpv4.DHCPv4{OpCode: dhcpv4.OpcodeBootRequest, HWType: iana.HWTypeEthernet,
		ClientHWAddr: hardware, Options: dhcpv4.OptionsFromList(
			dhcpv4.OptMessageType(kind),
			dhcpv4.OptClientIdentifier(append([]byte{byte(iana.HWTypeEthernet)}, hardware...)),
			dhcpv4.OptMaxMessageSize(nclient4.MaxMessageSize),
			dhcpv4.OptParameterRequestList(dhcpv4.OptionSubnetMask,
				dhcpv4.OptionClasslessStaticRoute, dhcpv4.OptionRouter,
				dhcpv4.OptionDomainNameServer, dhcpv4.OptionHostName, dhcpv4.OptionDomainName,
				dhcpv4.OptionInterfaceMTU, dhcpv4.OptionDNSDomainSearchList,
				dhcpv4.OptionIPAddressLeaseTime, dhcpv4.OptionRenewTimeValue,
				dhcpv4.OptionRebindingTimeValue))}
	binary.BigEndian.PutUint32(m.TransactionID[:], rand.Uint32())
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.hostname != unnamed {
		m.UpdateOption(dhcpv4.OptHostName(n.hostname))
	}
	return m
}

// ask sends a message up to tries times, until a wanted answer arrives.
func (n *network) ask(c netlink.Link, query *dhcpv4.DHCPv4, tries int,
	want ...dhcpv4.MessageType) (*dhcpv4.DHCPv4, error) {
	conn, err := n.broadcast(c.Attrs().Name)
	if err != nil {
		return nil, err
	}
	client, err := nclient4.NewWithConn(conn, c.Attrs().HardwareAddr,
		nclient4.WithTimeout(firstWait), nclient4.WithRetry(tries))
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	defer client.Close()
	// The client restarts its own time-out at each unwanted answer.
	limit, stop := context.WithTimeout(context.Background(), firstWait<<tries)
	defer stop()
	answer, err := client.SendAndRead(limit, nclient4.DefaultServers, query,
		nclient4.IsMessageType(want[0], want[1:]...))
	if errors.Is(err, nclient4.ErrNoResponse) || errors.Is(err, context.DeadlineExceeded) {
		return nil, errors.New("no DHCP server answers")
	}
	if err == nil && answer.MessageType() == dhcpv4.MessageTypeNak {
		return nil, errRefused
	}
	return answer, err
}

// broadcast opens a connection to all DHCP servers, which needs no address.
func broadcast(card string) (net.PacketConn, error) {
	return nclient4.NewRawUDPConn(card, nclient4.ClientPort)
}
