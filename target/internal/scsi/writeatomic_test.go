package scsi

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// Commands for 16 blocks, of which the first is block 8.
const (
	atomic16 = "9c 00 00 00 00 00 00 00 00 08 00 00 00 10 00 00"
	write16  = "2a 00 00 00 00 08 00 00 10 00"
	read16   = "28 00 00 00 00 08 00 00 10 00"
)

func TestWriteAtomic(t *testing.T) {
	for _, c := range []struct {
		name, cdb, want string
		blocks          int
		flushes         int
	}{
		{"one physical block", "9c 00 00 00 00 00 00 00 00 08 00 00 00 08 00 00", "GOOD", 8, 1},
		{"the most", "9c 00 00 00 00 00 00 00 00 08 00 00 01 00 00 00", "GOOD", 256, 1},
		{"up to the end", "9c 00 00 00 00 00 00 00 4e 18 00 00 00 08 00 00", "GOOD", 8, 1},
		{"nothing", "9c 00 00 00 00 00 00 00 00 08 00 00 00 00 00 00", "GOOD", 0, 0},
		{"DPO and FUA", "9c 18 00 00 00 00 00 00 00 08 00 00 00 08 00 00", "GOOD", 8, 1},
		{"more than the most", "9c 00 00 00 00 00 00 00 00 08 00 00 01 08 00 00", "5/24/00", 264,
			0},
		{"an address within a physical block", "9c 00 00 00 00 00 00 00 00 09 00 00 00 08 00 00",
			"5/24/00", 8, 0},
		{"a part of a physical block", "9c 00 00 00 00 00 00 00 00 08 00 00 00 07 00 00", "5/24/00",
			7, 0},
		{"an atomic boundary", "9c 00 00 00 00 00 00 00 00 08 00 08 00 08 00 00", "5/24/00", 8, 0},
		{"protection", "9c 20 00 00 00 00 00 00 00 08 00 00 00 08 00 00", "5/24/00", 8, 0},
		{"group number", "9c 00 00 00 00 00 00 00 00 08 00 00 00 08 01 00", "5/24/00", 8, 0},
		{"beyond the end", "9c 00 00 00 00 00 00 00 4e 18 00 00 00 10 00 00", "5/21/00", 16, 0},
		{"nothing beyond the end", "9c 00 00 00 00 00 00 00 4e 28 00 00 00 00 00 00", "5/21/00", 0,
			0},
		{"less data than the CDB says", "9c 00 00 00 00 00 00 00 00 08 00 00 00 10 00 00",
			"5/0e/03", 8, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, stored)
			data := pattern(c.blocks, 3)
			require.Equal(t, c.want, b.run(cdb(c.cdb), data).outcome())
			require.Equal(t, c.flushes, b.disk.count("flush"))
			switch {
			case c.want != "GOOD":
				require.Zero(t, b.disk.count("write"))
			case c.blocks > 0:
				lba := binary.BigEndian.Uint32(unhex(c.cdb)[6:])
				require.Equal(t, data, b.read(lba, uint16(c.blocks)))
			}
		})
	}
	protected := newBench(t, stored, readOnly)
	require.Equal(t, "7/27/00",
		protected.run(cdb("9c 00 00 00 00 00 00 00 00 08 00 00 00 08 00 00"),
			pattern(8, 1)).outcome())
}

// tornDisk stores half of a write and then fails, as storage that fills up does. Later writes fail
// and store nothing.
type tornDisk struct {
	*memDisk
	fail  error
	fails int
	torn  bool
}

func (d *tornDisk) WriteAt(ctx context.Context, p []byte, off int64) (int, error) {
	if d.fails == 0 {
		return d.memDisk.WriteAt(ctx, p, off)
	}
	d.fails--
	if d.torn {
		return 0, d.fail
	}
	d.torn = true
	n, _ := d.memDisk.WriteAt(ctx, p[:len(p)/2], off)
	return n, d.fail
}

func TestWriteAtomicLeavesNothingBehindWhenTheDiskFails(t *testing.T) {
	torn := &tornDisk{memDisk: newMemDisk(testBlocks * BlockSize), fail: errors.New("no more")}
	b := newBench(t, stored, func(l *LUN) { l.Disk = torn })
	before := pattern(16, 1)
	b.good(cdb(write16), before)
	torn.fails = 1
	require.Equal(t, "4/44/00", b.run(cdb(atomic16), pattern(16, 2)).outcome())
	require.Equal(t, before, b.good(cdb(read16), nil))
}

