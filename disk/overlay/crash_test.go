package overlay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/internal/slots"
	"kubevirt.io/disk/internal/testtool"
)

// simDisk is an overlay on simulated files, with the possible content of its sectors after a crash.
type simDisk struct {
	t        *testing.T
	m        *filetest.Machine
	image    filetest.SimImage
	file     *filetest.SimFile
	durable  *filetest.SimFile
	live     *filetest.SimFile
	over     *Disk
	hydrate  *hydration
	expected []byte // what reads return now
	// sectors: what a crash may leave: the last flushed version, or any later one
	allowed map[int64][][]byte
	opt     Options
}

// simSize ends inside a block that the image stores.
const simSize = 34*minGranule + 3*disk.SectorSize

func simHeader() mapHeader {
	return mapHeader{granule: granuleFor(simSize), blocks: blocksOf(simSize)}
}

func newSimDisk(t *testing.T, seed uint64, opt Options) *simDisk {
	random := rand.New(rand.NewPCG(seed, 7))
	content := make([]byte, simSize)
	for off := 0; off < simSize; off += minGranule {
		if off/minGranule%5 != 3 { // every fifth block is a hole
			disktest.Fill(content[off:min(off+minGranule, simSize)], random)
		}
	}
	m := &filetest.Machine{Random: random, CrashIn: -1}
	image := filetest.SimImage{Content: content}
	blockMap := make([]byte, mapHeaderSize+mapPageSize)
	header := simHeader()
	copy(blockMap, header.encode(nil))
	if random.IntN(2) == 0 { // else the image stores its zeros
		holes := newBlockMap(header.blocks)
		require.NoError(t, testtool.Err(markHoles(t.Context(), image, holes, true)))
		holes.copyPage(0, blockMap[mapHeaderSize:])
	}
	d := &simDisk{t: t, image: image,
		file:    filetest.NewSimFile(m, make([]byte, simSize)),
		durable: filetest.NewSimFile(m, blockMap), opt: opt, expected: bytes.Clone(content)}
	d.open(m, nil)
	return d
}

// open starts with the current files, as after a crash: the live map does not count then. After a
// kill it does.
func (d *simDisk) open(m *filetest.Machine, live *filetest.SimFile) {
	blocks, store := simMap(d.t, m, d.durable, live, simHeader())
	d.live = store.live.(mapFile).SimFile
	img := Image(d.image)
	if m.Random.IntN(2) == 0 { // as after a copy of the image
		img = storedZeros{d.image}
	}
	stored := testtool.Must(markHoles(d.t.Context(), img, blocks, false))(d.t)
	d.m, d.allowed = m, map[int64][][]byte{}
	d.over = newDisk(d.file, img, blocks, store, stored, d.opt)
	d.hydrate = newHydration(d.over, CopyOptions{Slots: slots.New(4, slots.Options{})})
	d.hydrate.chunk, d.hydrate.retry = 3*minGranule, 0
}

// mapFile is a file of a map.
type mapFile struct{ *filetest.SimFile }

func (f mapFile) ReadAt(p []byte, off int64) (int, error) {
	return f.SimFile.ReadAt(context.Background(), p, off)
}

func (f mapFile) WriteAt(p []byte, off int64) (int, error) {
	return f.SimFile.WriteAt(context.Background(), p, off)
}

// simMap reads a map of one page. Without its live file it makes a new one.
func simMap(t *testing.T, m *filetest.Machine, durable, live *filetest.SimFile,
	header mapHeader) (*blockMap, *mapStore) {
	blocks := newBlockMap(header.blocks)
	store := newMapStore(len(blocks.pages))
	require.NoError(t, readMap(mapFile{durable}, "", durable.Size(), header, blocks,
		func(page int64, _ bool) { store.taint(page) }))
	if live == nil {
		live = filetest.NewSimFile(m, make([]byte, mapHeaderSize+mapPageSize))
	} else if blocks.mergePage(0, live.Cache[mapHeaderSize:]) {
		store.taint(0)
	}
	store.live, store.durable = mapFile{live}, mapFile{durable}
	return blocks, store
}

