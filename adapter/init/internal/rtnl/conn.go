package rtnl

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Conn is a connection to the kernel. One goroutine uses it at a time.
type Conn struct {
	fd       int
	sequence uint32
}

// Route is a network, and the router to it. A router that is unspecified or the zero value means
// that the network is on the link.
type Route struct {
	Index  int // of the interface
	To     netip.Prefix
	Via    netip.Addr
	Source netip.Addr // that packets come from; the zero value: the kernel chooses
	Metric uint32     // less wins
}

// Dial connects for requests, or, with groups (unix.RTNLGRP_...), for Receive.
func Dial(groups ...int) (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("rtnetlink: %w", err)
	}
	var mask uint32
	for _, g := range groups {
		mask |= 1 << (g - 1)
	}
	own := &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: mask}
	if err := unix.Bind(fd, own); err != nil {
		return nil, errors.Join(fmt.Errorf("rtnetlink: %w", err), unix.Close(fd))
	}
	return &Conn{fd: fd}, nil
}

// Close ends the connection.
func (c *Conn) Close() error { return unix.Close(c.fd) }

// Up switches an interface on, and sets its MTU in bytes unless that is 0.
func (c *Conn) Up(index, mtu int) error { return c.ask(linkUp(index, mtu)) }

// AddAddress gives an interface an address, which it may have already.
func (c *Conn) AddAddress(index int, p netip.Prefix) error {
	return c.ask(address(unix.RTM_NEWADDR, index, p))
}

// RemoveAddress takes an address away, with the routes that use it.
func (c *Conn) RemoveAddress(index int, p netip.Prefix) error {
	return c.ask(address(unix.RTM_DELADDR, index, p))
}

// AddRoute adds a route, or replaces the one to the same network with the same metric.
func (c *Conn) AddRoute(r Route) error { return c.ask(route(r)) }

// ask sends a request and returns the kernel's answer.
func (c *Conn) ask(m message) error {
	c.sequence++
	to := &unix.SockaddrNetlink{Family: unix.AF_NETLINK}
	if err := unix.Sendto(c.fd, m.finish(c.sequence), 0, to); err != nil {
		return fmt.Errorf("rtnetlink: %w", err)
	}
	b := make([]byte, 8192)
	for {
		n, _, err := unix.Recvfrom(c.fd, b, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("rtnetlink: %w", err)
		}
		for _, part := range split(b[:n]) {
			if part.kind == unix.NLMSG_ERROR && part.sequence == c.sequence && len(part.body) >= 4 {
				if code := int32(order.Uint32(part.body)); code != 0 {
					return unix.Errno(-code)
				}
				return nil
			}
		}
	}
}

// Receive waits for messages of the kernel to the groups of Dial.
func (c *Conn) Receive() ([]Event, error) {
	b := make([]byte, 64<<10)
	n, _, err := unix.Recvfrom(c.fd, b, 0)
	switch {
	case errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.EINTR):
		return nil, nil // something was lost; routers say everything again
	case err != nil:
		return nil, fmt.Errorf("rtnetlink: %w", err)
	}
	return events(b[:n]), nil
}
