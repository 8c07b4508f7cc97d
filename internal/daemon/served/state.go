package served

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// The state of a disk is found here, and nowhere else, so that everybody gets the same answer.
// Package serving knows why requests of guests wait or fail; this file adds what happens before and
// after there are any.

// watchEvery is how often trouble that has begun or ended is logged.
const watchEvery = time.Second

// reportedState is the last found state of a disk.
type reportedState struct {
	status.Condition
	logged   status.Condition // last logged; State "": nothing is wrong
	troubles []status.Trouble
}

// condition returns the state of a disk, and all that is wrong with it.
func (d *Disks) condition(s *Disk, now time.Time) (status.Condition, []status.Trouble) {
	c, troubles := d.find(s, now)
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range troubles { // trouble that no request has met is found again each time
		t := &troubles[i]
		for _, was := range s.reported.troubles {
			if t.Since.Equal(now) && was.Kind == t.Kind && was.Message == t.Message {
				t.Since = was.Since
			}
		}
	}
	s.reported.troubles = slices.Clone(troubles)
	before := s.reported.Condition
	if before.State == c.State && (c.Since.IsZero() || before.Since.Before(c.Since)) {
		c.Since = before.Since
	}
	if c.Since.IsZero() {
		c.Since = now
	}
	if len(c.Peers) == 0 && before.State == c.State {
		c.Peers = before.Peers
	}
	if c.State.Troubled() {
		c.WhatToDo = status.ToDo(c.Kind)
		if c.State == status.DiskFailed && s.AlreadyOpen != nil && !s.IsSnapshot() { // see Failure
			c.WhatToDo = "stop the machine, repair what the reason names, and start the machine " +
				"again, together with the daemon"
		}
	}
	s.reported.Condition = c
	return c, troubles
}

// find is condition without the formerly found state.
func (d *Disks) find(s *Disk, now time.Time) (c status.Condition, troubles []status.Trouble) {
	err := s.Failure()
	if errors.Is(err, disk.ErrMoved) {
		return status.Condition{State: status.DiskMoved,
			Reason: "its machine uses the disk by another daemon now"}, nil
	}
	in := d.inUse.At(s.LUN)
	if !s.Serving() {
		in = nil
	}
	if in != nil {
		troubles = in.Troubles(now)
	}
	switch {
	case err != nil:
		return status.Condition{State: status.DiskFailed, Kind: status.TroubleFailed,
			Reason: err.Error()}, troubles
	case in == nil:
		return s.starting(), nil
	case s.Progress != nil:
		troubles = append(troubles, s.copying(troubles, now)...)
	}
	if inst := s.Instance(); inst != nil && inst.Wrong() != "" {
		troubles = append(troubles, status.Trouble{Kind: status.TroubleOther, Since: now, Last: now,
			Message: inst.Wrong()})
	}
	if len(troubles) == 0 {
		return status.Condition{State: status.DiskReady}, nil
	}
	worst := slices.MinFunc(troubles, func(a, b status.Trouble) int {
		return cmp.Compare(a.State().Rank(), b.State().Rank())
	})
	c = status.Condition{State: worst.State(), Kind: worst.Kind, Reason: worst.Message,
		Since: worst.Since, Requests: worst.Count, Peers: worst.Peers}
	if worst.Error != "" {
		c.Reason += ": " + worst.Error
	}
	return c, troubles
}

// copying is why the image of a disk is not copied, unless guests have the same trouble.
func (s *Disk) copying(known []status.Trouble, now time.Time) (more []status.Trouble) {
	add := func(kind, message, text string) {
		if !slices.ContainsFunc(known, func(t status.Trouble) bool { return t.Kind == kind }) {
			more = append(more, status.Trouble{Kind: kind, Since: now, Last: now, Message: message,
				Error: text})
		}
	}
	if s.Progress.Waiting() {
		add(status.TroubleNoSpace,
			"copying waits for space; the disk is served from its image meanwhile", "")
	}
	if err := s.Progress.Missing(); err != nil {
		kind, _ := serving.TroubleOf(err)
		add(kind, "a part of the image cannot be copied; that is tried again, and the disk is "+
			"served from its image meanwhile", err.Error())
	}
	return more
}

