package overlay

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// simTree is a simDisk with snapshots. Its expected content is that of the live disk.
type simTree struct {
	*simDisk
	whole bool
	files map[string]*simLayer
	store *filetest.SimStore // of the record
	tree  *Tree
	disk  *Stack
	snaps map[string][]byte
	named int // snapshots so far

	images map[string]string // which have the content of snapshots
	stored int               // images so far
	made   int               // layers so far

	// what the operation that is under way may leave
	current map[int64][][]byte // sectors, as allowed
	maybe   string             // a snapshot that may be there or not
	instead []byte             // the content of a disk that is being reverted
	noted   map[string]string  // as images
	lost    bool               // nothing of what is written is synced: the model must find it
}

// simLayer has the files of a layer.
type simLayer struct {
	file, durable, live *filetest.SimFile
	made                int // how many came before: a seed gives the same crashes again
}

func layerHeader(floor int64) mapHeader {
	return mapHeader{granule: granuleFor(floor), blocks: blocksOf(floor)}
}

// Make is Shelf's. Files are made before the record names them, so that they need no faults.
func (d *simTree) Make(id string, size, floor int64) (File, *Map, error) {
	if err := d.store.Save("made", []byte(id)); err != nil {
		return nil, nil, err
	}
	header := layerHeader(floor)
	content := append(header.encode(nil), make([]byte, mapPageSize)...)
	d.made++
	d.files[id] = &simLayer{made: d.made, file: filetest.NewSimFile(d.m, make([]byte, size)),
		durable: filetest.NewSimFile(d.m, content)}
	return d.Open(id, floor)
}

// Open is Shelf's.
func (d *simTree) Open(id string, floor int64) (File, *Map, error) {
	l := d.files[id]
	if l == nil {
		return nil, nil, fmt.Errorf("layer %s is gone", id)
	}
	l.file.Lies = d.lost
	blocks, store := simMap(d.t, d.m, l.durable, l.live, layerHeader(floor))
	l.live = store.live.(mapFile).SimFile
	return l.file, &Map{opt: MapOptions{ImageSize: floor}, blocks: blocks, files: store}, nil
}

// Remove is Shelf's.
func (d *simTree) Remove(id string) error {
	delete(d.files, id)
	return nil
}

// Mark is Shelf's.
func (d *simTree) Mark(layers bool) error {
	if !layers {
		return d.store.Save("mark", nil)
	}
	return d.store.Save("mark", []byte("layers"))
}

// Save is Shelf's.
func (d *simTree) Save(r *Record) error {
	if r == nil {
		return d.store.Save("record", nil)
	}
	if err := r.Check(); err != nil {
		return err
	}
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return d.store.Save("record", text)
}

func newSimTree(t *testing.T, seed uint64, opt Options, whole bool) *simTree {
	d := &simTree{simDisk: newSimDisk(t, seed, opt), whole: whole, files: map[string]*simLayer{},
		snaps: map[string][]byte{}, images: map[string]string{}}
	if whole {
		d.file = filetest.NewSimFile(d.m, d.expected)
	}
	d.store = filetest.NewSimStore(d.m)
	d.load()
	return d
}

// load opens the layers over the bottom, which is open.
func (d *simTree) load() {
	bottom := d.over
	if d.whole {
		bottom = NewWhole(d.file, Options{})
	}
	var record *Record
	text, err := d.store.Load("record")
	require.NoError(d.t, err)
	mark := testtool.Must(d.store.Load("mark"))(d.t)
	require.False(d.t, mark != nil && text == nil, "the record of a marked disk is gone")
	if text != nil {
		record = new(Record)
		require.NoError(d.t, json.Unmarshal(text, record))
		require.NoError(d.t, record.Check())
		require.True(d.t, mark != nil || len(record.Layers) == 0,
			"an older version would go on with the bottom alone")
		largest := d.file.Size()
		needed := map[string]bool{}
		for _, l := range record.Layers {
			needed[l.ID] = true
			require.NotNil(d.t, d.files[l.ID], "the record names a layer that is gone")
			largest = max(largest, d.files[l.ID].file.Size())
		}
		maps.DeleteFunc(d.files, func(id string, _ *simLayer) bool { return !needed[id] })
		require.NoError(d.t, d.file.Grow(largest)) // as each start does
		if record.Top != "" {
			require.NoError(d.t, d.files[record.Top].file.Grow(largest))
		}
	} else {
		clear(d.files)
	}
	d.tree, err = OpenTree(bottom, TreeOptions{Shelf: d, Record: record, Marked: mark != nil,
		Durable: true,
		// a read-only tree does not merge by itself: the test does
		Layer: Options{ReadOnly: true}})
	require.NoError(d.t, err)
	d.tree.opt.Layer.ReadOnly = false
	for _, n := range d.tree.nodes {
		n.disk.opt.ReadOnly = false
	}
	d.tree.working = true
	d.disk = d.tree.Stack()
}

// attempt is simDisk's, also for a kill.
func (d *simTree) attempt(p []byte, off int64) {
	d.simDisk.attempt(p, off)
	for i := int64(0); i < int64(len(p)); i += disk.SectorSize {
		d.current[(off+i)/disk.SectorSize] = [][]byte{bytes.Clone(p[i : i+disk.SectorSize])}
	}
}

