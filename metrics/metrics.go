package metrics

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"

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
	accepted   *prometheus.CounterVec // by session type
	refused    *prometheus.CounterVec // by reason, as the next ones
	ended      *prometheus.CounterVec
	rejected   *prometheus.CounterVec
	panics     prometheus.Counter

	daemon Daemon
}

// Daemon has the values that are not counted here. Any number of goroutines may call its functions.
type Daemon struct {
	// Status is called once for each scrape. It must not wait long for storage.
	Status func() status.Status
	// Known reports whether a LUN exists. Requests for others are counted together, because a peer
	// may choose any number.
	Known func(lun uint16) bool
	// Fetched and Uploads have no series as long as they return nil.
	Fetched func() *Fetched
	Uploads func() *Uploads
}

var _ serving.Observer = (*Metrics)(nil)

// New returns Metrics with its own registry. It does not call the functions of the source; requests
// and scrapes do.
func New(build status.Build, daemon Daemon) *Metrics {
	count := func(name, help, by string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name,
			Help: help}, []string{by})
	}
	m := &Metrics{registry: prometheus.NewRegistry(), daemon: daemon,
		accepted: count("logins_accepted_total", "Logins that led to a session.", "type"),
		refused:  count("logins_refused_total", "Logins that were refused.", "reason"),
		ended:    count("sessions_ended_total", "Sessions that have ended.", "reason"),
		rejected: count("pdus_rejected_total", "PDUs that were answered with a Reject.", "reason"),
		panics: prometheus.NewCounter(prometheus.CounterOpts{Namespace: namespace,
			Name: "panics_caught_total",
			Help: "Bugs that ended one session; each is in the log with its stack."})}
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
	m.registry.MustRegister(info, m.accepted, m.refused, m.ended, m.rejected, m.panics,
		&collector{m: m}, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Fetched are the numbers of fetched data from registries since the start.
type Fetched struct {
	Bytes, Chunks int64
	Wrong         int64 // chunks that arrived with wrong content
	Damaged       int64 // chunks of the cache with changed content
	Unsaved       int64 // chunks that could not be stored in the cache
}

// Uploads counts the uploads into volumes since the start.
type Uploads struct {
	Active                   int
	Bytes, Completed, Failed uint64
}

// LoginAccepted counts a session that reached full feature phase.
func (m *Metrics) LoginAccepted(e serving.LoginEvent) {
	m.accepted.WithLabelValues(sessionType(e.Discovery)).Inc()
	m.initiators.get(e.Client).gauge(e.Discovery).Add(1)
}

// LoginRefused counts a refused login by its reason. The initiator name is not a label, because it
// is not authenticated.
func (m *Metrics) LoginRefused(e serving.LoginEvent) {
	m.refused.WithLabelValues(e.Reason).Inc()
}

// SessionEnded counts the end of a session. LoginAccepted has counted its beginning.
func (m *Metrics) SessionEnded(e serving.SessionEvent) {
	m.ended.WithLabelValues(e.Reason).Inc()
	m.initiators.get(e.Client).gauge(e.Discovery).Add(-1)
}

// RequestDone counts a finished SCSI command. It allocates only at the first command of an
// initiator to a LUN.
func (m *Metrics) RequestDone(e serving.RequestEvent) {
	m.initiators.get(e.Client).series(e.Number, &m.initiators).count(e)
}

// MessageRejected counts a Reject PDU by its reason.
func (m *Metrics) MessageRejected(reason string) { m.rejected.WithLabelValues(reason).Inc() }

// PanicCaught counts a bug that ended one session.
func (m *Metrics) PanicCaught() { m.panics.Inc() }

func sessionType(discovery bool) string {
	if discovery {
		return "discovery"
	}
	return "normal"
}

// maxScrapes limits the scrapes that are answered at the same time.
const maxScrapes = 4

// Handler serves the page /metrics.
func (m *Metrics) Handler(log *zap.Logger) http.Handler { return m.handler(log, 10*time.Second) }

func (m *Metrics) handler(log *zap.Logger, limit time.Duration) http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		// If a metric cannot be made, log and count the error, and show the others.
		ErrorHandling:       promhttp.ContinueOnError,
		ErrorLog:            zap.NewStdLog(log),
		Registry:            m.registry,
		MaxRequestsInFlight: maxScrapes,
		Timeout:             limit,
		EnableOpenMetrics:   true,
	})
}

// Work is the work of initiators at a LUN since the start.
type Work struct{ Read, Write Done }

// Done are commands that ended, whatever their status.
type Done struct {
	Commands, Bytes uint64
	Time            time.Duration // of all commands together, from arrival to response
}

// Work returns the work at each LUN that got commands.
func (m *Metrics) Work() map[uint16]Work {
	all := map[uint16]Work{}
	add := func(i *initiator) {
		for lun, s := range i.units.all() {
			if lun == otherLUN {
				continue
			}
			w := all[uint16(lun)]
			w.Read.add(&s.ops[operationIndex(serving.OpRead)])
			w.Write.add(&s.ops[operationIndex(serving.OpWrite)])
			all[uint16(lun)] = w
		}
	}
	add(&m.initiators.rest)
	for _, i := range m.initiators.names.all() {
		if i != &m.initiators.rest {
			add(i)
		}
	}
	return all
}

func (d *Done) add(c *counters) {
	d.Bytes += c.bytes.Load()
	d.Time += time.Duration(c.nanos.Load())
	for b := range c.took {
		d.Commands += c.took[b].Load()
	}
}
