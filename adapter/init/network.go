package guestinit

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/adapter/machine"
)

// network sets up the network cards of the machine. The kernel itself handles addresses, routes and
// the MTU of IPv6 router advertisements; the rest is done here.
type network struct {
	say      func(format string, args ...any)
	dir      string // of networkFiles
	online   chan struct{}
	isOnline func() // closes online once
	// setHostname sets the name of the machine.
	setHostname func(string) error
	// broadcast opens a connection of a card to all DHCP servers.
	broadcast func(card string) (net.PacketConn, error)

	mu       sync.Mutex // guards the fields below
	fixed    bool       // the host has named the machine, so DHCP must not
	hostname string
	address  net.IP
	names    map[string]resolver // by their sources
	heard    map[string]routers  // by card
	written  map[string]string   // the last content of each file; the key "" has the host name
}

// resolver has the servers and domains for looking up names.
type resolver struct {
	servers []string
	search  []string
}

// unnamed is the host name if neither the host nor DHCP gives one.
const unnamed = "localhost"

func newNetwork(dir, hostname string, say func(string, ...any)) *network {
	n := &network{say: say, dir: dir, hostname: unnamed, broadcast: broadcast,
		online: make(chan struct{}), names: map[string]resolver{},
		heard: map[string]routers{}, written: map[string]string{}}
	n.setHostname = func(name string) error { return unix.Sethostname([]byte(name)) }
	n.isOnline = sync.OnceFunc(func() { close(n.online) })
	n.nameIt(hostname)
	return n
}

// sysctls are the settings of container runtimes: an image whose user is not root may listen on
// port 80, and ping.
var sysctls = map[string]string{
	"/proc/sys/net/ipv4/ip_unprivileged_port_start": "0",
	"/proc/sys/net/ipv4/ping_group_range":           "0 2147483647",
}

// start begins to set up the network. online is closed when the machine can be reached, or has no
// network card, or cannot use it.
func (n *network) start() {
	if err := n.begin(); err != nil {
		n.say("network: %v", err)
		n.isOnline()
	}
}

// rename sets the host name that the host has chosen; "": none.
func (n *network) rename(hostname string) {
	n.nameIt(hostname)
	n.write()
}

func (n *network) nameIt(hostname string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if machine.IsHostname(hostname) {
		n.fixed, n.hostname = true, hostname
	} else if hostname != "" {
		n.say("%q cannot be the name of a machine", hostname)
	}
}

func (n *network) begin() error {
	n.write()
	for file, value := range sysctls {
		_ = os.WriteFile(file, []byte(value), 0) // an older kernel does not have it
	}
	cards, err := ethernetCards()
	if err != nil {
		return err
	}
	if len(cards) == 0 {
		n.isOnline()
		return nil
	}
	kernel, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_ND_USEROPT,
		unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return err
	}
	go n.watch(kernel, cards)
	for _, c := range cards {
		if err := netlink.LinkSetUp(c); err != nil {
			return fmt.Errorf("network interface %s: %w", c.Attrs().Name, err)
		}
		go n.lease(c)
	}
	return nil
}

// ethernetCards lists the network cards. It also switches the loopback interface on.
func ethernetCards() (cards []netlink.Link, err error) {
	links, err := netlink.LinkList()
	for errors.Is(err, netlink.ErrDumpInterrupted) { // something has changed meanwhile
		links, err = netlink.LinkList()
	}
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		switch l.Attrs().EncapType {
		case "loopback":
			if err := netlink.LinkSetUp(l); err != nil {
				return nil, fmt.Errorf("network interface %s: %w", l.Attrs().Name, err)
			}
		case "ether":
			cards = append(cards, l)
		}
	}
	return cards, nil
}

func newResolver(card string, servers []net.IP, search []string) resolver {
	r := resolver{search: search}
	for _, s := range servers {
		text := s.String()
		if s.To4() == nil && s.IsLinkLocalUnicast() {
			text += "%" + card
		}
		r.servers = append(r.servers, text)
	}
	return r
}