// attempt records what the disk may hold if a change of the range is cut off.
func (d *simDisk) attempt(p []byte, off int64) {
	for i := int64(0); i < int64(len(p)); i += disk.SectorSize {
		sector := (off + i) / disk.SectorSize
		if d.allowed[sector] == nil {
			d.allowed[sector] = [][]byte{bytes.Clone(d.expected[off+i : off+i+disk.SectorSize])}
		}
		d.allowed[sector] = append(d.allowed[sector], bytes.Clone(p[i:i+disk.SectorSize]))
	}
}

// operate does one random operation.
func (d *simDisk) operate() error {
	r := d.m.Random
	off := r.Int64N(simSize/disk.SectorSize) * disk.SectorSize
	length := min((1+r.Int64N(1<<r.IntN(7)))*disk.SectorSize, simSize-off)
	switch r.IntN(8) {
	case 0:
		if err := d.over.Flush(); err != nil {
			return err
		}
		clear(d.allowed)
		return nil
	case 1:
		p := make([]byte, length)
		d.attempt(p, off)
		op := []func(context.Context, int64, int64) error{d.over.Discard, d.over.Zero}[r.IntN(2)]
		if err := op(d.t.Context(), off, length); err != nil {
			return err
		}
		copy(d.expected[off:], p)
		return nil
	case 2:
		if first, last, ok := d.hydrate.next(d.t.Context()); ok {
			return d.hydrate.copyChunk(d.t.Context(), make([]byte, d.hydrate.chunk), first, last)
		}
		return nil
	case 3:
		p := make([]byte, length)
		if _, err := d.over.ReadAt(d.t.Context(), p, off); err != nil {
			return err
		}
		require.True(d.t, bytes.Equal(d.expected[off:off+length], p), "%d bytes at %d", length, off)
		return nil
	}
	p := make([]byte, length)
	disktest.Fill(p, r)
	d.attempt(p, off)
	if _, err := d.over.WriteAt(d.t.Context(), p, off); err != nil {
		return err
	}
	copy(d.expected[off:], p)
	return nil
}

// recover starts again after a crash. Its error names the first sector with content that must not
// be there.
func (d *simDisk) recover() error {
	m := &filetest.Machine{Random: d.m.Random, CrashIn: -1}
	d.file, d.durable = d.file.Crash(m), d.durable.Crash(m)
	d.opt.CopyReads = false // reading must not change anything here
	before := d.allowed
	d.open(m, nil)
	got := make([]byte, simSize)
	if _, err := d.over.ReadAt(d.t.Context(), got, 0); err != nil {
		return err
	}
	for sector := range int64(simSize / disk.SectorSize) {
		part := got[sector*disk.SectorSize : (sector+1)*disk.SectorSize]
		may := before[sector]
		if may == nil {
			may = [][]byte{d.expected[sector*disk.SectorSize : (sector+1)*disk.SectorSize]}
		}
		found := false
		for _, p := range may {
			found = found || bytes.Equal(p, part)
		}
		if !found {
			return fmt.Errorf("sector %d holds neither what was flushed nor what was written later",
				sector)
		}
	}
	d.expected = got
	return nil
}

// killed returns what the next process reads after this one was killed: all writes to files are
// there.
func (d *simDisk) killed() []byte {
	blocks := newBlockMap(blocksOf(simSize))
	for _, f := range []*filetest.SimFile{d.durable, d.live} {
		blocks.mergePage(0, f.Cache[mapHeaderSize:])
	}
	over := newDisk(d.file, d.image, blocks, newMapStore(len(blocks.pages)), 0, Options{})
	return filetest.ReadAll(d.t, over, simSize)
}

// crashes lets a disk crash so many times, each time at a random call to storage. It returns the
// first fault.
func crashes(t *testing.T, seed uint64, opt Options, rounds int, prepare func(*simDisk)) error {
	d := newSimDisk(t, seed, opt)
	for range rounds {
		d.opt = opt
		prepare(d)
		d.m.CrashIn = 1 + d.m.Random.IntN(60)
		var err error
		for err == nil {
			err = d.operate()
		}
		if !errors.Is(err, filetest.ErrCrashed) {
			return fmt.Errorf("an operation failed without a crash: %w", err)
		}
		if err := d.recover(); err != nil {
			return err
		}
	}
	return nil
}

