package overlay

import (
	"context"
	"slices"

	"kubevirt.io/disk/disk"
)

var (
	_ disk.Historian = (*Stack)(nil)
	_ disk.Historian = (*View)(nil)
)

// Since implements disk.Historian.
func (s *Stack) Since() []disk.Snapshot {
	if s.tree == nil {
		return nil
	}
	return s.tree.since("")
}

// Changed implements disk.Historian: a range may differ if a layer above the snapshot has it.
func (s *Stack) Changed(_ context.Context, since string, off, length int64) (changed bool, n int64,
	err error) {
	if s.tree == nil {
		return false, 0, &SnapshotError{Name: since, Reason: ErrSnapshotMissing.Error(),
			Err: ErrSnapshotMissing}
	}
	return s.tree.changed("", since, off, length)
}

// Since implements disk.Historian.
func (v *View) Since() []disk.Snapshot { return v.tree.since(v.of.ID) }

// Changed implements disk.Historian.
func (v *View) Changed(_ context.Context, since string, off, length int64) (changed bool, n int64,
	err error) {
	return v.tree.changed(v.of.ID, since, off, length)
}

func (t *Tree) withIDLocked(id string) *snapshot {
	for _, s := range t.snaps {
		if s.ID == id && s.Taken {
			return s
		}
	}
	return nil
}

// layerOfLocked is the layer of the snapshot with an ID, or the top for "". It is nil if there is
// no such snapshot.
func (t *Tree) layerOfLocked(id string) *node {
	if id == "" {
		return t.top
	}
	if s := t.withIDLocked(id); s != nil {
		return s.on
	}
	return nil
}

// since returns the snapshots that the snapshot with the ID of was made from, or the disk for "".
func (t *Tree) since(of string) (all []disk.Snapshot) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.snaps {
		for n := t.layerOfLocked(of); n != nil; n = n.parent {
			if s.Taken && s.on == n {
				all = append(all, disk.Snapshot{Name: s.Name, ID: s.ID})
			}
		}
	}
	return all
}

// changed implements Changed for the snapshot with the ID of, or for the disk for "".
func (t *Tree) changed(of, since string, off, length int64) (changed bool, n int64, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	first, last := t.layerOfLocked(of), t.layerOfLocked(since)
	if since == "" || last == nil || !slices.Contains(first.path(), last) {
		return false, 0, t.refusal(since, "there is none any more with this identifier that the "+
			"content was made from", ErrSnapshotMissing)
	}
	before := t.withIDLocked(since).Size
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

// path is a layer and all layers below it.
func (n *node) path() (all []*node) {
	for ; n != nil; n = n.parent {
		all = append(all, n)
	}
	return all
}
