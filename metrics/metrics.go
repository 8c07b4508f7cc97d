package metrics

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// namespace begins the name of every metric.
const namespace = "kubevirt_disk"

// Metrics is the Observer of disks in use and counts events. All methods are safe for concurrent
// use.
type Metrics struct {
	registry *prometheus.Registry

	initiators initiatorTable
	accepted   labelTable // by session type
	refused    labelTable // by reason
	ended      labelTable // by reason
	rejected   labelTable // by reason
	panics     atomic.Uint64

	daemon Daemon
}

// Daemon says what is not counted here. Any number of goroutines may call its functions.
type Daemon struct {
	// Status is asked once for each scrape. It must not wait long for storage.
	Status func() status.Status
	// Known says whether there is a LUN. Requests for others are counted together, because a peer
	// may choose any number.
	Known func(lun uint16) bool
	// Fetched and Uploads have no series as long as they return nil.
	Fetched func() *Fetched
	Uploads func() *Uploads
}

var _ serving.Observer = (*Metrics)(nil)

// New returns Metrics with a registry of its own. The functions of the source are called for
// requests and scrapes, and not before.
func New(build status.Build, daemon Daemon) *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry(), daemon: daemon}
	m.initiators.init(daemon.Known)
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Namespace: namespace, Name: "build_info",
		Help: "Which binary is running; the value is always 1.",
		ConstLabels: prometheus.Labels{
			"version": label(build.Version), "commit": label(build.Commit),
			"goversion": label(build.GoVersion), "platform": label(build.Platform),
		},
	})
	info.Set(1)
	m.registry.MustRegister(
		info,
		&collector{m: m},
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return m
}

// Fetched are the numbers of fetched data from registries since the start.
type Fetched struct {
	Bytes, Chunks int64
	Wrong         int64 // chunks that came with wrong content
	Damaged       int64 // chunks of the cache that had other content than was stored
	Unsaved       int64 // chunks that could not be stored in the cache
}

// Uploads counts the uploads into volumes since the start.
type Uploads struct {
	Active                   int
	Bytes, Completed, Failed uint64
}

// LoginAccepted counts a session that reached full feature phase.
func (m *Metrics) LoginAccepted(e serving.LoginEvent) {
	m.accepted.add(sessionType(e.Discovery))
	m.initiators.get(e.Client).gauge(e.Discovery).Add(1)
}

// LoginRefused counts a refused login by its reason. The initiator name is not a label, because it
// is not authenticated.
func (m *Metrics) LoginRefused(e serving.LoginEvent) { m.refused.add(e.Reason) }

// SessionEnded counts the end of a session. LoginAccepted has counted its beginning.
func (m *Metrics) SessionEnded(e serving.SessionEvent) {
	m.ended.add(e.Reason)
	m.initiators.get(e.Client).gauge(e.Discovery).Add(-1)
}

// RequestDone counts a finished SCSI command. It allocates only at the first command of an
// initiator to a LUN.
func (m *Metrics) RequestDone(e serving.RequestEvent) {
	m.initiators.get(e.Client).series(e.Number, &m.initiators).count(e)
}

// MessageRejected counts a Reject PDU by its reason.
func (m *Metrics) MessageRejected(reason string) { m.rejected.add(reason) }

// PanicCaught counts a bug that ended one session.
func (m *Metrics) PanicCaught() { m.panics.Add(1) }

func sessionType(discovery bool) string {
	if discovery {
		return "discovery"
	}
	return "normal"
}
