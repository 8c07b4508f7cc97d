package overlay

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"
)

// TakeSnapshot names what was acknowledged by all of these disks at one point in time during the
// call. Guests go on meanwhile; only their changes wait for the moment in which the tops are
// switched. When TakeSnapshot returns nil, the snapshots are as durable as after a Flush. An error
// is a *SnapshotError; then there is no snapshot.
//
// New tops are recorded before the guests may write to them. An empty top changes nothing, so a
// crash at any moment leaves all content as it was.
func TakeSnapshot(ctx context.Context, name string, all ...*Tree) (err error) {
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b *Tree) int { return cmp.Compare(a.order, b.order) })
	all = slices.Compact(all)
	for _, t := range all {
		t.mu.Lock()
		defer t.mu.Unlock()
	}
	for _, t := range all {
		if err := t.mayTakeLocked(name); err != nil {
			return err
		}
	}
	var backs []func() error
	undo := func(err error) error {
		for _, back := range slices.Backward(backs) {
			_ = back() // if it fails, the layer stays, empty
		}
		return err
	}
	now := time.Now().UTC()
	for _, t := range all {
		back, err := t.prepareLocked(name, now)
		if err != nil {
			return undo(t.refusal(name, "", err))
		}
		backs = append(backs, back)
	}
	if err := ctx.Err(); err != nil {
		return undo(err)
	}
	begin := time.Now()
	for _, t := range all {
		t.stack.Freeze()
	}
	for _, t := range all {
		t.stack.Switch(t.top.disk)
		t.publishLocked()
	}
	paused := time.Since(begin)
	for _, t := range all {
		if taken := t.settleLocked(name); taken != nil {
			err = errors.Join(err, t.refusal(name, "", taken))
		}
	}
	for _, t := range all {
		if err != nil { // no snapshot of only some of the disks may stay
			t.forgetLocked(name)
			continue
		}
		t.log.Info("took a snapshot", zap.String("name", name), zap.Duration("paused", paused))
	}
	return err
}

// mayTakeLocked says why there cannot be a snapshot of that name, or returns nil.
func (t *Tree) mayTakeLocked(name string) error {
	if err := CheckSnapshotName(name); err != nil {
		return t.refusal(name, err.Error(), nil)
	}
	switch {
	case t.findLocked(name) != nil:
		return t.refusal(name, ErrSnapshotExists.Error(), ErrSnapshotExists)
	case t.ended:
		return t.refusal(name, "the disk is closed", nil)
	case t.opt.Layer.ReadOnly:
		return t.refusal(name, "the disk is read-only, so it stays as it is", nil)
	}
	return nil
}

// prepareLocked records a new top, and a snapshot that is not taken yet. It flushes while the guest
// writes, so that less is left for the flush after the switch.
func (t *Tree) prepareLocked(name string, now time.Time) (back func() error, err error) {
	on, size := t.top, t.stack.Size()
	undo, err := t.newTopLocked(on, size)
	if err != nil {
		return nil, err
	}
	t.snaps = append(t.snaps, &snapshot{on: on, SnapshotRecord: SnapshotRecord{
		Name: name, ID: newID(), Created: now, Size: size}})
	back = func() error {
		t.snaps = t.snaps[:len(t.snaps)-1]
		return undo()
	}
	if err = t.stack.Flush(); err == nil {
		err = t.saveLocked()
	}
	if err != nil {
		_ = back() // if it fails, the layer stays, empty
	}
	return back, err
}

// settleLocked makes a frozen layer durable, and records that the snapshot was taken.
func (t *Tree) settleLocked(name string) error {
	s := t.findLocked(name)
	if err := s.on.disk.Settle(); err != nil {
		return err
	}
	s.Taken = true
	return t.saveLocked()
}

