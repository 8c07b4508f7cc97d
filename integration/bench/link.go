package main

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// linkDelay is the time of a byte to the registry or back. linkRate is the number of bytes per
	// second, each way, for all connections together: 200 Mbit/s.
	linkDelay = 20 * time.Millisecond
	linkRate  = 25e6
	// linkPiece is how many bytes pass at once.
	linkPiece = 16 << 10
	// linkQueue is how much may wait to pass, as in a router, in seconds.
	linkQueue = 5 * time.Millisecond
)

// link is a proxy that makes a local server look far away. A new connection costs a round trip, as
// the TCP handshake does. It does not imitate slow start.
type link struct {
	address  string
	listener net.Listener
	fetched  atomic.Int64 // bytes that came from the server

	up, down lane
}

// lane is one direction, shared by all connections.
type lane struct {
	mu   sync.Mutex
	free time.Time // when the next piece may pass; guarded by mu
}

// newLink listens on a free port, for connections to a server.
func newLink(server string) (*link, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	k := &link{address: l.Addr().String(), listener: l}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go k.serve(c, server)
		}
	}()
	return k, nil
}

func (k *link) close() error { return k.listener.Close() }

func (k *link) serve(c net.Conn, server string) {
	s, err := net.Dial("tcp", server)
	if err != nil {
		c.Close()
		return
	}
	var both sync.WaitGroup
	both.Go(func() { carry(s, c, &k.up, time.Now().Add(2*linkDelay), nil) })
	both.Go(func() { carry(c, s, &k.down, time.Time{}, &k.fetched) })
	both.Wait()
	c.Close()
	s.Close()
}

// arrival is a piece and when it arrives.
type arrival struct {
	content []byte
	at      time.Time
}

// carry passes the data of one side to the other, but not before begin.
func carry(to, from net.Conn, way *lane, begin time.Time, count *atomic.Int64) {
	pieces := make(chan arrival, int(linkRate*linkDelay.Seconds())/linkPiece*2)
	var out sync.WaitGroup
	out.Go(func() {
		for p := range pieces {
			time.Sleep(time.Until(p.at))
			if _, err := to.Write(p.content); err != nil {
				from.Close() // so that the reader ends
			}
		}
		if c, ok := to.(*net.TCPConn); ok {
			_ = c.CloseWrite() // the other side may have closed it
		}
	})
	for {
		p := make([]byte, linkPiece)
		n, err := from.Read(p)
		if n > 0 {
			if count != nil {
				count.Add(int64(n))
			}
			at := way.pass(n)
			if at.Before(begin) {
				at = begin
			}
			pieces <- arrival{p[:n], at.Add(linkDelay)}
		}
		if err != nil {
			if err != io.EOF {
				to.Close()
			}
			break
		}
	}
	close(pieces)
	out.Wait()
}

// pass waits until the lane is free for a piece, and returns when the piece has passed.
func (w *lane) pass(n int) time.Time {
	for {
		w.mu.Lock()
		now := time.Now()
		if wait := w.free.Add(-linkQueue).Sub(now); wait > 0 {
			w.mu.Unlock()
			time.Sleep(wait)
			continue
		}
		if w.free.Before(now) {
			w.free = now
		}
		w.free = w.free.Add(time.Duration(float64(n) / linkRate * float64(time.Second)))
		at := w.free
		w.mu.Unlock()
		return at
	}
}