// starting says why a disk cannot be used yet.
func (s *Disk) starting() status.Condition {
	now, from := s.look(), s.source()
	c := status.Condition{State: status.DiskStarting, Since: now.opening}
	switch {
	case now.instance != nil:
		c.Reason = "it is open, and is served when all disks are"
	case now.opening.IsZero():
		c.Reason = "it is opened after other disks"
	case from.Name != "":
		c.Reason = "it is being opened, from " + from.Name + Why(from, now.opening)
	default:
		c.Reason = "it is being opened, in " + s.storage
	}
	return c
}

// Opening is the disk that is being opened, and what it waits for; "": there is none.
func (d *Disks) Opening() (disk string, c status.Condition) {
	for _, s := range d.table.all() {
		if now := s.look(); now.instance == nil && !now.opening.IsZero() {
			return s.String(), s.starting()
		}
	}
	return "", c
}

// Why is the last error of a source since then, after a colon; "": there was none.
func Why(from serving.Source, since time.Time) string {
	if from.Why == nil {
		return ""
	}
	text, at := from.Why()
	if text == "" || at.Before(since) {
		return ""
	}
	return ": " + text
}

// source is where far content of the disk comes from.
func (s *Disk) source() serving.Source {
	if s.clonedFrom != nil && s.Source.Kind == "" {
		return s.clonedFrom.source()
	}
	return s.Source
}

// beginOpening notes that the disk is being opened, and its place.
func (s *Disk) beginOpening(workDir string) {
	s.storage = "the storage of " + cmp.Or(s.Dir, workDir)
	if s.Image != nil && s.Far == nil && s.Source.Kind == "" {
		if s.CopyMode == instance.CopyNone {
			s.storage = fmt.Sprintf("the storage of the image %q", s.Name)
		} else {
			s.storage += fmt.Sprintf(", or of the image %q", s.Name)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.opening = time.Now()
}

// Unusable is why no guest should log in here: all disks have failed, or were taken over elsewhere.
// nil: a disk is usable, or there is none. A waiting disk is usable: otherwise the pod would leave
// its Service, and guests that have lost their connection could not come back to wait.
func (d *Disks) Unusable() error {
	var all []error
	for _, s := range d.table.served() {
		c, _ := d.condition(s, time.Now())
		if c.State.Usable() {
			return nil
		}
		all = append(all, errors.New(line(s, c)))
	}
	return errors.Join(all...)
}

// Trouble has a line for each disk that is in trouble.
func (d *Disks) Trouble() (all []string) {
	for _, s := range d.table.served() {
		if c, _ := d.condition(s, time.Now()); c.State.Troubled() {
			all = append(all, line(s, c))
		}
	}
	return all
}

func line(s *Disk, c status.Condition) string {
	return fmt.Sprintf("%v: %s since %s: %s", s, c.State.Words(), c.Since.Format(time.RFC3339),
		c.Reason)
}

// watch logs trouble that begins or ends, until the daemon stops.
func (d *Disks) watch() {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-d.Stopping.Done():
			return
		case <-tick.C:
		}
		for _, s := range d.table.served() {
			d.tell(s, time.Now())
		}
	}
}

// tell logs once when the trouble of a disk begins, and once when it ends.
func (d *Disks) tell(s *Disk, now time.Time) {
	c, _ := d.condition(s, now)
	s.mu.Lock()
	before := s.reported.logged
	switch {
	case !c.State.Troubled():
		s.reported.logged = status.Condition{}
	case c.State != before.State:
		s.reported.logged = c
	default:
		s.reported.logged.Peers = c.Peers
	}
	s.mu.Unlock()
	which := []zap.Field{zap.Uint16("lun", s.LUN), zap.String("image", s.Name)}
	if before.State != "" && before.State != c.State {
		d.opt.Log.Info("the trouble of a disk is over", append(which,
			zap.String("state", string(before.State)), zap.String("kind", before.Kind),
			zap.Strings("peers", before.Peers), zap.Duration("after", now.Sub(before.Since)))...)
	}
	if c.State.Troubled() && before.State != c.State {
		d.opt.Log.Warn("a disk is in trouble", append(which, zap.String("state", string(c.State)),
			zap.String("kind", c.Kind), zap.String("reason", c.Reason),
			zap.Int64("requests", c.Requests), zap.Strings("peers", c.Peers),
			zap.Time("since", c.Since), zap.String("what_to_do", c.WhatToDo))...)
	}
}
