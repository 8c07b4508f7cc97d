package serving

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"kubevirt.io/disk/status"
)

// A request that has waited for LongWait is a trouble of its disk, for all protocols and reasons.
// Only requests that have left the fast path are noted: those held for far content, and those in a
// disk call that was passed on or has cost a reader its role.

// LongWait is how long a request may wait before people are told.
const LongWait = 5 * time.Second

// waitsOver is how long ago a request must last have waited for LongWait, so that the trouble is
// over. It is over at once when a request that waited succeeds. Else the guest may have paused.
const waitsOver = LongWait + calm

// Source says, for people, where far content comes from.
type Source struct {
	Kind string // status.TroubleRegistry or TroubleServer
	Name string // such as "the registry example.com"
	// Why returns the last error of the source, and its time; nil: unknown. It is quick.
	Why func() (text string, at time.Time)
}

// Forwarder is a disk that forwards requests without a goroutine that waits for each.
type Forwarder interface {
	// Unanswered calls each for every forwarded request without an answer. Both are quick.
	Unanswered(each func(c *Client, since time.Time))
	// Connected reports whether there is a connection to the server of the disk. It is quick.
	Connected() bool
}

// wait is a request while it waits. The zero value does not wait.
type wait struct {
	disk   *Disk   // the disk that the wait is noted with; nil: not noted
	client *Client // nil: background work
	since  time.Time
	far    bool // the wait is for far content
}

// waits are the waiting requests of a disk.
type waits struct {
	mu   sync.Mutex
	all  map[*wait]struct{} // guarded by mu
	came time.Time          // guarded by mu; when a request last got what it waited for
	long *status.Trouble    // guarded by mu; nil: no request waits for long
}

// begin notes that a request begins to wait.
func (w *wait) begin(d *Disk, c *Client, far bool) {
	d.waits.mu.Lock()
	defer d.waits.mu.Unlock()
	w.disk, w.client, w.since, w.far = d, c, time.Now(), far
	if d.waits.all == nil {
		d.waits.all = map[*wait]struct{}{}
	}
	d.waits.all[w] = struct{}{}
}

// end notes that a request does not wait any more. came says that it has got what it waited for.
func (w *wait) end(came bool) {
	d := w.disk
	if d == nil {
		return
	}
	d.waits.mu.Lock()
	defer d.waits.mu.Unlock()
	delete(d.waits.all, w)
	w.disk = nil
	if came {
		d.waits.came = time.Now()
	}
}

// waiting are requests that wait for the same.
type waiting struct {
	n       int
	oldest  time.Time
	clients map[*Client]int
	what    string // what they wait for
}

func (w *waiting) add(c *Client, since time.Time) {
	if w.n++; w.n == 1 || since.Before(w.oldest) {
		w.oldest = since
	}
	if w.clients == nil {
		w.clients = map[*Client]int{}
	}
	w.clients[c]++
}

// waitingNow returns the requests of a disk that wait for far content, and for local storage. A
// request for far content may count for both.
func (d *Disk) waitingNow() (far, near waiting) {
	far.what, near.what = d.source().Name, cmp.Or(d.Storage, "the storage of the disk")
	if f, ok := d.Disk.(Forwarder); ok {
		f.Unanswered(far.add)
	}
	d.waits.mu.Lock()
	defer d.waits.mu.Unlock()
	for w := range d.waits.all {
		if w.far {
			far.add(w.client, w.since)
		} else {
			near.add(w.client, w.since)
		}
	}
	return far, near
}

// maxPeers is how many peers a trouble names.
const maxPeers = 8

// longWait is the trouble that requests wait, or nil.
func (d *Disk) longWait(now time.Time) *status.Trouble {
	far, near := d.waitingNow()
	kind, why, w := status.TroubleStorage, "", &near
	if far.n > 0 && now.Sub(far.oldest) >= LongWait {
		w, kind = &far, d.source().Kind
		if d.Source.Why != nil {
			if text, at := d.Source.Why(); at.After(far.oldest) {
				why = text
			}
		}
	}
	d.waits.mu.Lock()
	defer d.waits.mu.Unlock()
	if w.n == 0 || now.Sub(w.oldest) < LongWait {
		if t := d.waits.long; t == nil || d.waits.came.After(t.Last) ||
			now.Sub(t.Last) >= waitsOver {
			d.waits.long = nil
			return nil
		}
		told := *d.waits.long
		return &told
	}
	t := d.waits.long
	if t == nil || t.Kind != kind {
		t = &status.Trouble{Kind: kind, Since: w.oldest}
		d.waits.long = t
	}
	t.Last, t.Count, t.Peers = now, int64(w.n), peersOf(w.clients)
	t.Message = requestsText(w.n) + " for " + w.what
	if t.Error = why; why == "" {
		t.Error = "no answer"
		if f, ok := d.Disk.(Forwarder); ok && f.Connected() {
			t.Error = "it is connected, and has not answered yet"
		}
	}
	told := *t
	return &told
}

func requestsText(n int) string {
	if n == 1 {
		return "1 request waits"
	}
	return fmt.Sprintf("%d requests wait", n)
}

// source is where far content comes from.
func (d *Disk) source() Source {
	switch {
	case d.Source.Kind != "":
		return d.Source
	case d.Remote != nil:
		return Source{Kind: status.TroubleServer, Name: "the server of the disk"}
	}
	return Source{Kind: status.TroubleRegistry, Name: "the registry of its image"}
}

// peersOf names clients, the first ones by name.
func peersOf(clients map[*Client]int) []string {
	names := map[string]struct{}{}
	for c := range clients {
		if c != nil {
			names[PlainName(c.peer.name)] = struct{}{}
		}
	}
	all := slices.Sorted(maps.Keys(names))
	return all[:min(len(all), maxPeers)]
}

// waitingFor returns, for each client, how many of its requests wait at the disks, and since when.
func (s *Disks) waitingFor() map[*Client]waiting {
	all := map[*Client]waiting{}
	for _, d := range s.All() {
		far, near := d.waitingNow()
		for _, of := range []waiting{far, near} {
			for c, n := range of.clients {
				one := all[c]
				if n > one.n {
					one.n, one.what = n, of.what
				}
				if one.oldest.IsZero() || of.oldest.Before(one.oldest) {
					one.oldest = of.oldest
				}
				all[c] = one
			}
		}
	}
	return all
}
