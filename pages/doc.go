// Package pages tells over HTTP how a daemon is doing: /status for programs and people, /healthz
// and /readyz for probes. Package metrics makes the Prometheus series.
//
// A daemon makes a mux, lets Register add the pages, adds its own pages, and serves the mux with
// NewServer. Clients decode /status into a Status. By Place they tell whether the daemon that
// answered runs in their own container.
//
// No page waits for a disk or holds a secret. Slow, silent or many clients cost the daemon little.
package pages