// TestCrashPointsFindLostData checks that the simulation works: storage that ignores flushes loses
// data.
func TestCrashPointsFindLostData(t *testing.T) {
	for name, lie := range map[string]func(*simDisk){
		"data is not flushed before the map": func(d *simDisk) { d.file.Lies = true },
		"the map is not flushed":             func(d *simDisk) { d.durable.Lies = true },
	} {
		t.Run(name, func(t *testing.T) {
			found := false
			for seed := uint64(0); seed < 40 && !found; seed++ {
				found = crashes(t, seed, Options{}, 25, lie) != nil
			}
			require.True(t, found)
		})
	}
}

// treeCrashes lets a disk with snapshots crash, or its process be killed, so many times.
func treeCrashes(t *testing.T, seed uint64, opt Options, whole bool, rounds int,
	prepare func(*simTree)) error {
	d := newSimTree(t, seed, opt, whole)
	for round := range rounds {
		prepare(d)
		d.m.CrashIn = 1 + d.m.Random.IntN(120)
		var err error
		for err == nil {
			err = d.operate()
		}
		if !errors.Is(err, filetest.ErrCrashed) {
			return fmt.Errorf("round %d: an operation failed without a crash: %w", round, err)
		}
		if err := d.restart(d.m.Random.IntN(3) == 0); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
	}
	// Without snapshots it ends as if it never had one.
	for name := range d.snaps {
		require.NoError(t, d.tree.Delete(name))
	}
	d.mergeAll()
	require.Equal(t, d.tree.bottom, d.tree.top)
	require.Empty(t, d.files)
	for _, name := range []string{"record", "mark"} {
		require.Nil(t, testtool.Must(d.store.Load(name))(t), name)
	}
	clear(d.snaps)
	return d.look(0, int64(len(d.expected)))
}

// treeModes are the disks that snapshots are taken of.
var treeModes = map[string]struct {
	opt   Options
	whole bool
}{
	"copy-on-write": {},
	"copy-on-read":  {opt: Options{CopyReads: true, Unit: 2 * minGranule}},
	"complete":      {whole: true},
}

// TestPushAfterAPowerCut: a push that a power cut has ended may have left in the layer below what
// the layer above has lost. It does not come back, also behind the end that the disk had when the
// layer above was made, where that is in the midst of a block.
func TestPushAfterAPowerCut(t *testing.T) {
	const more = 4 * disk.SectorSize
	for name, mode := range treeModes {
		t.Run(name, func(t *testing.T) {
			d := newSimTree(t, 1, mode.opt, mode.whole)
			last := make([]byte, disk.SectorSize)
			filetest.Write(t, d.disk, last, simSize-disk.SectorSize)
			copy(d.expected[simSize-disk.SectorSize:], last)
			require.NoError(t, TakeSnapshot(t.Context(), "a", d.tree))
			require.NoError(t, d.tree.Grow(simSize+more))
			d.expected = append(d.expected, make([]byte, more)...)
			require.NoError(t, d.tree.Delete("a"))
			require.NoError(t, d.file.Grow(simSize+more))
			filetest.Write(t, d.file, bytes.Repeat([]byte{1}, more), simSize)
			require.NoError(t, d.look(0, simSize+more))
			d.mergeAll()
			require.NoError(t, d.look(0, simSize+more))
		})
	}
}

// TestSnapshotCrashPointsFindLostData checks that the simulation works: storage that ignores
// flushes loses data.
func TestSnapshotCrashPointsFindLostData(t *testing.T) {
	for name, lie := range map[string]func(*simTree){
		"the bottom":       func(d *simTree) { d.file.Lies = true },
		"the layers above": func(d *simTree) { d.lost = true },
	} {
		t.Run(name, func(t *testing.T) {
			found := false
			for seed := uint64(0); seed < 40 && !found; seed++ {
				found = treeCrashes(t, seed, Options{}, false, 25, lie) != nil
			}
			require.True(t, found)
		})
	}
}
