package server

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync"
	"time"
)

// door is a listener that limits the connections of a server. A connection is a stranger until one
// of its requests was allowed. When the server is full, the oldest stranger is closed, unless it
// had no time to ask yet. So strangers keep nobody out, and a crowd of clients waits to be
// accepted. The server calls changed and admitted.
type door struct {
	net.Listener
	most  int
	grace time.Duration

	news   chan struct{} // has an element when Accept must look again
	closed chan struct{}
	once   sync.Once

	mu     sync.Mutex
	inside map[*guest]bool // guarded by mu
}

// guest is a connection.
type guest struct {
	net.Conn
	door *door

	// guarded by door.mu
	admitted bool      // one of its requests was allowed
	busy     bool      // a request is running
	since    time.Time // when it was accepted, or became idle
}

func newDoor(l net.Listener, most int, grace time.Duration) *door {
	return &door{Listener: l, most: most, grace: grace, news: make(chan struct{}, 1),
		closed: make(chan struct{}), inside: map[*guest]bool{}}
}

// Accept waits while no connection can be closed to make room.
func (d *door) Accept() (net.Conn, error) {
	conn, err := d.Listener.Accept()
	if err != nil {
		return nil, err
	}
	for {
		g, wait := d.enter(conn)
		if g != nil {
			return g, nil
		}
		select {
		case <-d.news:
		case <-time.After(wait):
		case <-d.closed:
			_ = conn.Close()
			return nil, net.ErrClosed
		}
	}
}

func (d *door) Close() error {
	d.once.Do(func() { close(d.closed) })
	return d.Listener.Close()
}

// enter lets a connection in if there is room, or room can be made. Otherwise it returns how long
// to wait.
func (d *door) enter(conn net.Conn) (g *guest, wait time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	if len(d.inside) >= d.most {
		stranger, idle := d.longestLocked()
		wait = time.Minute
		if stranger != nil {
			wait = d.grace - now.Sub(stranger.since)
		}
		if wait > 0 {
			stranger = idle
		}
		if stranger == nil {
			return nil, wait
		}
		delete(d.inside, stranger)
		_ = stranger.Conn.Close() // its goroutine notices and ends
	}
	g = &guest{Conn: conn, door: d, since: now}
	d.inside[g] = true
	return g, 0
}

// longestLocked returns the oldest stranger, and the client that has been idle longest.
func (d *door) longestLocked() (stranger, idle *guest) {
	for g := range d.inside {
		longest := &stranger
		if g.admitted {
			longest = &idle
		}
		if !(g.admitted && g.busy) && (*longest == nil || g.since.Before((*longest).since)) {
			*longest = g
		}
	}
	return stranger, idle
}

// change changes the state of a connection.
func (g *guest) change(change func()) {
	g.door.mu.Lock()
	change()
	g.door.mu.Unlock()
	select {
	case g.door.news <- struct{}{}:
	default:
	}
}

func (g *guest) Close() error {
	err := g.Conn.Close()
	g.change(func() { delete(g.door.inside, g) })
	return err
}

// guestOf returns the guest of a server's connection, or nil.
func guestOf(conn net.Conn) *guest {
	if t, ok := conn.(*tls.Conn); ok {
		conn = t.NetConn()
	}
	g, _ := conn.(*guest)
	return g
}

// changed is the ConnState callback of a server.
func changed(conn net.Conn, now http.ConnState) {
	g := guestOf(conn)
	if g == nil || now != http.StateActive && now != http.StateIdle {
		return
	}
	g.change(func() {
		g.busy = now == http.StateActive
		if g.admitted && !g.busy {
			g.since = time.Now()
		}
	})
}

type guestKey struct{}

// withGuest is the ConnContext callback of a server.
func withGuest(ctx context.Context, conn net.Conn) context.Context {
	return context.WithValue(ctx, guestKey{}, guestOf(conn))
}

// admitted notes that a request was allowed.
func admitted(r *http.Request) {
	if g, _ := r.Context().Value(guestKey{}).(*guest); g != nil {
		g.change(func() { g.admitted = true })
	}
}
