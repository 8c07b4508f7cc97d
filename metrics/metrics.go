package metrics

import (
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/target"
)

// namespace begins the name of every metric.
const namespace = "kubevirt_disk"

// BuildInfo says which binary is running.
type BuildInfo struct {
	Version, Commit, GoVersion, Platform string
}

// Metrics counts events of a target; it is the target's Observer. All methods may be called by any
// number of goroutines at once.
type Metrics struct {
	registry *prometheus.Registry

	initiators initiatorTable
	accepted   *labelTable // by session type
	refused    *labelTable // by reason
	ended      *labelTable // by reason
	rejected   *labelTable // by reason
	panics     atomic.Uint64

	mu    sync.Mutex
	disks []Disk              // guarded by mu
	state func() (ready bool) // guarded by mu
}

var _ target.Observer = (*Metrics)(nil)

// New makes the collectors and a registry of their own.
func New(build BuildInfo) *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		accepted: newLabelTable(),
		refused:  newLabelTable(),
		ended:    newLabelTable(),
		rejected: newLabelTable(),
		state:    func() bool { return false },
	}
	m.initiators.init()
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

// Progress is how much of an image was copied; image.Progress is one.
type Progress interface {
	Data() (copied, total int64) // bytes that the image stores
	Total() int64                // bytes of the disk; 0 before it is made
	Finished() bool              // the image is not needed any more
	Waiting() bool               // for space
}

// Disk is what there is to tell about a LUN whether or not anybody uses it.
type Disk struct {
	LUN      uint16
	Image    string
	Size     int64        // bytes
	Progress Progress     // nil: nothing is copied
	Failed   func() error // nil: it cannot tell; otherwise why the disk has failed for good, or nil
	// Space is what the disk takes of its storage, and what that has left. nil: it cannot tell; nor
	// can it at the moment where it returns nil. It does not wait for long.
	Space func() *disk.Usage
}

// SetDisks says which LUNs there are. Commands to other LUN numbers, which a peer may choose
// freely, are counted together.
func (m *Metrics) SetDisks(disks []Disk) {
	numbers := make(map[uint16]struct{}, len(disks))
	for _, d := range disks {
		numbers[d.LUN] = struct{}{}
	}
	m.initiators.luns.Store(&numbers)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.disks = append([]Disk(nil), disks...)
}

// SetReady says how the gauge learns whether every LUN can be used.
func (m *Metrics) SetReady(ready func() bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state = ready
}

func (m *Metrics) current() ([]Disk, func() bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.disks, m.state
}

// LoginAccepted counts a session that reached full feature phase.
func (m *Metrics) LoginAccepted(e target.LoginEvent) {
	m.accepted.add(sessionType(e.Discovery))
	m.initiators.get(e.Initiator).gauge(e.Discovery).Add(1)
}

// LoginRefused counts a refused login by its reason. The name that the peer claimed is not
// authenticated, so it is no label.
func (m *Metrics) LoginRefused(e target.LoginEvent) { m.refused.add(e.Reason) }

// SessionEnded counts the end of a session that LoginAccepted has counted.
func (m *Metrics) SessionEnded(e target.SessionEvent) {
	m.ended.add(e.Reason)
	m.initiators.get(e.Initiator).gauge(e.Discovery).Add(-1)
}

// CommandDone counts a finished SCSI command. It allocates nothing but for the first command of an
// initiator to a LUN.
func (m *Metrics) CommandDone(e target.CommandEvent) {
	m.initiators.get(e.Initiator).series(e.LUN, &m.initiators).count(e)
}

// PDURejected counts a Reject PDU by its reason.
func (m *Metrics) PDURejected(reason string) { m.rejected.add(reason) }

// PanicCaught counts a bug that ended one session.
func (m *Metrics) PanicCaught() { m.panics.Add(1) }

func sessionType(discovery bool) string {
	if discovery {
		return "discovery"
	}
	return "normal"
}
