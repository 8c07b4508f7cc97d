package vhosttest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// backChannel is where the back end sends messages of its own.
type backChannel struct {
	conn *Conn
	done chan struct{}

	mu  sync.Mutex
	err error // what the back end did wrong
}

// backConfigChange is VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, a number of its own kind.
const backConfigChange Request = 2

// openBackChannel gives the back end a channel, in place of an earlier one.
func (d *Driver) openBackChannel() error {
	d.closeBackChannel()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("a back channel: %w", err)
	}
	err = d.conn.Tell(SetBackendReqFD, nil, fds[1])
	_ = unix.Close(fds[1])
	if err != nil {
		_ = unix.Close(fds[0])
		return err
	}
	nc, err := connOf(fds[0])
	if err != nil {
		return fmt.Errorf("a back channel: %w", err)
	}
	d.back = &backChannel{conn: &Conn{nc: nc, timeout: d.o.Timeout}, done: make(chan struct{})}
	go d.back.serve(d.changes)
	return nil
}

// connOf makes a connection of a socket, and closes that.
func connOf(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "back channel")
	defer f.Close()
	nc, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return nc.(*net.UnixConn), nil
}

func (d *Driver) closeBackChannel() {
	if d.back != nil {
		_ = d.back.conn.Close()
		<-d.back.done
		d.back = nil
	}
}

// serve answers the back end until it or the driver closes the channel.
func (b *backChannel) serve(changes chan<- struct{}) {
	defer close(b.done)
	for {
		m, err := b.conn.receive(time.Time{})
		if err != nil {
			b.fail(err)
			return
		}
		closeAll(m.FDs)
		answer := uint64(0)
		if m.Request == backConfigChange {
			select {
			case changes <- struct{}{}:
			default: // somebody will ask for the configuration anyway
			}
		} else {
			answer = 1
			b.fail(fmt.Errorf("%w: message %d on the back channel", ErrViolation, m.Request))
		}
		if m.Flags&FlagNeedReply == 0 {
			continue
		}
		err = b.conn.Send(Message{Request: m.Request, Flags: FlagVersion | FlagReply,
			Payload: U64(answer)})
		if err != nil {
			b.fail(err)
			return
		}
	}
}

// fail keeps the first violation. That a channel ends is none.
func (b *backChannel) fail(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err == nil && errors.Is(err, ErrViolation) {
		b.err = err
	}
}

// ConfigChanges has a value after the back end said that the configuration has changed.
func (d *Driver) ConfigChanges() <-chan struct{} { return d.changes }

// BackChannelError is what the back end did wrong on the back channel.
func (d *Driver) BackChannelError() error {
	if d.back == nil {
		return nil
	}
	d.back.mu.Lock()
	defer d.back.mu.Unlock()
	return d.back.err
}