// TestWriteAtomicThatWasCutOff kills the target in the middle of a write. The next start puts the
// former content back.
func TestWriteAtomicThatWasCutOff(t *testing.T) {
	store := &keptStore{}
	torn := &tornDisk{memDisk: newMemDisk(testBlocks * BlockSize), fail: errors.New("killed")}
	kept := func(l *LUN) { l.Disk, l.Store = torn, store }
	b := newBench(t, kept)
	before, after := pattern(16, 1), pattern(16, 2)
	b.good(cdb(write16), before)
	torn.fails = 2 // also the attempt to put it back
	torn.failWith("flush", disk.ErrFailed)
	require.Equal(t, "4/44/00", b.run(cdb(atomic16), after).outcome())
	torn.failWith("flush", nil)
	require.NotEqual(t, before, b.good(cdb(read16), nil))

	again := newBench(t, kept)
	require.Equal(t, before, again.good(cdb(read16), nil))
	again.good(cdb(atomic16), after)
	require.Empty(t, store.kept[storedAtomic])
	last := newBench(t, kept)
	require.Equal(t, after, last.good(cdb(read16), nil), "a write that has ended stays")

	store.failWith(errors.New("no space"))
	require.Equal(t, "4/44/00", last.run(cdb(atomic16), before).outcome())
	require.Equal(t, after, last.good(cdb(read16), nil), "what cannot be undone is not begun")
}

// TestWriteAtomicThatCannotBeUndone uses a disk that takes neither the new blocks nor the former
// ones. The next start does not undo writes that were acknowledged afterwards.
func TestWriteAtomicThatCannotBeUndone(t *testing.T) {
	store := &keptStore{}
	torn := &tornDisk{memDisk: newMemDisk(testBlocks * BlockSize), fail: errors.New("no more")}
	kept := func(l *LUN) { l.Disk, l.Store = torn, store }
	b := newBench(t, kept)
	torn.fails = 2
	require.Equal(t, "4/44/00", b.run(cdb(atomic16), pattern(16, 2)).outcome())
	require.Empty(t, store.kept[storedAtomic])
	later := pattern(16, 3)
	b.good(cdb(write16), later)
	again := newBench(t, kept)
	require.Equal(t, later, again.good(cdb(read16), nil))
}

// TestWriteAtomicThatCannotBeFlushed uses a disk whose flush fails for a while, like a persistent
// one's without space for its map. The next start does not undo writes that were acknowledged
// afterwards.
func TestWriteAtomicThatCannotBeFlushed(t *testing.T) {
	for name, fails := range map[string]func(b *bench){
		"no space": func(b *bench) {
			b.disk.failWith("flush", disk.ErrNoSpace)
			require.Equal(b.t, "7/27/07", b.run(cdb(atomic16), pattern(16, 2)).outcome())
			b.disk.failWith("flush", nil)
			require.True(b.t, bytes.Equal(pattern(16, 1), b.good(cdb(read16), nil)),
				"nothing of it is left")
		},
		"a panic": func(b *bench) {
			b.disk.enter = func(method string) {
				if method == "flush" {
					panic("a bug")
				}
			}
			require.Panics(b.t, func() { b.run(cdb(atomic16), pattern(16, 2)) })
			b.disk.enter = nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			store := &keptStore{}
			b, kept := newKeptBench(t, store)
			b.good(cdb(write16), pattern(16, 1))
			fails(b)
			later := pattern(16, 3)
			b.good(cdb(write16), later)
			b.good(cdb("35 00 00 00 00 00 00 00 00 00"), nil)
			require.True(t, bytes.Equal(later, newBench(t, kept).good(cdb(read16), nil)))
			require.Empty(t, store.kept[storedAtomic])
		})
	}
}

// newKeptBench is newBench with a disk and a store that a later bench gets again by kept.
func newKeptBench(t *testing.T, store serving.Store) (b *bench, kept func(*LUN)) {
	m := newMemDisk(testBlocks * BlockSize)
	kept = func(l *LUN) { l.Disk, l.Store = thinDisk{m}, store }
	b = newBench(t, kept)
	b.disk = m
	return b, kept
}

