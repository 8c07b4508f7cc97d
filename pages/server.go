package pages

import (
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"go.uber.org/zap"
)

// NewServer returns an HTTP server for h that adds ContainerHeader to each answer. It soon closes
// the connections of slow and silent clients. Beyond maxConnections, it closes the connection that
// has been silent longest. So clients cannot use up the memory or the descriptors of the disks, and
// a probe always gets its answer.
func NewServer(h http.Handler, log *zap.Logger) *http.Server {
	return &http.Server{
		Handler:           http.NewCrossOriginProtection().Handler(withContainer(h)),
		ConnState:         (&crowd{seen: map[net.Conn]uint64{}}).changed,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          zap.NewStdLog(log),
	}
}

// maxConnections is much more than probes, scrapes and people need. A connection takes some 20 KiB.
const maxConnections = 64

// crowd limits the connections of a server.
type crowd struct {
	mu    sync.Mutex
	clock uint64              // guarded by mu; counts events
	seen  map[net.Conn]uint64 // guarded by mu; the time of the last event on each open connection
}

// changed is the ConnState callback of a server.
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
	_ = longest.Close() // its goroutine notices and ends
}

// ContainerHeader is the header in which each page names the container of its daemon. The
// containers of a pod share a network, so a client may reach the daemon of another one.
const ContainerHeader = "Kubevirt-Disk-Place"

// Container identifies the container of this process by its mount namespace, or returns "" if it is
// unknown.
func Container() string {
	namespace, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return ""
	}
	return namespace
}

// withContainer adds ContainerHeader to the answers of a handler.
func withContainer(h http.Handler) http.Handler {
	container := Container()
	if container == "" {
		return h
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(ContainerHeader, container)
		h.ServeHTTP(w, r)
	})
}
