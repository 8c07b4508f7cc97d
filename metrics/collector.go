package metrics

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kubevirt.io/disk/status"
)

// descs are all descriptions below.
var descs []*prometheus.Desc

func desc(name, help string, labels ...string) *prometheus.Desc {
	d := prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
	descs = append(descs, d)
	return d
}

// The descriptions of the collector's metrics.
var (
	descOperations = desc("operations_total", "SCSI commands that ended, by operation and status.",
		"lun", "initiator", "operation", "status")
	descErrors = desc("operation_errors_total",
		"SCSI commands that did not succeed.", "lun", "initiator", "operation")
	descBytes = desc("transferred_bytes_total", "Bytes moved between initiator and disk.",
		"lun", "initiator", "operation")
	descDuration = desc("operation_duration_seconds", "Time from a command's arrival to its "+
		"response being queued.", "lun", "initiator", "operation")
	descSessions = desc("sessions", "Sessions that are logged in.", "initiator", "type")
	descSize     = desc("lun_size_bytes", "Capacity of a LUN.", "lun", "image")
	descFailed   = desc("lun_failed", "Whether a LUN's disk has failed until the next restart.",
		"lun", "image")
	descSigned = desc("lun_signed", "The key that has signed a LUN's image; 1.", "lun", "image",
		"key")
	descImage = desc("lun_image_info", "The digest of the image of a LUN; 1.", "lun", "image",
		"digest", "platform_digest")
	descCopied = desc("image_copied_bytes",
		"How much of the data in an image the disk's own file holds.", "lun", "image")
	descData     = desc("image_data_bytes", "How much data an image stores.", "lun", "image")
	descComplete = desc("disk_complete", "Whether the disk no longer needs its image.", "lun",
		"image")
	descWaits = desc("waits_for_space", "Whether a LUN's disk has no space: writes of guests "+
		"fail, or copying its image waits.", "lun", "image")
	descState   = desc("lun_state", "1: a LUN is in this state; it is in one.", "lun", "state")
	descTrouble = desc("lun_trouble", "Requests that wait or have failed because of a trouble "+
		"that a LUN has now, at least 1.", "lun", "kind")
	descUsed = desc("lun_used_bytes", "Bytes that a LUN's disk uses on its storage.",
		"lun", "image")
	descFree = desc("lun_free_bytes", "Bytes that are free on the storage of a LUN's disk, "+
		"for all who use it.", "lun", "image")
	descTypeUsed = desc("usage_type_used_bytes",
		"Bytes that the disks of a usage type use on its storage.", "usage_type")
	descTypeFree = desc("usage_type_free_bytes",
		"Bytes that are free on the storage of a usage type, for all who use it.", "usage_type")
	descFetched = desc("registry_fetched_bytes_total",
		"Bytes of images that were fetched from registries.")
	descChunks = desc("registry_fetched_chunks_total",
		"Chunks of images that were fetched from registries.")
	descWrong = desc("registry_wrong_chunks_total",
		"Chunks that came from registries with wrong content, and were not served.")
	descDamaged = desc("cache_damaged_chunks_total",
		"Chunks of the cache that had other content than was stored, and were fetched again.")
	descUnsaved = desc("cache_unsaved_chunks_total",
		"Chunks that could not be stored in the cache.")
	descVolumes      = desc("volumes", "Volumes that were made on demand.", "state")
	descVolumesBytes = desc("volumes_bytes", "Bytes of all volumes that were made on demand.")
	descUploads      = desc("uploads", "Uploads into volumes that are under way.")
	descUploadBytes  = desc("upload_bytes_total", "Bytes that uploads have received.")
	descUploaded     = desc("uploads_ended_total", "Uploads that have ended, by result.", "result")
	descReady        = desc("ready", "Whether the start is over; lun_state says how each LUN is.")
)

// collector turns the counters into metrics at each scrape.
type collector struct{ m *Metrics }

// Describe sends the descriptions of all metrics.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range descs {
		ch <- d
	}
}