// unsureStore does its work and reports a failure, or fails to forget.
type unsureStore struct {
	keptStore
	unsure, clings bool
}

func (s *unsureStore) Save(name string, data []byte) error {
	if s.clings && len(data) == 0 {
		return errors.New("it stays")
	}
	err := s.keptStore.Save(name, data)
	if s.unsure {
		return errors.New("the directory may not have reached storage")
	}
	return err
}

// TestWriteAtomicThatCannotBeForgotten lets the store fail while the disk does not. The next start
// does not undo writes that were acknowledged afterwards.
func TestWriteAtomicThatCannotBeForgotten(t *testing.T) {
	for _, unsure := range []bool{false, true} {
		store := &unsureStore{}
		b, kept := newKeptBench(t, store)
		b.good(cdb(write16), pattern(16, 1))
		store.unsure, store.clings = unsure, !unsure
		require.Equal(t, "4/44/00", b.run(cdb(atomic16), pattern(16, 2)).outcome())
		for _, c := range []struct{ cdb, data []byte }{
			{cdb(write16), pattern(16, 3)},
			{unmapCDB(8 + 16), unmapList(0, 8)},
			{extendedCopy(selfCopy), selfCopy},
		} {
			require.NotEqual(t, "GOOD", b.run(c.cdb, c.data).outcome(),
				"nothing is written that would be undone")
		}
		of := b.d.nth(0).served // by NBD or vhost-user
		require.ErrorContains(t, b.d.Bars(of, true), "replaced: ")
		require.NoError(t, b.d.Bars(of, false))
		store.unsure, store.clings = false, false
		require.NoError(t, b.d.Bars(of, true))
		later := pattern(16, 4)
		b.good(cdb(write16), later)
		require.Equal(t, later, newBench(t, kept).good(cdb(read16), nil))
		b.good(cdb(atomic16), pattern(16, 5))
	}
}

// TestWriteBehindAnAtomicOne lets a write wait for the blocks of an atomic write whose record then
// cannot be deleted. The waiting write is not acknowledged, because the next start would undo it.
func TestWriteBehindAnAtomicOne(t *testing.T) {
	store := &unsureStore{}
	b, kept := newKeptBench(t, store)
	b.good(cdb(write16), pattern(16, 1))
	stuck, release := b.hang("write")
	first, behind := make(chan string), make(chan string)
	go func() { first <- b.run(cdb(atomic16), pattern(16, 2)).outcome() }()
	<-stuck
	go func() { behind <- b.run(cdb(write16), pattern(16, 3)).outcome() }()
	b.waitsForRange(1)
	store.clings = true
	close(release)
	require.Equal(t, "4/44/00", <-first)
	require.Equal(t, "4/44/00", <-behind)
	store.clings = false
	later := pattern(16, 4)
	b.good(cdb(write16), later)
	require.Equal(t, later, newBench(t, kept).good(cdb(read16), nil))
}

// TestWriteAtomicIsAlone makes an atomic write hang in the disk. A read of its blocks waits, as it
// could see a part of them. So does another atomic write, wherever it goes: there is one record of
// the former content, and a crash would find only that of the second write.
func TestWriteAtomicIsAlone(t *testing.T) {
	store := &keptStore{}
	b := newBench(t, func(l *LUN) { l.Store = store })
	var saves atomic.Int32
	store.saving = func() { saves.Add(1) }
	stuck, release := b.hang("write")
	ended := make(chan string, 3)
	go func() { ended <- b.run(cdb(atomic16), pattern(16, 1)).outcome() }()
	<-stuck
	go func() { ended <- b.run(cdb(read16), nil).outcome() }()
	b.waitsForRange(1)
	go func() {
		ended <- b.run(cdb("9c 00 00 00 00 00 00 00 10 00 00 00 00 10 00 00"),
			pattern(16, 2)).outcome()
	}()
	time.Sleep(20 * time.Millisecond) // in which it would save its record
	early := saves.Load()
	close(release)
	for range cap(ended) {
		require.Equal(t, "GOOD", <-ended)
	}
	require.EqualValues(t, 1, early)
	require.EqualValues(t, 4, saves.Load())
}

