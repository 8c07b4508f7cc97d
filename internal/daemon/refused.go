package daemon

import (
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"kubevirt.io/disk/metrics"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

const (
	// maxRefused is how many refused logins are kept, and maxRefusedFrom how many from one address:
	// so nobody can displace the attempts of others.
	maxRefused     = 64
	maxRefusedFrom = 8
	// maxRefusedText is how many bytes of a peer's text are kept in one field.
	maxRefusedText = 300
	// refusedFor is how long a refused login is shown.
	refusedFor = 24 * time.Hour
)

// eventSink passes events on to the metrics, and keeps the refused logins for the page.
type eventSink struct {
	*metrics.Metrics
	refused  *refusedLogins
	accepted func(serving.LoginEvent)
}

func (o eventSink) LoginAccepted(e serving.LoginEvent) {
	o.Metrics.LoginAccepted(e)
	o.accepted(e)
}

func (o eventSink) LoginRefused(e serving.LoginEvent) {
	o.Metrics.LoginRefused(e)
	o.refused.add(e, time.Now())
}

// refusedLogins are the last refused logins. Equal ones are counted as one.
type refusedLogins struct {
	mu  sync.Mutex
	all []status.RefusedLogin // guarded by mu; the oldest first
}

func (l *refusedLogins) add(e serving.LoginEvent, now time.Time) {
	text := func(s string) string {
		return strings.ToValidUTF8(strings.Clone(s[:min(len(s), maxRefusedText)]), "")
	}
	from, _, err := net.SplitHostPort(e.Remote)
	if err != nil {
		from = e.Remote
	}
	next := status.RefusedLogin{From: text(from), Initiator: text(e.Client), User: text(e.User),
		Target: text(e.Target), Reason: text(e.Reason), Count: 1, Since: now, Last: now}
	if e.Err != nil {
		next.Error = text(e.Err.Error())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	alike, oldest, sameFrom := -1, -1, 0
	for i, o := range l.all {
		if o.From != next.From {
			continue
		}
		if sameFrom++; oldest < 0 {
			oldest = i
		}
		if o.Initiator == next.Initiator && o.User == next.User && o.Target == next.Target &&
			o.Reason == next.Reason {
			alike = i
		}
	}
	switch {
	case alike >= 0:
		next.Count, next.Since = l.all[alike].Count+1, l.all[alike].Since
		l.all = slices.Delete(l.all, alike, alike+1)
	case sameFrom >= maxRefusedFrom:
		l.all = slices.Delete(l.all, oldest, oldest+1)
	case len(l.all) >= maxRefused:
		l.all = slices.Delete(l.all, 0, 1)
	}
	l.all = append(l.all, next)
}

// latest returns the refused logins to show, the last one first.
func (l *refusedLogins) latest(now time.Time) (all []status.RefusedLogin) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, o := range slices.Backward(l.all) {
		if now.Sub(o.Last) < refusedFor {
			all = append(all, o)
		}
	}
	return all
}