// operate does one random operation.
func (d *simTree) operate() error {
	r := d.m.Random
	size := int64(len(d.expected))
	off := r.Int64N(size/disk.SectorSize) * disk.SectorSize
	length := min((1+r.Int64N(1<<r.IntN(7)))*disk.SectorSize, size-off)
	d.current, d.maybe, d.instead, d.noted = map[int64][][]byte{}, "", nil, nil
	names := slices.Sorted(maps.Keys(d.snaps))
	some := func() string { return names[r.IntN(len(names))] }
	switch op := r.IntN(16); {
	case op == 0:
		if err := d.disk.Flush(); err != nil {
			return err
		}
		clear(d.allowed)
	case op == 1:
		p := make([]byte, length)
		d.attempt(p, off)
		do := []func(context.Context, int64, int64) error{d.disk.Discard, d.disk.Zero}[r.IntN(2)]
		if err := do(d.t.Context(), off, length); err != nil {
			return err
		}
		copy(d.expected[off:], p)
	case op == 2 && !d.whole:
		if first, last, ok := d.hydrate.next(d.t.Context()); ok {
			return d.hydrate.copyChunk(d.t.Context(), make([]byte, d.hydrate.chunk), first, last)
		}
	case op == 3:
		return d.look(off, length)
	case op == 4 && len(names) < 6:
		d.named++
		d.maybe = fmt.Sprintf("s%d", d.named)
		d.snaps[d.maybe] = bytes.Clone(d.expected)
		if err := TakeSnapshot(d.t.Context(), d.maybe, d.tree); err != nil {
			return err
		}
		clear(d.allowed) // all that was acknowledged is durable now
	case op == 5 && len(names) > 0:
		d.maybe = some()
		if err := d.tree.Delete(d.maybe); err != nil {
			return err
		}
		delete(d.snaps, d.maybe)
	case op == 6 && len(names) > 0 && r.IntN(3) == 0:
		name := some()
		d.instead = append(bytes.Clone(d.snaps[name]), make([]byte,
			len(d.expected)-len(d.snaps[name]))...)
		if err := d.tree.Revert(name); err != nil {
			return err
		}
		copy(d.expected, d.instead)
		clear(d.allowed)
	case op == 7 && r.IntN(8) == 0 && size < simSize+8*minGranule:
		grown := size + (1+r.Int64N(9))*disk.SectorSize
		if err := d.tree.Grow(grown); err != nil {
			return err
		}
		d.expected = append(d.expected, make([]byte, grown-size)...)
	case op <= 9:
		return d.merge()
	case op == 10 && len(names) > 0 && r.IntN(2) == 0:
		return d.commit(some())
	default:
		p := make([]byte, length)
		disktest.Fill(p, r)
		d.attempt(p, off)
		if _, err := d.disk.WriteAt(d.t.Context(), p, off); err != nil {
			return err
		}
		copy(d.expected[off:], p)
	}
	return nil
}

// merge makes one step of the work in the background. A small top is merged as a large one, too.
func (d *simTree) merge() error {
	t := d.tree
	t.mu.Lock()
	n, above := t.uselessLocked()
	if n != nil && above == t.top && d.m.Random.IntN(2) == 0 {
		defer t.mu.Unlock()
		return t.replaceTopLocked()
	}
	t.mu.Unlock()
	_, _, err := t.round()
	t.working = true
	return err
}

// commit reads a snapshot as an image of it is stored, and notes that there is one.
func (d *simTree) commit(name string) error {
	v := testtool.Must(d.tree.View(name))(d.t)
	got := make([]byte, v.Size())
	if _, err := v.ReadAt(d.t.Context(), got, 0); err != nil {
		return err
	}
	if !bytes.Equal(d.snaps[name], got) {
		return fmt.Errorf("snapshot %s has other content, at %d", name,
			filetest.FirstDifference(d.snaps[name], got))
	}
	if err := d.checkDeltas(v, got); err != nil {
		return fmt.Errorf("snapshot %s: %w", name, err)
	}
	id := v.Snapshot().ID
	require.NoError(d.t, v.Close())
	d.stored++
	d.noted = map[string]string{name: fmt.Sprintf("image %d", d.stored)}
	if err := d.tree.Committed(id, d.noted[name]); err != nil {
		return err
	}
	d.images[name] = d.noted[name]
	return nil
}

// checkDeltas checks that the disk's image, and each image of a snapshot that a content was made
// from, is that content, together with what is said to have changed since.
func (d *simTree) checkDeltas(of disk.Disk, content []byte) error {
	for _, one := range append(of.(disk.Historian).Since(), disk.Snapshot{}) {
		image, since := d.image.Content, one.ID
		if since != "" {
			image = d.snaps[one.Name]
		}
		image = append(slices.Clip(image), make([]byte, len(content)-len(image))...) // it has grown
		for off, end := int64(0), int64(len(content)); off < end; {
			changed, n, err := disk.Changed(d.t.Context(), of, since, off, end-off)
			if err != nil {
				return err
			}
			if !changed && !bytes.Equal(image[off:off+n], content[off:off+n]) {
				return fmt.Errorf("what has changed since %q lacks something of %d bytes at %d",
					since, n, off)
			}
			off += n
		}
	}
	return nil
}

