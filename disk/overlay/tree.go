package overlay

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/internal/slots"
)

// Shelf keeps the files of layers, and the record of them. If the disk is durable, each call has
// reached storage when it returns. An error may be disk.ErrNoSpace.
type Shelf interface {
	// Make makes the files of a new, empty layer above the first floor bytes of another. After an
	// error there are none.
	Make(id string, size, floor int64) (File, *Map, error)
	// Open opens the files of a layer.
	Open(id string, floor int64) (File, *Map, error)
	// Remove removes the files of a layer.
	Remove(id string) error
	// Save replaces the record. After an error, the old or the new one is stored. With nil, the
	// record is removed, after the files of layers that could not be removed before.
	Save(r *Record) error
	// Mark stores with the disk whether there are layers, where versions of this program without
	// layers look, too: they must not go on with the bottom alone. After an error, either is
	// stored.
	Mark(layers bool) error
}

// TreeOptions say how the layers of a disk are kept.
type TreeOptions struct {
	Name    string // of the disk, for messages
	Shelf   Shelf
	Record  *Record // of an earlier start; nil: there is only the bottom
	Marked  bool    // Mark was called with true, at an earlier start
	Content string  // identifies the content at the bottom
	Durable bool    // a flush reaches storage
	Layer   Options // of each layer
	Slots   *slots.Slots
	Log     *zap.Logger // nil: none
}

// Tree has the layers and the snapshots of a disk.
//
// The bottom is the disk as it is without snapshots. A snapshot is a frozen layer with a name. The
// live top and every snapshot read through the layers below them, so a snapshot takes as much space
// as has changed since. A layer that has no name and is not the top exists only for the layers
// above it. If one layer is above it, both are merged in the background. If none is, it is removed.
type Tree struct {
	opt   TreeOptions
	log   *zap.Logger
	stack *Stack
	order uint64 // in which several trees are locked

	stop  context.CancelFunc
	ctx   context.Context
	works sync.WaitGroup

	// mu is held while the tree changes. Push needs no lock.
	mu      sync.Mutex
	bottom  *node       // guarded by mu, as all below
	nodes   []*node     // without the bottom; parents come first
	top     *node       // the top of stack, except in the middle of a change
	snaps   []*snapshot // the oldest first
	working bool        // the goroutine of work runs
	marked  bool        // it is certain that the disk is marked as one with layers
	unsure  bool        // storage may have another record than the last saved one
	ended   bool
}

// node is a layer in a tree.
type node struct {
	id     string // "": the bottom
	disk   *Disk
	parent *node // nil: it is the bottom
}

// snapshot is a layer's name.
type snapshot struct {
	SnapshotRecord
	on    *node
	views map[*View]struct{} // open views
}

// trees counts the trees that were made.
var trees atomic.Uint64

// OpenTree puts the layers of the record above the bottom. A snapshot whose taking was interrupted
// does not count. The tree owns all layers, also the bottom, unless there is an error.
func OpenTree(bottom *Disk, opt TreeOptions) (*Tree, error) {
	t := &Tree{opt: opt, log: opt.Log, order: trees.Add(1), bottom: &node{disk: bottom}}
	t.log = cmp.Or(t.log, zap.NewNop())
	t.top, t.marked = t.bottom, opt.Marked
	if r := opt.Record; r != nil {
		if err := t.load(r); err != nil {
			return nil, err
		}
	}
	if err := t.settleRecord(opt.Record); err != nil {
		return nil, errors.Join(err, t.closeNodes())
	}
	t.stack = NewStack(t.top.disk)
	t.publishLocked()
	t.stack.close, t.stack.tree = t.close, t
	t.ctx, t.stop = context.WithCancel(context.Background())
	t.mu.Lock()
	defer t.mu.Unlock()
	t.workLocked()
	return t, nil
}

// load opens the layers of a record.
func (t *Tree) load(r *Record) error {
	byID := map[string]*node{"": t.bottom}
	for _, l := range r.Layers {
		parent := byID[l.Parent]
		file, m, err := t.opt.Shelf.Open(l.ID, l.Floor)
		if err != nil {
			return errors.Join(err, t.closeNodes())
		}
		n := &node{l.ID, NewLayer(file, parent.disk, m, t.opt.Layer), parent}
		byID[l.ID] = n
		t.nodes = append(t.nodes, n)
	}
	for _, s := range r.Snapshots {
		if s.Taken {
			s.ID = cmp.Or(s.ID, olderID(s))
			t.snaps = append(t.snaps, &snapshot{SnapshotRecord: s, on: byID[s.Layer]})
		}
	}
	t.top = byID[r.Top]
	for _, n := range byID {
		n.disk.frozen = n != t.top
	}
	return nil
}

