package overlay

import (
	"slices"

	"kubevirt.io/disk/disk"
)

var (
	_ disk.Historian = (*Stack)(nil)
	_ disk.Historian = (*View)(nil)
)

// Since implements disk.Historian.
func (s *Stack) Since() []string {
	if s.tree == nil {
		return nil
	}
	return s.tree.since("")
}

// Changed implements disk.Historian: what the layers above the snapshot have themselves may differ.
func (s *Stack) Changed(since string, off, length int64) (changed bool, n int64, err error) {
	if s.tree == nil {
		return false, 0, &SnapshotError{Name: since, Reason: ErrSnapshotMissing.Error(),
			Err: ErrSnapshotMissing}
	}
	return s.tree.changed("", since, off, length)
}

// Since implements disk.Historian.
func (v *View) Since() []string { return v.tree.since(v.name) }

// Changed implements disk.Historian.
func (v *View) Changed(since string, off, length int64) (changed bool, n int64, err error) {
	return v.tree.changed(v.name, since, off, length)
}

// ofLocked is the layer of a snapshot, or the top for "". nil: there is no such snapshot.
func (t *Tree) ofLocked(name string) *node {
	if name == "" {
		return t.top
	}
	if s := t.findLocked(name); s != nil && s.Taken {
		return s.on
	}
	return nil
}

// since returns the snapshots that another one, or the disk for "", was made from.
func (t *Tree) since(of string) (names []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.snaps {
		for n := t.ofLocked(of); n != nil; n = n.parent {
			if s.Taken && s.on == n {
				names = append(names, s.Name)
			}
		}
	}
	return names
}

// changed implements Changed for a snapshot, or for the disk for "".
func (t *Tree) changed(of, since string, off, length int64) (changed bool, n int64, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	first, last := t.ofLocked(of), t.ofLocked(since)
	if since == "" || last == nil || !slices.Contains(first.path(), last) {
		return false, 0, t.refusal(since, "it is none that this content was made from",
			ErrSnapshotMissing)
	}
	before := t.findLocked(since).Size
	if off >= before { // the disk has grown since
		return true, length, nil
	}
	for n = min(length, before-off); first != last; first = first.parent {
		var own bool
		if own, n = first.disk.run(off, n); own {
			return true, n, nil
		}
	}
	return false, n, nil
}

// path is a layer and all below it.
func (n *node) path() (all []*node) {
	for ; n != nil; n = n.parent {
		all = append(all, n)
	}
	return all
}
