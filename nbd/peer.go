package nbd

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"kubevirt.io/disk/internal/socket"
)

// identify finds out who the client is, as far as the socket tells.
func (c *conn) identify() error {
	u, ok := c.nc.(*net.UnixConn)
	if !ok {
		return nil
	}
	cred := socket.Peer(u)
	if cred == nil {
		return errors.New("the system does not say who the client is")
	}
	if cred.Uid != 0 && int(cred.Uid) != os.Geteuid() && !slices.Contains(c.portal.UIDs, cred.Uid) {
		return errors.New("the client's user may not use this socket")
	}
	return nil
}

// peer is what the connections of one client have in common: nobody has many of them at will.
func (c *conn) peer() string {
	if c.certified {
		return c.name
	}
	return c.name + " " + c.arrival.Source
}

// remote is where the client is: an address, or the number of a process on this machine.
func (c *conn) remote() string {
	if c.pid != 0 {
		return fmt.Sprintf("process %d", c.pid)
	}
	return c.nc.RemoteAddr().String()
}

// network is the connection to the client's machine.
func (c *conn) network() net.Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s, ok := c.wire.(*socket.Socket); ok {
		return s
	}
	return c.nc
}

// wait delays a client that has failed several times. The server greets first, so all that can come
// meanwhile is the connection's end.
func (c *conn) wait() error {
	var delay time.Duration
	if delay, c.slowed = c.srv.conns.Delay(c.arrival.Source, time.Now()); delay == 0 {
		return nil
	}
	c.setDeadline(time.Now().Add(delay))
	switch _, err := c.nc.Read(make([]byte, 1)); {
	case err == nil:
		return errors.New("the client has sent something before the server's greeting")
	case !errors.Is(err, os.ErrDeadlineExceeded) || c.srv.conns.Closing():
		return err
	}
	return nil
}

// tlsCost is how many bytes a connection with TLS counts for in the limit of memory: buffers of
// crypto/tls for records in both directions.
const tlsCost = 32 << 10

// cost is what a connection counts for as long as it lasts.
func (c *conn) cost() int64 {
	if c.certified {
		return tlsCost
	}
	return 0
}