// settleRecord completes what an earlier process has begun to record.
func (t *Tree) settleRecord(r *Record) error {
	switch {
	case len(t.nodes) == 0:
		if r != nil || t.marked {
			t.unmarkLocked()
		}
		return nil
	case r.Durable != t.opt.Durable:
		// If a layer stops being durable, this must be recorded before anything is written to it.
		if err := t.saveLocked(); err != nil {
			return err
		}
	}
	return t.markLocked()
}

// Stack is the disk to serve.
func (t *Tree) Stack() *Stack { return t.stack }

// End ends the background work. Close the Stack afterwards.
func (t *Tree) End() {
	t.mu.Lock()
	t.ended = true
	t.mu.Unlock()
	t.stop()
	t.works.Wait()
}

// close closes all layers.
func (t *Tree) close() error {
	t.End()
	t.mu.Lock()
	defer t.mu.Unlock()
	return errors.Join(t.closeNodes(), t.bottom.disk.Close())
}

func (t *Tree) closeNodes() (err error) {
	for _, n := range slices.Backward(t.nodes) {
		err = errors.Join(err, n.disk.Close())
	}
	return err
}

func (t *Tree) recordLocked() *Record {
	r := NewRecord(t.opt.Content, t.opt.Durable)
	r.Top = t.top.id
	for _, n := range t.nodes {
		r.Layers = append(r.Layers, LayerRecord{n.id, n.parent.id, n.disk.floor})
	}
	for _, s := range t.snaps {
		s.Layer = s.on.id
		r.Snapshots = append(r.Snapshots, s.SnapshotRecord)
	}
	return r
}

// publishLocked is called when the layers have changed. The stack already has the tree's top.
func (t *Tree) publishLocked() {
	var others []*Disk
	for _, n := range append([]*node{t.bottom}, t.nodes...) {
		if n != t.top {
			others = append(others, n.disk)
		}
	}
	t.stack.others.Store(&others)
	t.stack.changes.Add(1)
}

// saveLocked saves the record. After an error, storage may have this record or the one before.
func (t *Tree) saveLocked() error {
	err := t.opt.Shelf.Save(t.recordLocked())
	t.unsure = err != nil
	return err
}

// failLocked makes the disk fail. It is for an error after which the stored record may lack a top
// that is in use: the next start would lose all later writes.
func (t *Tree) failLocked(top *node, errs ...error) error {
	top.disk.fate.failed.Store(true)
	return errors.Join(append([]error{disk.ErrFailed}, errs...)...)
}

// markLocked marks the disk before its first layer is made. If a marked disk has no record, the
// record was lost.
func (t *Tree) markLocked() error {
	if t.marked {
		return nil
	}
	if err := t.saveLocked(); err != nil {
		return err
	}
	if err := t.opt.Shelf.Mark(true); err != nil {
		return err
	}
	t.marked = true
	return nil
}

// unmarkLocked lets versions of this program without layers use the disk, which has none any more.
// If that fails, the next start tries again.
func (t *Tree) unmarkLocked() {
	if len(t.nodes) > 0 {
		return
	}
	var err error
	if t.unsure { // storage may have a record that names a layer whose files are removed first
		err = t.saveLocked()
	}
	if err == nil {
		t.marked = false // even if the next step fails
		err = t.opt.Shelf.Mark(false)
	}
	if err == nil {
		err = t.opt.Shelf.Save(nil)
	}
	if err != nil {
		t.log.Warn("the disk has no snapshots any more, but earlier versions of this program "+
			"still refuse it: the next start tries again to change that", zap.Error(err))
	}
}

func (t *Tree) findLocked(name string) *snapshot {
	for _, s := range t.snaps {
		if s.Name == name {
			return s
		}
	}
	return nil
}

// childrenLocked returns the layers directly above a layer.
func (t *Tree) childrenLocked(of *node) (all []*node) {
	for _, n := range t.nodes {
		if n.parent == of {
			all = append(all, n)
		}
	}
	return all
}

// namedLocked reports whether a layer is a snapshot.
func (t *Tree) namedLocked(n *node) bool {
	return slices.ContainsFunc(t.snaps, func(s *snapshot) bool { return s.on == n })
}

// newID draws a unique identifier of 32 hexadecimal digits.
func newID() string {
	var random [16]byte
	rand.Read(random[:]) // never fails
	return hex.EncodeToString(random[:])
}

