package console

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// Reporter shows the progress of a long operation: a bar on a terminal, lines elsewhere.
type Reporter struct {
	w        io.Writer
	terminal bool
	name     string
	interval time.Duration
	now      func() time.Time

	began     time.Time
	lastShown int
	moved     int64      // bytes, when they last increased
	movedAt   time.Time  // time of the last increase
	lines     sync.Mutex // one line at a time
}

// NewReporter makes a Reporter for the work with that name.
func NewReporter(w io.Writer, terminal bool, name string) *Reporter {
	r := &Reporter{w: w, terminal: terminal, name: name, interval: time.Second, now: time.Now,
		lastShown: -1}
	if terminal {
		r.interval = 100 * time.Millisecond
	}
	return r
}

// Progress is an image.Progress, or a fake in a test.
type Progress interface {
	Done() int64
	Total() int64              // bytes of the disk, like Done, for the percentage
	Data() (done, total int64) // bytes of the image's data, for the remaining time
}

// While runs f and shows p until f returns. Then it shows the total.
func (r *Reporter) While(p Progress, f func() error) error {
	err := r.Watch(p, f)
	r.finish(p, err)
	return err
}

// Watch runs f and shows p until f returns. Clear removes the bar.
func (r *Reporter) Watch(p Progress, f func() error) error {
	r.began = r.now()
	result := make(chan error, 1)
	go func() { result <- f() }()
	tick := time.NewTicker(r.interval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			r.show(p)
		case err := <-result:
			return err
		}
	}
}

// lineStep is the distance between two progress lines without a terminal, in percent.
const lineStep = 10

// Line shows a line of text in addition to the progress. It may be called while f runs.
func (r *Reporter) Line(text string) {
	r.lines.Lock()
	defer r.lines.Unlock()
	if r.terminal {
		text = "\r" + text + "\x1b[K"
	}
	fmt.Fprintln(r.w, text)
}

func (r *Reporter) show(p Progress) {
	r.lines.Lock()
	defer r.lines.Unlock()
	done, total := p.Done(), p.Total()
	if total <= 0 {
		return
	}
	now := percent(done, total)
	if r.terminal {
		fmt.Fprintf(r.w, "\r%s %s %3d %% %s\x1b[K", r.name, bar(now), now, r.pace(p))
		return
	}
	if now/lineStep > r.lastShown/lineStep || r.lastShown < 0 {
		r.lastShown = now
		fmt.Fprintf(r.w, "%s: %d %% %s\n", r.name, now, r.pace(p))
	}
}

// Clear removes the bar.
func (r *Reporter) Clear() {
	if r.terminal {
		fmt.Fprint(r.w, "\r\x1b[K")
	}
}

func (r *Reporter) finish(p Progress, err error) {
	r.Clear()
	if err == nil {
		took := r.now().Sub(r.began)
		_, data := p.Data()
		fmt.Fprintf(r.w, "%s: %s, of them %s data, in %s, %s\n", r.name, ShortSize(p.Total()),
			ShortSize(data), took.Round(time.Millisecond), rate(data, took))
	}
}

// stalled is the time without a byte after which the remaining time is unknown.
const stalled = 5 * time.Second

// pace returns the speed so far, and the remaining time at that speed.
func (r *Reporter) pace(p Progress) string {
	done, total := p.Data()
	now := r.now()
	if done != r.moved {
		r.moved, r.movedAt = done, now
	}
	took, since := now.Sub(r.began), now.Sub(r.movedAt)
	switch {
	case done <= 0 || took <= 0:
		return "-"
	case since >= stalled:
		return fmt.Sprintf("nothing for %s", since.Round(time.Second))
	}
	left := time.Duration(float64(took) / float64(done) * float64(total-done))
	return fmt.Sprintf("%s, %s left", rate(done, took), left.Round(time.Second))
}

func rate(n int64, took time.Duration) string {
	return fmt.Sprintf("%.0f MiB/s", float64(n)/(1<<20)/max(took.Seconds(), 1e-3))
}

// percent returns the percentage that is done, rounded down, so 100 means all.
func percent(done, total int64) int {
	if total <= 0 {
		return 0
	}
	return int(float64(min(max(done, 0), total)) / float64(total) * 100)
}

const barWidth = 30

func bar(percent int) string {
	line := []byte("[                              ]")
	for i := range min(percent*barWidth/100, barWidth) {
		line[i+1] = '='
	}
	return string(line)
}
