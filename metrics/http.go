package metrics

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"
)

// Pages is where the pages get what they show. The functions are called by many requests at once and must
// not block; all are required.
type Pages struct {
	Status func() Status
	Ready  func() error // nil once every LUN can be used; otherwise what is missing
	Health func() error // nil while a restart would help nothing; otherwise what has failed
}

// maxScrapes bounds the pages of metrics that are made at the same time.
const maxScrapes = 4

// Handler serves /metrics, /healthz, /readyz and /status.
func (m *Metrics) Handler(p Pages, log *zap.Logger) http.Handler {
	m.SetReady(func() bool { return p.Ready() == nil })
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		// A metric that cannot be made is logged and counted; the others are still shown.
		ErrorHandling:       promhttp.ContinueOnError,
		ErrorLog:            zap.NewStdLog(log),
		Registry:            m.registry,
		MaxRequestsInFlight: maxScrapes,
		Timeout:             10 * time.Second,
		EnableOpenMetrics:   true,
	}))
	mux.HandleFunc("GET /healthz", probe(p.Health))
	mux.HandleFunc("GET /readyz", probe(p.Ready))
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		// What fails here is the connection to somebody who no longer listens.
		_ = e.Encode(p.Status())
	})
	return mux
}

// probe answers 200, or 503 and the reason.
func probe(check func() error) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		if err := check(); err != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprintln(w, err)
			return
		}
		fmt.Fprintln(w, "ok")
	}
}

// NewServer returns an HTTP server for h on which slow or silent clients hold nothing for long, and many of them not much: beyond
// maxConnections the one that has been silent longest is closed, so that they take neither the memory nor the descriptors of the disks,
// and a probe is answered all the same.
func NewServer(h http.Handler, log *zap.Logger) *http.Server {
	return &http.Server{
		Handler:           h,
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