// TestWriteAtomicWithoutSpace is on a disk that has space for a part of the blocks, and none for
// the zeros that were there.
func TestWriteAtomicWithoutSpace(t *testing.T) {
	b := newBench(t, stored)
	b.disk.content.SetFree(2 * memPage)
	before := pattern(8, 1)
	b.good(cdb("2a 00 00 00 00 08 00 00 08 00"), before)
	require.Equal(t, "7/27/07", b.run(cdb("9c 00 00 00 00 00 00 00 00 08 00 00 00 20 00 00"),
		pattern(32, 2)).outcome())
	require.Equal(t, append(bytes.Clone(before), make([]byte, 24*BlockSize)...), b.read(8, 32))
	require.Equal(t, 1, b.disk.allocated(), "the holes are holes again")
}

// TestWriteAtomicThatWasCutOffWithoutSpace: a full volume does not keep the disk from being served,
// because its guest could make room.
func TestWriteAtomicThatWasCutOffWithoutSpace(t *testing.T) {
	full := newMemDisk(1 << 20)
	full.content.SetFree(0)
	record := make([]byte, atomicRecord+2*atomicGranularity)
	record[6] = atomicGranularity >> 8 // the offset, big-endian
	store := &keptStore{kept: map[string][]byte{storedAtomic: record}}
	require.NoError(t, testtool.Err(NewDevice(Options{},
		[]LUN{{Number: 3, Disk: thinDisk{full}, Identity: testIdentity(), Store: store}})))
	require.Empty(t, store.kept[storedAtomic])
}

func TestAtomicRecordThatMakesNoSense(t *testing.T) {
	for name, record := range map[string][]byte{
		"it has 7 bytes":   make([]byte, 7),
		"it has 8 bytes":   make([]byte, 8),
		"it has 500 bytes": make([]byte, 500),
		"of another disk":  append([]byte{0, 0, 0, 0, 0x7f, 0, 0, 0}, make([]byte, BlockSize)...),
	} {
		store := &keptStore{kept: map[string][]byte{storedAtomic: record}}
		_, err := NewDevice(Options{},
			[]LUN{{Number: 3, Disk: newMemDisk(1 << 20), Identity: testIdentity(), Store: store}})
		require.ErrorContains(t, err, name)
		require.ErrorContains(t, err, "remove /volume/unit/atomic-write")
	}
	broken := newMemDisk(1 << 20)
	broken.failWith("write", errors.New("broken"))
	store := &keptStore{kept: map[string][]byte{storedAtomic: make([]byte, atomicRecord+BlockSize)}}
	require.ErrorContains(t, testtool.Err(NewDevice(Options{},
		[]LUN{{Number: 3, Disk: broken, Identity: testIdentity(), Store: store}})), "put back")
	require.NotEmpty(t, store.kept[storedAtomic], "it is tried again at the next start")
}

// TestWriteAtomicIsNeverSeenInParts lets two initiators write the same blocks, atomically and
// otherwise, while others read them: whatever a reader sees is one whole write.
func TestWriteAtomicIsNeverSeenInParts(t *testing.T) {
	b := newBench(t, stored)
	const blocks = 64
	request := cdb("9c 00 00 00 00 00 00 00 00 40 00 00 00 40 00 00")
	var writers, readers sync.WaitGroup
	stop := make(chan struct{})
	for w := range 2 {
		n := b.attach("iqn.w", byte(w))
		writers.Go(func() {
			for i := range 200 {
				r := drive(b.d, n, lun1, request,
					bytes.Repeat([]byte{byte(2*i + w)}, blocks*BlockSize), 8192)
				if r.outcome() != "GOOD" {
					t.Errorf("write: %s", r.outcome())
				}
			}
		})
	}
	for i := range 2 {
		n := b.attach("iqn.r", byte(i))
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				r := drive(b.d, n, lun1, cdb("28 00 00 00 00 40 00 00 40 00"), nil,
					blocks*BlockSize)
				if r.outcome() != "GOOD" ||
					!bytes.Equal(r.data, bytes.Repeat(r.data[:1], len(r.data))) {
					t.Errorf("a reader saw parts of two writes, or %s", r.outcome())
					return
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
}