// Collect sends the metrics as they are now.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	c.m.initiators.tidy()
	counter := func(d *prometheus.Desc, n uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for _, group := range c.m.initiators.byLabel() {
		gauge(descSessions, float64(group.normal), group.label, sessionType(false))
		gauge(descSessions, float64(group.discovery), group.label, sessionType(true))
		for lun, unit := range group.units {
			c.collectUnit(ch, lun, group.label, unit)
		}
	}
	if u := c.m.daemon.Uploads(); u != nil {
		gauge(descUploads, float64(u.Active))
		counter(descUploadBytes, u.Bytes)
		counter(descUploaded, u.Completed, "completed")
		counter(descUploaded, u.Failed, "failed")
	}
	if f := c.m.daemon.Fetched(); f != nil {
		counter(descFetched, uint64(f.Bytes))
		counter(descChunks, uint64(f.Chunks))
		counter(descWrong, uint64(f.Wrong))
		counter(descDamaged, uint64(f.Damaged))
		counter(descUnsaved, uint64(f.Unsaved))
	}
	now := c.m.daemon.Status()
	if now.Volumes != nil {
		for state, n := range now.Volumes.States {
			gauge(descVolumes, float64(n), state)
		}
		gauge(descVolumesBytes, float64(now.Volumes.Bytes))
	}
	for _, d := range now.LUNs {
		lun, image := strconv.Itoa(int(d.LUN)), label(d.Image)
		gauge(descSize, float64(d.SizeBytes), lun, image)
		gauge(descFailed, truth(d.Failure != ""), lun, image)
		if d.State != "" {
			gauge(descState, 1, lun, string(d.State))
		}
		troubles := map[string]int64{} // several may be of one kind
		for _, t := range d.Troubles {
			troubles[t.Kind] += max(t.Count, 1)
		}
		for kind, n := range troubles {
			gauge(descTrouble, float64(n), lun, kind)
		}
		gauge(descWaits, truth(d.State == status.DiskNoSpace), lun, image)
		if d.SignedBy != "" {
			gauge(descSigned, 1, lun, image, label(d.SignedBy))
		}
		if d.Digest != "" {
			gauge(descImage, 1, lun, image, label(d.Digest), label(d.PlatformDigest))
		}
		if d.Copy != nil {
			gauge(descCopied, float64(d.Copy.CopiedBytes), lun, image)
			gauge(descData, float64(d.Copy.DataBytes), lun, image)
			gauge(descComplete, truth(d.Copy.Complete), lun, image)
		}
		if d.Space != nil {
			gauge(descUsed, float64(d.Space.Used), lun, image)
			gauge(descFree, float64(d.Space.Free), lun, image)
		}
	}
	for _, u := range now.UsageTypes {
		if u.Space != nil {
			gauge(descTypeUsed, float64(u.Space.Used), label(u.Name))
			gauge(descTypeFree, float64(u.Space.Free), label(u.Name))
		}
	}
	gauge(descReady, truth(now.Ready))
}

// collectUnit sends the counters of one initiator at one LUN, unless it sent no command.
func (c *collector) collectUnit(ch chan<- prometheus.Metric, lun lunKey, initiator string,
	unit *totals) {
	number := other
	if lun != otherLUN {
		number = strconv.Itoa(int(lun))
	}
	for i := range unit {
		n := &unit[i]
		if n.count == 0 {
			continue
		}
		labels := []string{number, initiator, operations[i].String()}
		for s, count := range n.ended {
			if count > 0 {
				ch <- prometheus.MustNewConstMetric(descOperations, prometheus.CounterValue,
					float64(count), number, initiator, operations[i].String(), statuses[s].label)
			}
		}
		ch <- prometheus.MustNewConstMetric(descErrors, prometheus.CounterValue, float64(n.failed),
			labels...)
		ch <- prometheus.MustNewConstMetric(descBytes, prometheus.CounterValue, float64(n.bytes),
			labels...)
		cumulative, sum := make(map[float64]uint64, len(bounds)), uint64(0)
		for b, bound := range bounds {
			sum += n.buckets[b]
			cumulative[bound.Seconds()] = sum
		}
		ch <- prometheus.MustNewConstHistogram(descDuration, n.count,
			time.Duration(n.nanos).Seconds(), cumulative, labels...)
	}
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// group sums up the initiators that share a label.
type group struct {
	label             string
	normal, discovery int64
	units             map[lunKey]*totals
}

// totals are counters as read, by operation.
type totals [len(operations)]struct {
	count, nanos, bytes, failed uint64
	ended                       [len(statuses)]uint64
	buckets                     [len(bounds) + 1]uint64
}

// byLabel sums up the initiators that share a label, because Prometheus takes each set of labels
// only once.
func (t *initiatorTable) byLabel() map[string]*group {
	groups := map[string]*group{}
	add := func(i *initiator) {
		g := groups[i.label]
		if g == nil {
			g = &group{label: i.label, units: map[lunKey]*totals{}}
			groups[i.label] = g
		}
		g.normal += i.normal.Load()
		g.discovery += i.discovery.Load()
		for lun, s := range i.units.all() {
			if s.shared {
				lun = otherLUN
			}
			if g.units[lun] == nil {
				g.units[lun] = new(totals)
			}
			g.units[lun].add(s)
		}
	}
	// Show the overflow only if it counted something.
	if len(t.rest.units.all()) > 0 || t.rest.normal.Load() != 0 || t.rest.discovery.Load() != 0 {
		add(&t.rest)
	}
	for _, i := range t.names.all() {
		if i != &t.rest {
			add(i)
		}
	}
	return groups
}

func (sum *totals) add(s *series) {
	for i := range s.ops {
		from, to := &s.ops[i], &sum[i]
		to.nanos += from.nanos.Load()
		to.bytes += from.bytes.Load()
		for b := range from.took {
			n := from.took[b].Load()
			to.buckets[b] += n
			to.count += n
		}
		for status := range from.ended {
			n := from.ended[status].Load()
			to.ended[status] += n
			if !statuses[status].fine {
				to.failed += n
			}
		}
	}
}