func (d *simTree) mergeAll() {
	for n, _ := d.tree.uselessLocked(); n != nil; n, _ = d.tree.uselessLocked() {
		require.NoError(d.t, d.merge())
	}
}

// look compares a range of the disk, and of each snapshot.
func (d *simTree) look(off, length int64) error {
	p := make([]byte, length)
	if _, err := d.disk.ReadAt(d.t.Context(), p, off); err != nil {
		return err
	}
	require.True(d.t, bytes.Equal(d.expected[off:off+length], p), "%d bytes at %d", length, off)
	for name, want := range d.snaps {
		if name == d.maybe {
			continue
		}
		v := testtool.Must(d.tree.View(name))(d.t)
		n := min(length, v.Size()-off)
		if n > 0 {
			if _, err := v.ReadAt(d.t.Context(), p[:n], off); err != nil {
				return err
			}
			require.True(d.t, bytes.Equal(want[off:off+n], p[:n]), "snapshot %s, %d bytes at %d",
				name, n, off)
		}
		require.NoError(d.t, v.Close())
	}
	return nil
}

// restart begins anew after a crash of the machine, or after a kill. Its error names the first
// content that must not be there.
func (d *simTree) restart(killed bool) error {
	m := &filetest.Machine{Random: d.m.Random, CrashIn: -1}
	next := (*filetest.SimFile).Crash
	if killed {
		next = (*filetest.SimFile).Killed
	}
	var live *filetest.SimFile
	if killed {
		live = d.live.Killed(m)
	}
	for _, l := range slices.SortedFunc(maps.Values(d.files), func(a, b *simLayer) int {
		return a.made - b.made
	}) {
		l.file, l.durable = next(l.file, m), next(l.durable, m)
		if l.live != nil && killed {
			l.live = l.live.Killed(m)
		} else {
			l.live = nil
		}
	}
	store := filetest.NewSimStore(m)
	for _, name := range []string{"record", "mark"} {
		require.NoError(d.t, store.Save(name, testtool.Must(d.store.Load(name))(d.t)))
	}
	d.store = store
	d.file, d.durable = next(d.file, m), next(d.durable, m)
	allowed, unflushed, copies := d.allowed, map[int64][][]byte{}, d.opt.CopyReads
	if killed { // all writes are there, and may be lost later
		allowed, unflushed = d.current, d.allowed
	}
	d.opt.CopyReads = false // reading must not change anything here
	d.open(m, live)
	d.opt.CopyReads = copies
	d.load()
	err := d.compare(allowed)
	if !bytes.Equal(d.expected, d.instead) {
		d.allowed = unflushed
	}
	return err
}

// compare looks at all content after a restart.
func (d *simTree) compare(allowed map[int64][][]byte) error {
	have := map[string]bool{}
	for _, s := range d.tree.Snapshots() {
		have[s.Name] = true
		want, known := d.snaps[s.Name]
		v := testtool.Must(d.tree.View(s.Name))(d.t)
		got := filetest.ReadAll(d.t, v, v.Size())
		if !known || !bytes.Equal(got, want) {
			return fmt.Errorf("snapshot %s has other content, at %d", s.Name,
				filetest.FirstDifference(got, want))
		}
		if err := d.checkDeltas(v, got); err != nil {
			return fmt.Errorf("snapshot %s: %w", s.Name, err)
		}
		require.NoError(d.t, v.Close())
		if s.Image != d.images[s.Name] && (s.Image == "" || s.Image != d.noted[s.Name]) {
			return fmt.Errorf("snapshot %s is noted to be %q, and is %q", s.Name, s.Image,
				d.images[s.Name])
		}
		d.images[s.Name] = s.Image
	}
	for name := range d.snaps {
		if !have[name] && name != d.maybe {
			return fmt.Errorf("snapshot %s is gone", name)
		}
	}
	maps.DeleteFunc(d.snaps, func(name string, _ []byte) bool { return !have[name] })
	got := filetest.ReadAll(d.t, d.disk, d.disk.Size())
	want := append(bytes.Clone(d.expected), make([]byte, len(got)-len(d.expected))...)
	d.expected, d.allowed = got, map[int64][][]byte{}
	if err := d.checkDeltas(d.disk, got); err != nil {
		return err
	}
	if d.instead != nil && bytes.Equal(got, d.instead) {
		return nil
	}
	for sector := range int64(len(got)) / disk.SectorSize {
		part := got[sector*disk.SectorSize : (sector+1)*disk.SectorSize]
		may := append(allowed[sector], want[sector*disk.SectorSize:(sector+1)*disk.SectorSize])
		if !slices.ContainsFunc(may, func(p []byte) bool { return bytes.Equal(p, part) }) {
			return fmt.Errorf("sector %d holds neither what was flushed nor what was written later",
				sector)
		}
	}
	return nil
}
