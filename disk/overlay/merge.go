package overlay

import (
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/internal/slots"
)

const (
	// pauseWorth is how much may be left in the top when it is merged into the layer below. The
	// guest's changes wait for that merge. Bytes.
	pauseWorth = 4 << 20
	// mergeRetry is the wait after an error that is not about space, and after a round in which the
	// guest has written more than was merged.
	mergeRetry = 5 * time.Second
)

// workLocked starts the goroutine that removes and merges layers, if there is something to do.
func (t *Tree) workLocked() {
	if t.working || t.ended || t.opt.Layer.ReadOnly {
		return
	}
	if n, _ := t.uselessLocked(); n == nil {
		return
	}
	t.working = true
	t.works.Go(t.work)
}

// uselessLocked returns a layer without a name that is not the top, and has at most one layer above
// it. above is that layer, to be merged with it, or nil. The lowest comes first, so that no content
// is moved twice.
func (t *Tree) uselessLocked() (n, above *node) {
	for _, n := range append([]*node{t.bottom}, t.nodes...) {
		if n == t.top || t.namedLocked(n) {
			continue
		}
		switch children := t.childrenLocked(n); len(children) {
		case 0:
			if n != t.bottom {
				return n, nil
			}
		case 1:
			return n, children[0]
		}
	}
	return nil, nil
}

// work removes and merges layers until nothing is left to do, or the disk is closed.
func (t *Tree) work() {
	troubled, left := false, int64(0)
	for t.ctx.Err() == nil {
		more, now, err := t.round()
		if !more {
			return
		}
		rest := time.Duration(0)
		switch {
		case t.ctx.Err() != nil:
		case errors.Is(err, disk.ErrFailed):
			t.log.Error("the space of a deleted snapshot is not freed: the disk has failed",
				zap.Error(err))
			return // for good: the disk has failed
		case err != nil:
			if !troubled {
				t.log.Warn("the space of a deleted snapshot cannot be freed now: trying again",
					zap.Error(err))
			}
			if rest = mergeRetry; disk.IsNoSpace(err) {
				rest = spaceRetry
			}
		case now > 0 && left > 0 && now >= left:
			rest = mergeRetry // the guest writes faster than its writes are merged
		}
		troubled = err != nil
		if now > 0 {
			left = now
		}
		_ = slots.Rest(t.ctx, rest)
	}
}

// round removes a layer, or does the next step of merging two. If it puts a new top above the live
// one, left is the content of the former top in bytes, which the next round merges.
func (t *Tree) round() (more bool, left int64, err error) {
	t.mu.Lock()
	unlocked := false
	defer func() {
		if !unlocked {
			t.mu.Unlock()
		}
	}()
	n, above := t.uselessLocked()
	switch {
	case n == nil || t.ended:
		t.working = false
		return false, 0, nil
	case above == nil:
		return true, 0, t.removeLocked(n)
	case above != t.top:
		t.mu.Unlock()
		unlocked = true
		return true, 0, t.merge(n, above)
	}
	if left = remainder(above.disk); left > pauseWorth {
		return true, left, t.replaceTopLocked()
	}
	return true, 0, t.mergeTopLocked(n, above)
}

// removeLocked removes a layer that has no layer above it.
func (t *Tree) removeLocked(n *node) error {
	before := t.nodes
	t.nodes = slices.DeleteFunc(slices.Clone(t.nodes), func(o *node) bool { return o == n })
	if err := t.saveLocked(); err != nil {
		t.nodes = before
		return err
	}
	t.dropLocked(n)
	return nil
}

// replaceTopLocked freezes the top below a new one, so that the former top can be merged.
func (t *Tree) replaceTopLocked() error {
	back, err := t.newTopLocked(t.top, t.stack.Size())
	if err != nil {
		return err
	}
	if err := t.saveLocked(); err != nil {
		_ = back() // if it fails, the layer stays, empty
		return err
	}
	t.stack.Freeze()
	t.stack.Switch(t.top.disk)
	t.publishLocked()
	return nil
}

// merge moves all content of the frozen layer above into the layer below, which takes its place.
// Meanwhile the tree may change, but not between these two.
func (t *Tree) merge(below, above *node) error {
	if err := above.disk.Push(t.ctx, t.opt.Slots); err != nil {
		return err
	}
	if err := below.disk.Settle(); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.joinLocked(below, above); err != nil {
		return err
	}
	for _, n := range t.childrenLocked(below) {
		n.disk.SetLower(below.disk)
	}
	t.dropLocked(above)
	return nil
}

// mergeTopLocked is merge for the top. The guest's changes wait.
func (t *Tree) mergeTopLocked(below, top *node) error {
	// Flush now, so that little is left to flush while the guest waits.
	if err := errors.Join(below.disk.Settle(), top.disk.flushFile()); err != nil {
		return err
	}
	// Do not wait for a far image. Nothing has to be read from it: blocks are as large below.
	t.stack.Freeze()
	err := top.disk.Push(disk.AtHand, nil)
	if err == nil {
		err = below.disk.Settle()
	}
	if err == nil {
		if err = t.joinLocked(below, top); err != nil && !disk.IsNoSpace(err) {
			// The next start may find either record. If it is the new one, what the guest writes to
			// this top would be lost.
			if again := t.saveLocked(); again != nil {
				err = t.failLocked(top, err, again)
			}
		}
	}
	if err != nil {
		t.stack.Thaw()
		return err
	}
	t.stack.Switch(below.disk)
	t.dropLocked(top)
	return nil
}

// joinLocked records that a layer takes the place of the one above it.
func (t *Tree) joinLocked(below, above *node) error {
	swap := func(from, to *node) {
		for _, n := range t.nodes {
			if n != to && n.parent == from && n != below && n != above {
				n.parent = to
			}
		}
		for _, s := range t.snaps {
			if s.on == from {
				s.on = to
			}
		}
		if t.top == from {
			t.top = to
		}
	}
	before := t.nodes
	swap(above, below)
	t.nodes = slices.DeleteFunc(slices.Clone(t.nodes), func(n *node) bool { return n == above })
	if err := t.saveLocked(); err != nil {
		t.nodes = before
		swap(below, above)
		return err
	}
	for _, s := range t.snaps {
		if s.on == below {
			for v := range s.views {
				v.Replace(below.disk)
			}
		}
	}
	return nil
}
