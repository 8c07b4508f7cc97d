// Package pages is what a daemon tells about itself over HTTP: the page /status for programs and
// people, and /healthz and /readyz for probes. Prometheus series are another package's: metrics.
//
// A daemon makes a mux, has Register put the pages there, adds pages of its own, and serves the mux
// by NewServer. Clients decode /status into a Status, and tell by Place whether the daemon that has
// answered is the one of their own container.
//
// No page waits for a disk or holds a secret, and no client costs the daemon much, however many
// come and whatever they do not send.
package pages
