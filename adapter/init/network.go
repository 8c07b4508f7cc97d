package guestinit

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/adapter/init/internal/dhcp"
	"kubevirt.io/disk/adapter/init/internal/rtnl"
)

// network sets up the network cards of the machine. The kernel itself handles addresses, routes and
// the MTU of IPv6 router advertisements; the rest is done here.
type network struct {
	say      func(format string, args ...any)
	dir      string // of resolv.conf, hosts and hostname
	sys      string // /sys/class/net
	online   chan struct{}
	isOnline func() // closes it once
	// setHostname sets the name of the machine.
	setHostname func(string) error

	mu       sync.Mutex // guards what follows
	fixed    bool       // the host has named the machine: DHCP does not
	hostname string
	address  netip.Addr
	names    map[string]resolver // by where they are from
	heard    map[string]routers  // by card
	written  map[string]string   // what was written to each file; the key "" has the host name
}

// resolver says where names are looked up.
type resolver struct {
	servers []string
	search  []string
}

// card is a network card.
type card struct {
	name     string
	index    int
	hardware [6]byte
}

// unnamed is the host name of a machine that nobody has named.
const unnamed = "localhost"

func newNetwork(dir, hostname string, say func(string, ...any)) *network {
	n := &network{say: say, dir: dir, sys: "/sys/class/net", fixed: hostname != "",
		hostname: hostname, online: make(chan struct{}), names: map[string]resolver{},
		heard: map[string]routers{}, written: map[string]string{}}
	n.setHostname = func(name string) error { return unix.Sethostname([]byte(name)) }
	n.isOnline = sync.OnceFunc(func() { close(n.online) })
	if hostname == "" {
		n.hostname = unnamed
	}
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

// rename sets the host name that the host wants; "" means none.
func (n *network) rename(hostname string) {
	if hostname == "" {
		return
	}
	n.mu.Lock()
	n.fixed, n.hostname = true, hostname
	n.mu.Unlock()
	if err := n.write(); err != nil {
		n.say("%v", err)
	}
}

func (n *network) begin() error {
	if err := n.write(); err != nil {
		return err
	}
	for file, value := range sysctls {
		_ = os.WriteFile(file, []byte(value), 0) // an older kernel does without
	}
	conn, err := rtnl.Dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	const loopback = 1
	if err := conn.Up(loopback, 0); err != nil {
		return fmt.Errorf("network interface lo: %w", err)
	}
	cards := n.cards()
	if len(cards) == 0 {
		n.isOnline()
		return nil
	}
	watch, err := rtnl.Dial(unix.RTNLGRP_ND_USEROPT, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return err
	}
	go n.watch(watch, cards)
	for _, c := range cards {
		if err := conn.Up(c.index, 0); err != nil {
			return fmt.Errorf("network interface %s: %w", c.name, err)
		}
		go n.lease(c)
	}
	return nil
}

// cards lists the Ethernet interfaces.
func (n *network) cards() (list []card) {
	entries, _ := os.ReadDir(n.sys) // none
	for _, e := range entries {
		value := func(file string) string {
			text, _ := os.ReadFile(filepath.Join(n.sys, e.Name(), file)) // "" is not understood
			return strings.TrimSpace(string(text))
		}
		index, err := strconv.Atoi(value("ifindex"))
		hardware, ok := parseHardware(value("address"))
		if err == nil && ok && value("type") == strconv.Itoa(unix.ARPHRD_ETHER) {
			list = append(list, card{name: e.Name(), index: index, hardware: hardware})
		}
	}
	return list
}

func parseHardware(text string) (address [6]byte, ok bool) {
	parts := strings.Split(text, ":")
	if len(parts) != len(address) {
		return address, false
	}
	for i, p := range parts {
		b, err := strconv.ParseUint(p, 16, 8)
		if err != nil {
			return address, false
		}
		address[i] = byte(b)
	}
	return address, true
}

// watch follows what the kernel learns from IPv6 routers. It returns only if that fails.
func (n *network) watch(conn *rtnl.Conn, cards []card) {
	defer conn.Close()
	for {
		events, err := conn.Receive()
		if err != nil {
			n.say("IPv6 routers are not heard any more: %v", err)
			return
		}
		for _, e := range events {
			i := slices.IndexFunc(cards, func(c card) bool { return c.index == e.Index })
			if i < 0 {
				continue
			}
			if e.Address.IsValid() {
				n.reachable(e.Address)
				continue
			}
			n.hear(cards[i].name, e, time.Now())
		}
	}
}

func newResolver(card string, servers []netip.Addr, search []string) resolver {
	r := resolver{search: search}
	for _, s := range servers {
		if s.IsLinkLocalUnicast() {
			s = s.WithZone(card)
		}
		r.servers = append(r.servers, s.String())
	}
	return r
}

// configure applies a lease. formerly is the lease before it, or the zero value.
func (n *network) configure(c card, l, formerly dhcp.Lease) error {
	conn, err := rtnl.Dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	const least = 68 // RFC 791
	if l.MTU >= least && l.MTU != formerly.MTU {
		if err := conn.Up(c.index, l.MTU); err != nil {
			n.say("%s: the MTU %d of the DHCP server is refused: %v", c.name, l.MTU, err)
		}
	}
	if formerly.Address.IsValid() && formerly.Address != l.Address {
		n.drop(c, formerly)
	}
	if err := conn.AddAddress(c.index, l.Address); err != nil {
		return fmt.Errorf("address %v: %w", l.Address, err)
	}
	const metric = 100 // of the first card; then by their numbers
	for _, r := range l.Routes {
		err = errors.Join(err, conn.AddRoute(rtnl.Route{Index: c.index, To: r.To, Via: r.Via,
			Source: l.Address.Addr(), Metric: uint32(metric + c.index)}))
	}
	if err != nil {
		return fmt.Errorf("routes: %w", err)
	}
	n.mu.Lock()
	if l.Hostname != "" && !n.fixed {
		n.hostname = l.Hostname
	}
	n.mu.Unlock()
	n.resolve(c.name+" IPv4", newResolver(c.name, l.DNS, l.Search))
	n.reachable(l.Address.Addr())
	return nil
}

// drop gives up the address of a lease.
func (n *network) drop(c card, l dhcp.Lease) {
	n.mu.Lock()
	if n.address == l.Address.Addr() {
		n.address = netip.Addr{}
	}
	n.mu.Unlock()
	conn, err := rtnl.Dial()
	if err == nil {
		err = errors.Join(conn.RemoveAddress(c.index, l.Address), conn.Close())
	}
	if err != nil {
		n.say("%s: address %v: %v", c.name, l.Address, err)
	}
}

// reachable records an address of the machine. The first one stays as long as the machine has it,
// or renewals on two cards would take turns; but IPv4 goes before IPv6.
func (n *network) reachable(address netip.Addr) {
	n.mu.Lock()
	if !n.address.IsValid() || address.Is4() && !n.address.Is4() {
		n.address = address
	}
	n.mu.Unlock()
	if err := n.write(); err != nil {
		n.say("%v", err)
	}
	n.isOnline()
}

// resolve records where names are looked up.
func (n *network) resolve(from string, r resolver) {
	n.mu.Lock()
	n.names[from] = r
	n.mu.Unlock()
	if err := n.write(); err != nil {
		n.say("%v", err)
	}
}

// routers are the recommendations of IPv6 routers.
type routers struct{ servers, search []recommended }

type recommended struct {
	text  string
	until time.Time
}

// hear records what a router recommends. The kernel passes each option of an advertisement on by
// itself, so one adds to those before it, as RFC 8106 6.1 has it.
func (n *network) hear(card string, e rtnl.Event, now time.Time) {
	was := newResolver(card, e.DNS, e.Search)
	n.mu.Lock()
	r := n.heard[card]
	r.servers = refresh(r.servers, was.servers, now, e.Lifetime)
	r.search = refresh(r.search, was.search, now, e.Lifetime)
	n.heard[card] = r
	n.mu.Unlock()
	n.resolve(card+" IPv6", resolver{servers: texts(r.servers), search: texts(r.search)})
}

// maxRecommended is how many recommendations are kept: more are not used, and a router must not
// fill the memory.
const maxRecommended = 8

// refresh returns the list without what has expired, and with the texts as recommended now. What
// is there already keeps its place. A lifetime of 0 takes texts back.
func refresh(list []recommended, texts []string, now time.Time,
	lifetime time.Duration) (fresh []recommended) {
	for _, r := range list {
		if slices.Contains(texts, r.text) {
			r.until = now.Add(lifetime)
		}
		if r.until.After(now) {
			fresh = append(fresh, r)
		}
	}
	for _, text := range texts {
		known := slices.ContainsFunc(fresh, func(r recommended) bool { return r.text == text })
		if !known && lifetime > 0 && len(fresh) < maxRecommended {
			fresh = append(fresh, recommended{text, now.Add(lifetime)})
		}
	}
	return fresh
}

func texts(list []recommended) (texts []string) {
	for _, r := range list {
		texts = append(texts, r.text)
	}
	return texts
}

// write brings the host name and the files that programs read up to date. What the image's program
// has changed is its own from then on.
func (n *network) write() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if was := n.written[""]; n.hostname != was {
		name, err := os.Hostname()
		if err != nil || was == "" || name == was { // otherwise, a program has renamed the machine
			if err := n.setHostname(n.hostname); err != nil {
				return fmt.Errorf("host name %q: %w", n.hostname, err)
			}
		}
		n.written[""] = n.hostname
	}
	for name, text := range n.files() {
		path := filepath.Join(n.dir, name)
		if before, written := n.written[name]; written {
			is, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if before == text || string(is) != before {
				continue
			}
		}
		// The existing file is written to, because it is mounted over that of the image.
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return err
		}
		n.written[name] = text
	}
	return nil
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
		if n.address.IsValid() {
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
