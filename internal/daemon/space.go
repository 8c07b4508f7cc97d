package daemon

import (
	"sync"
	"time"

	"kubevirt.io/disk/disk"
)

// spaceWait is how long a page waits for the storage of a disk.
const spaceWait = 200 * time.Millisecond

// spaceGauge tells how much space a disk uses and has. Storage may hang, such as a file server that
// is gone. That must not hold up the pages where people look for the reason. So the gauge asks
// once, and shows the last answer until the next one arrives. A nil gauge knows nothing.
type spaceGauge struct {
	disk disk.Accountant

	mu     sync.Mutex
	last   *disk.Usage // guarded by mu; nil: unknown
	asking bool        // guarded by mu
}

// newSpaceGauge returns nil for a disk that cannot tell.
func newSpaceGauge(d disk.Disk) *spaceGauge {
	if a, ok := d.(disk.Accountant); ok {
		return &spaceGauge{disk: a}
	}
	return nil
}

// now returns nil if nothing is known.
func (g *spaceGauge) now() *disk.Usage {
	if g == nil {
		return nil
	}
	if answered := g.ask(); answered != nil {
		select {
		case <-answered:
		case <-time.After(spaceWait):
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.last
}

// ask asks the storage, or returns nil if the last answer is still outstanding.
func (g *spaceGauge) ask() (answered chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.asking {
		return nil
	}
	g.asking, answered = true, make(chan struct{})
	go func() {
		defer close(answered)
		usage, err := g.disk.Usage()
		g.mu.Lock()
		defer g.mu.Unlock()
		g.asking, g.last = false, nil
		if err == nil {
			g.last = &usage
		}
	}()
	return answered
}