// forgetLocked drops a snapshot that was not taken after all. If that cannot be recorded, the next
// start may find it as a snapshot, although the caller got an error.
func (t *Tree) forgetLocked(name string) {
	t.snaps = slices.DeleteFunc(t.snaps, func(s *snapshot) bool { return s.Name == name })
	if err := t.saveLocked(); err != nil {
		t.log.Warn("it is not recorded that a snapshot was not taken", zap.Error(err))
	}
	t.workLocked()
}

// Delete drops a snapshot. When it returns nil, the name is gone for good. The space that only this
// snapshot needed is freed in the background.
func (t *Tree) Delete(name string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.findLocked(name)
	switch {
	case s == nil:
		return t.refusal(name, ErrSnapshotMissing.Error(), ErrSnapshotMissing)
	case len(s.views) > 0:
		return t.refusal(name, ErrSnapshotInUse.Error()+"; end that first", ErrSnapshotInUse)
	case t.opt.Layer.ReadOnly:
		return t.refusal(name, "the disk is read-only, so its snapshots stay as they are", nil)
	}
	before := slices.Clone(t.snaps)
	t.snaps = slices.DeleteFunc(t.snaps, func(o *snapshot) bool { return o == s })
	if err := t.saveLocked(); err != nil {
		t.snaps = before
		return t.refusal(name, "", err)
	}
	t.log.Info("deleted a snapshot", zap.String("name", name))
	t.workLocked()
	return nil
}

// Committed remembers that an image has the content of the snapshot with an ID, as long as the
// snapshot exists.
func (t *Tree) Committed(id, image string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.withIDLocked(id)
	if s == nil {
		return t.refusal(id, "there is none any more with this identifier", ErrSnapshotMissing)
	}
	before := s.Image
	s.Image = image
	if err := t.saveLocked(); err != nil {
		s.Image = before
		return t.refusal(s.Name, "", err)
	}
	return nil
}

// NoteClone remembers that another disk begins from the snapshot with an ID, as long as the
// snapshot exists, and forgets clones that are gone. When it returns nil, this is as durable as
// after a flush.
func (t *Tree) NoteClone(id, clone string, gone func(clone string) bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.withIDLocked(id)
	switch {
	case s == nil:
		return t.refusal(id, "there is none any more with this identifier", ErrSnapshotMissing)
	case slices.Contains(s.Clones, clone) && !t.unsure:
		return nil
	}
	before := s.Clones
	s.Clones = slices.DeleteFunc(slices.Clone(before), func(c string) bool {
		return c == clone || gone(c)
	})
	s.Clones = append(s.Clones, clone)
	if err := t.saveLocked(); err != nil {
		s.Clones = before
		return t.refusal(s.Name, "", err)
	}
	return nil
}

// Revert makes the disk read as a snapshot again. Later snapshots stay. If the disk has grown
// since, it keeps its size, with zeros behind the snapshot's end. Nobody may use the disk
// meanwhile.
func (t *Tree) Revert(name string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.findLocked(name)
	switch {
	case s == nil || !s.Taken:
		return t.refusal(name, ErrSnapshotMissing.Error(), ErrSnapshotMissing)
	case t.ended:
		return t.refusal(name, "the disk is closed", nil)
	case t.opt.Layer.ReadOnly:
		return t.refusal(name, "the disk is read-only, so it stays as it is", nil)
	}
	old := t.top
	back, err := t.newTopLocked(s.on, s.Size)
	if err != nil {
		return t.refusal(name, "", err)
	}
	kept := slices.Clone(t.nodes)
	t.nodes = slices.DeleteFunc(t.nodes, func(n *node) bool { return n == old })
	t.stack.Freeze()
	if err := t.saveLocked(); err != nil {
		t.nodes = kept
		if again := back(); again != nil {
			err = t.failLocked(old, err, again)
		}
		t.stack.Thaw()
		return t.refusal(name, "", err)
	}
	t.stack.Switch(t.top.disk)
	t.dropLocked(old)
	t.log.Info("the disk is as it was in a snapshot", zap.String("name", name))
	t.workLocked()
	return nil
}
