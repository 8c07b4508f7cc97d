package pages

import (
	"net"
	"net/http"
	"sync"
	"time"

	"go.uber.org/zap"
)

// NewServer returns an HTTP server for h, of which each answer tells by the header PlaceHeader
// where the daemon is. Slow or silent clients hold nothing for long, and many of them not much:
// beyond maxConnections the one that has been silent longest is closed, so that they take neither
// the memory nor the descriptors of the disks, and a probe is answered all the same.
func NewServer(h http.Handler, log *zap.Logger) *http.Server {
	return &http.Server{
		Handler:           withPlace(h),
		ConnState:         (&crowd{seen: map[net.Conn]uint64{}}).changed,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          zap.NewStdLog(log),
	}
}

// maxConnections is far beyond what probes, scrapes and people need. Each takes some 20 KiB.
const maxConnections = 64

// crowd bounds the connections of a server.
type crowd struct {
	mu    sync.Mutex
	clock uint64              // guarded by mu; counts what has happened
	seen  map[net.Conn]uint64 // guarded by mu; when something last happened on each open connection
}

// changed is a server's ConnState.
func (c *crowd) changed(conn net.Conn, now http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now == http.StateClosed {
		delete(c.seen, conn)
		return
	}
	c.clock++
	c.seen[conn] = c.clock
	if len(c.seen) <= maxConnections {
		return
	}
	longest := conn
	for other, at := range c.seen {
		if at < c.seen[longest] {
			longest = other
		}
	}
	delete(c.seen, longest)
	_ = longest.Close() // its goroutine notices, and ends
}
