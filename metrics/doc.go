// Package metrics counts events of disks in use, and shows them as Prometheus series.
//
// A daemon makes one Metrics, with a Daemon for values that are not events, gives it to its disks
// in use as the Observer, and serves Handler as /metrics. The values of LUNs and volumes are those
// of the page /status.
//
// Counting is on the request path: one SCSI command costs two map look-ups without a lock and four
// atomic additions. Peers choose some label values, so their number is bounded. Everything beyond
// the bound is counted together as "other". docs/metrics.md lists the series.
package metrics
