package pages

import (
	"cmp"
	"fmt"
	"time"

	"kubevirt.io/disk/status"
)

// alarm is a LUN or a volume in trouble. LUN 0: the volume has none.
type alarm struct {
	LUN                       uint16
	Name, State, Note, Advice string
}

// trouble adds the problems at the top of the page.
func (s *snapshot) trouble(v *view, luns []status.LUN) {
	v.Title = "kubevirt-disk: " + v.LUNs + " LUNs, " + v.State
	if c := s.status.Starting; c != nil {
		v.Starting = fmt.Sprintf("Starting for %s: %s.", durationText(s.now.Sub(c.Since)),
			plain(c.Reason))
		if c.Kind != "" {
			v.Starting += " What to do: " + c.WhatToDo + "."
			v.Title = "starting: waits for a " + c.Kind
		}
	}
	worst := status.DiskReady
	for i := range luns {
		l := &luns[i]
		if !l.State.Troubled() {
			continue
		}
		if l.State.Rank() < worst.Rank() {
			worst = l.State
		}
		v.Alarms = append(v.Alarms, alarm{LUN: l.LUN, Name: plain(l.Image),
			State: l.State.Words(), Note: troubleText(&l.Condition, s.now), Advice: l.WhatToDo})
	}
	if v.Headline = s.status.Summary(); v.Headline != "" {
		v.State = worst.Words()
	}
	if of := s.status.Volumes; of != nil && len(of.Failed) > 0 {
		for _, f := range of.Failed {
			v.Alarms = append(v.Alarms, alarm{Name: plain(f.Name), State: "failed",
				Note: plain(f.Failure)})
		}
		if v.Headline == "" {
			v.State = "failed"
			v.Headline = fmt.Sprintf("%s failed: %s", volumesText(len(of.Failed)),
				plain(of.Failed[0].Name))
		}
	}
	if v.Headline != "" {
		v.Title = v.Headline
	}
	if n := len(v.Alarms) - alarmsPerPage; n > 0 {
		v.Alarms, v.MoreAlarms = v.Alarms[:alarmsPerPage], countText(float64(n))
	}
}

func volumesText(n int) string {
	if n == 1 {
		return "1 volume has"
	}
	return countText(float64(n)) + " volumes have"
}

// stateOf returns the state of a LUN, and a note.
func stateOf(l *status.LUN, now time.Time) (state, note string) {
	switch {
	case l.State.Troubled():
		return l.State.Words(), troubleText(&l.Condition, now)
	case l.State == status.DiskReady && l.Copy != nil && !l.Copy.Complete && l.CopyMode == "clone":
		return "copying", ""
	}
	return l.State.Words(), plain(l.Reason)
}

// troubleText describes the problem of a disk, since when it exists, and how often it occurred.
func troubleText(c *status.Condition, now time.Time) string {
	since := "since " + durationText(now.Sub(c.Since))
	if c.Requests > 0 && c.State != status.DiskWaiting {
		since = timesText(c.Requests) + ", " + since
	}
	return fmt.Sprintf("%s (%s)", plain(c.Reason), since)
}

func timesText(n int64) string {
	if n == 1 {
		return "once"
	}
	return countText(float64(n)) + " times"
}

// refusal is a refused login. Only Note changes while the page shows it.
type refusal struct{ ID, From, Name, Why, Note string }

func (s *snapshot) refusals() (all []refusal) {
	for i, r := range s.status.RefusedLogins {
		one := refusal{ID: fmt.Sprintf("refused%d", i), From: plain(r.From),
			Name: plain(r.Initiator), Why: plain(r.Reason), Note: fmt.Sprintf("%s, last %s ago: %s",
				timesText(r.Count), durationText(s.now.Sub(r.Last)), plain(r.Error))}
		one.Name = cmp.Or(one.Name, "no name")
		if r.User != "" {
			one.Name += ", as user " + plain(r.User)
		}
		all = append(all, one)
	}
	return all
}
