// Package metrics counts what happens at disks in use, and shows it as Prometheus series.
//
// A daemon makes one Metrics, with a Daemon for what is not an event, gives it to its disks in use
// as the Observer, and serves Handler as /metrics. What is known of LUNs and volumes is what the
// page /status says.
//
// Counting is on the request path: one SCSI command costs two map look-ups without a lock and four
// atomic additions. Peers choose some label values, so their number is bounded. Everything beyond
// the bound is counted together as "other". docs/metrics.md lists the series.
package metrics