// configure applies a lease. formerly is the previous lease, or nil.
func (n *network) configure(c netlink.Link, l, formerly *dhcpv4.DHCPv4) error {
	card, address := c.Attrs(), addressOf(l)
	if mtu := mtuOf(l); mtu > 0 && (formerly == nil || mtu != mtuOf(formerly)) {
		if err := netlink.LinkSetMTU(c, mtu); err != nil {
			n.say("%s: the MTU %d of the DHCP server is refused: %v", card.Name, mtu, err)
		}
	}
	if formerly != nil && addressOf(formerly).String() != address.String() {
		n.drop(c, formerly)
	}
	if err := netlink.AddrReplace(c, &netlink.Addr{IPNet: address}); err != nil {
		return fmt.Errorf("address %v: %w", address, err)
	}
	for _, r := range routesOf(l, card.Index) {
		if err := netlink.RouteReplace(r); err != nil {
			n.say("%s: the route to %v of the DHCP server is refused: %v", card.Name, r.Dst, err)
		}
	}
	n.mu.Lock()
	if name := l.HostName(); machine.IsHostname(name) && !n.fixed {
		n.hostname = name
	}
	n.mu.Unlock()
	n.resolve(card.Name+" IPv4", newResolver(card.Name, l.DNS(), searchOf(l)))
	n.reachable(l.YourIPAddr)
	return nil
}

// drop gives up the address of a lease.
func (n *network) drop(c netlink.Link, l *dhcpv4.DHCPv4) {
	n.mu.Lock()
	if n.address.Equal(l.YourIPAddr) {
		n.address = nil
	}
	n.mu.Unlock()
	if err := netlink.AddrDel(c, &netlink.Addr{IPNet: addressOf(l)}); err != nil {
		n.say("%s: address %v: %v", c.Attrs().Name, addressOf(l), err)
	}
}

// reachable records an address of the machine. The first one stays as long as the machine has it,
// so that renewals on two cards do not take turns. But IPv4 has precedence over IPv6.
func (n *network) reachable(address net.IP) {
	n.mu.Lock()
	if n.address == nil || address.To4() != nil && n.address.To4() == nil {
		n.address = address
	}
	n.mu.Unlock()
	n.write()
	n.isOnline()
}

// resolve records the resolver from a source.
func (n *network) resolve(from string, r resolver) {
	n.mu.Lock()
	n.names[from] = r
	n.mu.Unlock()
	n.write()
}

// write updates the host name and the networkFiles. It does not touch any that a program has
// changed.
func (n *network) write() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if was := n.written[""]; n.hostname != was {
		name, err := os.Hostname()
		if err != nil || was == "" || name == was { // otherwise, a program has renamed the machine
			if err := n.setHostname(n.hostname); err != nil {
				n.say("host name %q: %v", n.hostname, err)
			}
		}
		n.written[""] = n.hostname
	}
	for name, text := range n.files() {
		if err := n.writeFile(name, text); err != nil {
			n.say("%v", err)
		}
	}
}

func (n *network) writeFile(name, text string) error {
	path := filepath.Join(n.dir, name)
	if before, written := n.written[name]; written {
		is, err := os.ReadFile(path)
		if err != nil || before == text || string(is) != before {
			return err
		}
	}
	// Write to the existing file, because it is mounted over that of the image.
	err := os.WriteFile(path, []byte(text), 0o644)
	if err == nil {
		n.written[name] = text
	}
	return err
}

// maxSearch and maxServers are the limits of resolvers (resolv.conf(5)).
const (
	maxServers = 3
	maxSearch  = 6
)

// files are the contents of resolv.conf, hosts and hostname.
func (n *network) files() map[string]string {
	var servers, search []string
	for _, from := range slices.Sorted(maps.Keys(n.names)) {
		servers = appendNew(servers, n.names[from].servers)
		search = appendNew(search, n.names[from].search)
	}
	var conf strings.Builder
	if len(search) > 0 {
		fmt.Fprintln(&conf, "search", strings.Join(search[:min(len(search), maxSearch)], " "))
	}
	for _, s := range servers[:min(len(servers), maxServers)] {
		fmt.Fprintln(&conf, "nameserver", s)
	}
	hosts := "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	if n.hostname != unnamed {
		address := "127.0.1.1"
		if n.address != nil {
			address = n.address.String()
		}
		short, _, dotted := strings.Cut(n.hostname, ".")
		hosts += address + "\t" + n.hostname
		if dotted && short != "" {
			hosts += " " + short
		}
		hosts += "\n"
	}
	return map[string]string{"resolv.conf": conf.String(), "hosts": hosts,
		"hostname": n.hostname + "\n"}
}

func appendNew(list, more []string) []string {
	for _, one := range more {
		if !slices.Contains(list, one) {
			list = append(list, one)
		}
	}
	return list
}
