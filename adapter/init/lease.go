package guestinit

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/adapter/init/internal/dhcp"
)

// retries are the times to wait for a DHCP server, one per try. They begin shorter than RFC 2131
// 4.1 proposes, because the server is mostly on the same host.
var retries = []time.Duration{time.Second / 4, time.Second / 2, time.Second, 2 * time.Second,
	4 * time.Second, 8 * time.Second, 16 * time.Second}

// errRefused means that a server refused the address that was asked for (DHCPNAK).
var errRefused = errors.New("the DHCP server has refused the address")

// lease gets an address for a card, and renews it as long as the machine runs.
func (n *network) lease(c card) {
	warned := false
	for {
		l, err := n.acquire(c)
		if err == nil {
			err = n.configure(c, l, dhcp.Lease{})
		}
		if err != nil {
			// Say it once: a network without a DHCP server is no error.
			if !warned {
				n.say("%s has no IPv4 address yet: %v", c.name, err)
				warned = true
			}
			time.Sleep(retries[0])
			continue
		}
		if l.Length == 0 {
			return
		}
		l = n.keep(c, l)
		n.drop(c, l)
		warned = false
	}
}

// keep renews a lease. It returns the last one when it has ended.
func (n *network) keep(c card, l dhcp.Lease) dhcp.Lease {
	for {
		end := time.Now().Add(l.Length)
		time.Sleep(l.Renew)
		renewed, err := n.renew(c, l, end)
		if err == nil {
			err = n.configure(c, renewed, l)
		}
		if err != nil {
			n.say("%s: the lease of %v is not renewed: %v", c.name, l.Address, err)
			return l
		}
		if l = renewed; l.Length == 0 {
			// The lease is infinite.
			select {}
		}
	}
}

// renew extends the lease until it has ended. It broadcasts instead of asking the server that gave
// the lease (RFC 2131 4.3.2, REBINDING): that server gets the broadcast, too, and if it is gone,
// another one answers.
func (n *network) renew(c card, l dhcp.Lease, end time.Time) (dhcp.Lease, error) {
	const often = time.Minute
	query := dhcp.Query{Type: dhcp.Request, ID: rand.Uint32(), Hardware: c.hardware,
		Hostname: n.ownName(), Client: l.Address.Addr()}
	for {
		answer, err := exchange(c, query, 2, dhcp.Ack, dhcp.Nak)
		switch {
		case err == nil && answer.Type == dhcp.Nak:
			return answer, errRefused
		case err == nil:
			return answer, nil
		case time.Now().Add(often).After(end):
			return answer, err
		}
		time.Sleep(often)
	}
}

// acquire gets a new lease.
func (n *network) acquire(c card) (dhcp.Lease, error) {
	query := dhcp.Query{Type: dhcp.Discover, ID: rand.Uint32(), Hardware: c.hardware,
		Hostname: n.ownName()}
	offer, err := exchange(c, query, len(retries), dhcp.Offer)
	if err != nil {
		return offer, err
	}
	query.Type = dhcp.Request
	query.Requested, query.Server = offer.Address.Addr(), offer.Server
	l, err := exchange(c, query, 4, dhcp.Ack, dhcp.Nak)
	if err == nil && l.Type == dhcp.Nak {
		err = errRefused
	}
	return l, err
}

// ownName is the host name that is sent to DHCP servers.
func (n *network) ownName() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.hostname == unnamed {
		return ""
	}
	return n.hostname
}

// everybody is the broadcast address, of IPv4 and of Ethernet.
var (
	everybody         = netip.AddrFrom4([4]byte{255, 255, 255, 255})
	everybodyEthernet = [8]byte{255, 255, 255, 255, 255, 255}
)

// exchange sends a query, at most so many times, until a wanted answer arrives.
func exchange(c card, q dhcp.Query, times int, want ...dhcp.Type) (dhcp.Lease, error) {
	const allIPv4 = uint16(unix.ETH_P_IP)
	protocol := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, allIPv4))
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(protocol))
	if err != nil {
		return dhcp.Lease{}, fmt.Errorf("packet socket: %w", err)
	}
	defer unix.Close(fd)
	at := &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: c.index}
	if err := unix.Bind(fd, at); err != nil {
		return dhcp.Lease{}, fmt.Errorf("packet socket: %w", err)
	}
	packet := dhcp.Packet(q.Bytes(), q.Client, everybody)
	to := &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: c.index,
		Halen: uint8(len(c.hardware)), Addr: everybodyEthernet}
	for _, timeout := range retries[:times] {
		if err := unix.Sendto(fd, packet, 0, to); err != nil {
			return dhcp.Lease{}, fmt.Errorf("packet socket: %w", err)
		}
		l, err := receive(fd, q, time.Now().Add(timeout), want)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return l, err
		}
	}
	return dhcp.Lease{}, errors.New("no DHCP server answers")
}

// receive waits for an answer to a query.
func receive(fd int, q dhcp.Query, end time.Time, want []dhcp.Type) (dhcp.Lease, error) {
	b := make([]byte, 1<<16)
	for {
		left := time.Until(end)
		if left <= 0 {
			return dhcp.Lease{}, os.ErrDeadlineExceeded
		}
		limit := unix.NsecToTimeval(left.Nanoseconds() + int64(time.Millisecond))
		err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit)
		if err != nil {
			return dhcp.Lease{}, err
		}
		n, _, err := unix.Recvfrom(fd, b, 0)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return dhcp.Lease{}, err
		}
		message, ok := dhcp.Unpack(b[:n])
		if !ok {
			continue
		}
		l, err := dhcp.Parse(message)
		if err != nil || l.ID != q.ID || l.Hardware != q.Hardware {
			continue // for somebody else
		}
		if slices.Contains(want, l.Type) {
			return l, nil
		}
	}
}