// newTopLocked makes an empty layer above the first bytes of another one. It is the top in the
// tree, but not yet for the guest. back undoes that, until the layer is recorded. After an error of
// back, the record may have the layer.
func (t *Tree) newTopLocked(over *node, floor int64) (back func() error, err error) {
	id := newID()
	if err := t.markLocked(); err != nil {
		return nil, err
	}
	file, m, err := t.opt.Shelf.Make(id, t.stack.Size(), floor)
	if err != nil {
		// If the files could not be removed, the disk keeps its mark.
		if removed := t.opt.Shelf.Remove(id); removed == nil {
			t.unmarkLocked()
		}
		return nil, err
	}
	before := t.top
	n := &node{id, NewLayer(file, over.disk, m, t.opt.Layer), over}
	t.nodes, t.top = append(t.nodes, n), n
	return func() error {
		t.nodes, t.top = slices.DeleteFunc(t.nodes, func(o *node) bool { return o == n }), before
		// The record may name the layer. Then its files have to stay.
		err, saved := n.disk.Retire(), t.saveLocked()
		if err = errors.Join(err, saved); err == nil {
			err = t.opt.Shelf.Remove(id)
		}
		if err != nil {
			t.log.Warn("files of a snapshot that was not taken are left", zap.Error(err))
			return saved
		}
		t.unmarkLocked()
		return nil
	}, nil
}

// dropLocked removes a layer that the record does not name any more.
func (t *Tree) dropLocked(n *node) {
	t.nodes = slices.DeleteFunc(t.nodes, func(o *node) bool { return o == n })
	t.publishLocked()
	if err := errors.Join(n.disk.Retire(), t.opt.Shelf.Remove(n.id)); err != nil {
		t.log.Warn("the files of a layer that nobody needs are left until the next start",
			zap.Error(err))
		return
	}
	t.unmarkLocked()
}

// refusal makes a *SnapshotError.
func (t *Tree) refusal(name, reason string, err error) error {
	switch {
	case err == nil:
	case disk.IsNoSpace(err):
		reason = "no space is left for it; nothing has changed"
		if !errors.Is(err, disk.ErrNoSpace) {
			err = errors.Join(disk.ErrNoSpace, err)
		}
	case reason == "":
		reason = err.Error()
	}
	return &SnapshotError{Disk: t.opt.Name, Name: name, Reason: reason, Err: err}
}

// Snapshot describes a snapshot.
type Snapshot struct {
	disk.Snapshot
	Created time.Time
	Size    int64 // of the disk then, bytes
	Used    int64 // bytes that would be free without it, roughly
	// Image is an image with the same content, from Committed. "": none is known.
	Image string
	// Clones are disks that may still read from the snapshot, from NoteClone.
	Clones []string
}

// Snapshots returns the snapshots, the oldest first.
func (t *Tree) Snapshots() []Snapshot {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := []Snapshot{}
	for _, s := range t.snaps {
		if s.Taken {
			all = append(all, Snapshot{disk.Snapshot{Name: s.Name, ID: s.ID}, s.Created,
				s.Size, t.usedLocked(s.on), s.Image, s.Clones})
		}
	}
	return all
}

// Images returns, by their images, the IDs of those snapshots in among for which Committed was
// called. It is called for each request for content. So it does not go over all maps to find the
// used space, as Snapshots does.
func (t *Tree) Images(among []disk.Snapshot) map[string]string {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := map[string]string{}
	for _, s := range t.snaps {
		if s.Image != "" && slices.Contains(among, disk.Snapshot{Name: s.Name, ID: s.ID}) {
			all[s.Image] = s.ID
		}
	}
	return all
}

func (t *Tree) usedLocked(n *node) int64 {
	u, err := n.disk.Usage()
	if err != nil {
		return 0
	}
	switch above := t.childrenLocked(n); len(above) {
	case 0:
		return u.Used
	case 1:
		return min(u.Used, n.disk.Masked(above[0].disk))
	}
	return 0
}

// View opens a snapshot. The snapshot cannot be deleted before its views are closed.
func (t *Tree) View(name string) (*View, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.findLocked(name)
	switch {
	case s == nil || !s.Taken:
		return nil, t.refusal(name, ErrSnapshotMissing.Error(), ErrSnapshotMissing)
	case t.ended:
		return nil, t.refusal(name, "the disk is closed", nil)
	}
	var v *View
	v = newView(t, s, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(s.views, v)
	})
	if s.views == nil {
		s.views = map[*View]struct{}{}
	}
	s.views[v] = struct{}{}
	return v, nil
}

// Viewed returns the names of the snapshots with open views, the oldest first.
func (t *Tree) Viewed() (names []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.snaps {
		if len(s.views) > 0 {
			names = append(names, s.Name)
		}
	}
	return names
}

// Grow enlarges the disk by a hole.
func (t *Tree) Grow(size int64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.unsure { // an empty layer that only storage knows would hide what is written behind it
		if err := t.saveLocked(); err != nil {
			return err
		}
	}
	return t.stack.Grow(size)
}

// remainder is roughly how many bytes of a layer still have to be pushed. Holes cost little.
func remainder(o *Disk) int64 {
	const holes = 16
	left := o.Own() / holes
	if u, err := o.Usage(); err == nil {
		left = max(left, u.Used)
	}
	return left
}
