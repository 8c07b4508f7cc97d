package metrics

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"kubevirt.io/disk/disk"
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

	mu      sync.Mutex
	sources sources // guarded by mu
}

// sources say what cannot be counted here. A function that is nil has no series.
type sources struct {
	disks   []Disk
	types   []UsageType
	ready   func() bool
	fetched func() Fetched
	volumes func() Volumes
	uploads func() Uploads
	refresh func()
}

var _ serving.Observer = (*Metrics)(nil)

// New returns Metrics with a registry of its own.
func New(build status.Build) *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry()}
	m.sources.ready = func() bool { return false }
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

// Progress says how much of an image was copied. An image.Progress is one.
type Progress interface {
	Data() (copied, total int64) // bytes of data in the image
	Total() int64                // capacity of the disk in bytes; 0 before it is made
	Finished() bool              // the disk no longer needs the image
	Waiting() bool               // for space
}

// Disk describes a LUN, whether or not anybody uses it.
type Disk struct {
	LUN      uint16
	Image    string
	SignedBy string       // the key that has signed the image; "": nobody asked for one
	Size     int64        // bytes
	Progress Progress     // nil: no image is copied
	Failed   func() error // why the disk has failed for good, or nil; the function may be nil
	// Space returns how much the disk uses on its storage and how much is free there, or nil while
	// that is unknown. It must not block: see SetRefresh. The function may be nil.
	Space func() *disk.Usage
}

// SetDisks sets the LUNs. Commands to other LUN numbers are counted together, because a peer may
// choose any number.
func (m *Metrics) SetDisks(disks []Disk) {
	numbers := make(map[uint16]struct{}, len(disks))
	for _, d := range disks {
		numbers[d.LUN] = struct{}{}
	}
	m.initiators.luns.Store(&numbers)
	m.initiators.keep(numbers)
	m.set(func(s *sources) { s.disks = slices.Clone(disks) })
}

// UsageType is a storage that disks can choose.
type UsageType struct {
	Name string
	// Space returns the space that all its disks use and the free space, or nil while that is
	// unknown. It must not block: see SetRefresh.
	Space func() *disk.Usage
}

// AddUsageType adds a storage that disks can choose. Its name is unique.
func (m *Metrics) AddUsageType(u UsageType) {
	m.set(func(s *sources) { s.types = append(slices.Clone(s.types), u) })
}

// SetRefresh sets a function that is called at the beginning of each scrape. It updates the values
// for the functions of disks and usage types, and must not block for long.
func (m *Metrics) SetRefresh(refresh func()) {
	m.set(func(s *sources) { s.refresh = refresh })
}

// SetReady sets the function that tells whether every LUN can be used.
func (m *Metrics) SetReady(ready func() bool) {
	m.set(func(s *sources) { s.ready = ready })
}

// Fetched are the numbers of fetched data from registries since the start. A target without images
// from registries has no such series.
type Fetched struct {
	Bytes, Chunks int64
	Wrong         int64 // chunks that came with wrong content
	Damaged       int64 // chunks of the cache that had other content than was stored
	Unsaved       int64 // chunks that could not be stored in the cache
}

// SetFetched sets the function that returns the numbers of fetched data.
func (m *Metrics) SetFetched(fetched func() Fetched) {
	m.set(func(s *sources) { s.fetched = fetched })
}

// Volumes sums up the volumes that were made on demand. A daemon that makes none has no such
// series.
type Volumes struct {
	States map[string]int // how many there are in each state
	Bytes  int64          // of all of them
}

// SetVolumes sets the function that counts the volumes.
func (m *Metrics) SetVolumes(volumes func() Volumes) {
	m.set(func(s *sources) { s.volumes = volumes })
}

// Uploads counts the uploads into volumes since the start. A daemon that accepts none has no such
// series.
type Uploads struct {
	Active                   int
	Bytes, Completed, Failed uint64
}

// SetUploads sets the function that counts the uploads.
func (m *Metrics) SetUploads(uploads func() Uploads) {
	m.set(func(s *sources) { s.uploads = uploads })
}

func (m *Metrics) set(change func(s *sources)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(&m.sources)
}

func (m *Metrics) current() sources {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.sources
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
