package pages

import (
	"cmp"
	"time"
)

// Work is the work of a LUN since the start, for the charts.
type Work struct {
	LUN         uint16
	Image       string // another image means another disk
	Read, Write Commands
	CopiedBytes int64 // of the image
}

// Commands sums up commands that ended.
type Commands struct {
	Count, Bytes uint64
	Time         time.Duration // of all commands together
}

const (
	// chartPoints is how many rates of a LUN are kept: two minutes at one a second.
	chartPoints = 120
	// smoothing is the weight of the last second in the speed of copying.
	smoothing = .1
	// latencyFor is how many seconds the last latency stays on the page if no command follows.
	latencyFor = 5
)

// rates are the histories of all LUNs. An unused LUN takes some 200 bytes, and 2 KiB more for two
// minutes after each command: at most 36 MiB for 16,384 LUNs.
type rates struct {
	luns map[uint16]*history
	seen map[uint16]bool // also LUNs that are gone
	next int             // index of the next points
	at   time.Time       // of the last points; zero: there were none
}

// history is the work of a LUN in the last minutes.
type history struct {
	total  Work // until now
	now    speed
	copied float64             // bytes a second
	points *[chartPoints]point // nil: all are zero
	quiet  int                 // points since the last that was not zero
}

// speed is the work of a LUN in the last second.
type speed struct {
	readOps, writeOps, readBytes, writeBytes float64 // a second
	readTime, writeTime                      time.Duration
	readAge, writeAge                        int // seconds since the time was measured
}

// point is a speed in a chart.
type point struct{ readOps, writeOps, readBytes, writeBytes float32 }

// add takes the counters of all LUNs.
func (r *rates) add(now time.Time, all []Work) {
	elapsed := now.Sub(r.at).Seconds()
	first := r.at.IsZero() || elapsed <= 0
	r.at = now
	before := r.luns
	r.luns = make(map[uint16]*history, len(all))
	if first {
		r.seen = map[uint16]bool{}
	}
	for _, w := range all {
		h := before[w.LUN]
		if h == nil || h.total.Image != w.Image {
			h = &history{total: Work{Image: w.Image}}
			// Work before the first call, or on an earlier disk with this number, was not done in
			// the last second.
			if first || r.seen[w.LUN] {
				h.total = w
			}
			r.seen[w.LUN] = true
		}
		r.luns[w.LUN] = h
		if !first {
			h.add(w, elapsed, r.next)
		}
	}
	if !first {
		r.next = (r.next + 1) % chartPoints
	}
}

func (h *history) add(w Work, elapsed float64, at int) {
	last, was := h.total, h.now
	h.total = w
	// Counters may have been reset.
	since := func(now, before uint64) float64 { return float64(max(now, before) - before) }
	h.now = speed{
		readOps:    since(w.Read.Count, last.Read.Count) / elapsed,
		writeOps:   since(w.Write.Count, last.Write.Count) / elapsed,
		readBytes:  since(w.Read.Bytes, last.Read.Bytes) / elapsed,
		writeBytes: since(w.Write.Bytes, last.Write.Bytes) / elapsed,
	}
	h.now.readTime, h.now.readAge = mean(last.Read, w.Read, was.readTime, was.readAge)
	h.now.writeTime, h.now.writeAge = mean(last.Write, w.Write, was.writeTime, was.writeAge)
	copied := float64(max(0, w.CopiedBytes-last.CopiedBytes)) / elapsed
	h.copied = cmp.Or(h.copied, copied)
	h.copied += (copied - h.copied) * smoothing
	h.keep(point{float32(h.now.readOps), float32(h.now.writeOps), float32(h.now.readBytes),
		float32(h.now.writeBytes)}, at)
}

// mean returns the mean duration of the commands since the last call, or for a while the one
// before.
func mean(last, now Commands, was time.Duration, age int) (time.Duration, int) {
	if now.Count > last.Count && now.Time >= last.Time {
		return (now.Time - last.Time) / time.Duration(now.Count-last.Count), 0
	}
	if age >= latencyFor {
		return 0, age
	}
	return was, age + 1
}

func (h *history) keep(p point, at int) {
	if p == (point{}) {
		if h.quiet++; h.quiet >= chartPoints {
			h.points = nil
		}
	} else {
		h.quiet = 0
		if h.points == nil {
			h.points = new([chartPoints]point)
		}
	}
	if h.points != nil {
		h.points[at] = p
	}
}

// chart draws the last minutes of one kind of rate, and returns the highest.
func (h *history) chart(next int, read, write func(point) float32) (up, down string, top float64) {
	if h.points == nil {
		return "", "", 0
	}
	reads, writes := make([]float64, chartPoints), make([]float64, chartPoints)
	for i := range chartPoints {
		p := h.points[(next+i)%chartPoints]
		reads[i], writes[i] = float64(read(p)), float64(write(p))
		top = max(top, reads[i], writes[i])
	}
	return drawArea(reads, top, false), drawArea(writes, top, true), top
}

// left returns how long copying the rest takes at the current speed; 0: unknown.
func (h *history) left(bytes int64) time.Duration {
	if h.copied < 1 {
		return 0
	}
	return time.Duration(min(float64(bytes)/h.copied, 1e9) * float64(time.Second))
}
