package scsi

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/rangelock"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// copyBench is a bench with a second disk, LUN 2.
type copyBench struct {
	*bench
	other *memDisk
}

// newCopyBench makes a device with two disks; change may alter either.
func newCopyBench(t testing.TB, change ...func(one, two *LUN)) *copyBench {
	t.Helper()
	b := &copyBench{bench: &bench{t: t, disk: newMemDisk(testBlocks * BlockSize)},
		other: newMemDisk(testBlocks * BlockSize)}
	luns := []LUN{
		{Number: 1, Disk: thinDisk{b.disk}, Identity: testIdentity(), Access: AccessWriteShared},
		{Number: 2, Disk: thinDisk{b.other}, Identity: testIdentity(), Access: AccessWriteShared},
	}
	luns[1].Identity.NAA[7] = 0x88
	for _, c := range change {
		c(&luns[0], &luns[1])
	}
	b.d = testtool.Must(NewDevice(Options{TargetName: "iqn.2017-01.io.kubevirt:wrapper"}, luns))(t)
	b.nexus = b.attach("iqn.a", 0)
	return b
}

func second(change func(*LUN)) func(one, two *LUN) { return func(_, two *LUN) { change(two) } }
func first(change func(*LUN)) func(one, two *LUN)  { return func(one, _ *LUN) { change(one) } }

const lun2 = uint64(2) << 48

// both are the CSCD descriptors of LUN 1 and LUN 2.
var both = []string{ownNAA, otherNAA}

// copy runs EXTENDED COPY on LUN 1.
func (b *copyBench) copy(list []byte) result { return b.run(extendedCopy(list), list) }

// nothingHeld checks that no copy has left anything that others would wait for.
func (b *copyBench) nothingHeld() {
	for _, u := range b.d.luns.Load().units {
		require.Zero(b.t, u.Ranges.State(), "LUN %d", u.Number)
	}
}

// write2 and read2 are write and read of LUN 2.
func (b *copyBench) write2(lba int, data []byte) {
	require.NoError(b.t, testtool.Err(b.other.WriteAt(b.t.Context(), data, int64(lba)*BlockSize)))
}

func (b *copyBench) read2(lba, blocks int) []byte {
	p := make([]byte, blocks*BlockSize)
	require.NoError(b.t, testtool.Err(b.other.ReadAt(b.t.Context(), p, int64(lba)*BlockSize)))
	return p
}

// reservesTwo has another initiator reserve LUN 2.
func reservesTwo(b *copyBench) {
	require.Equal(b.t, "GOOD",
		b.runAs(b.attach("iqn.b", 0), lun2, cdb("16 00 00 00 00 00"), nil).outcome())
}

func TestCopyBetweenUnits(t *testing.T) {
	b := newCopyBench(t)
	data := pattern(3000, 1)
	b.write(7, data)
	list := copyParameters(1, 0, both, block(0, 1, 2000, 7, 100), block(0, 1, 1000, 2007, 15000),
		block(1, 0, 10, 100, 19990))
	require.Equal(t, "GOOD", b.copy(list).outcome())
	require.Equal(t, data[:2000*BlockSize], b.read2(100, 2000))
	require.Equal(t, data[2000*BlockSize:], b.read2(15000, 1000))
	require.Equal(t, data[:10*BlockSize], b.read(19990, 10),
		"the other way, of what the first segment wrote")
	require.Zero(t, b.other.count("flush"))

	// LUN 2 can be the copy manager just as well.
	list = copyParameters(1, 0, both, block(0, 1, 5, 7, 0))
	require.Equal(t, "GOOD", b.runAs(b.nexus, lun2, extendedCopy(list), list).outcome())
	require.Equal(t, data[:5*BlockSize], b.read2(0, 5))
	b.nothingHeld()
}

// TestCopyOntoItself compares copies within a unit, even overlapping ones, with the results of copy
// in memory.
func TestCopyOntoItself(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	const size = 2400
	data := pattern(size, 3)
	for _, change := range []func(one, two *LUN){first(plainDisk), first(func(*LUN) {})} {
		for range 25 {
			b := newCopyBench(t, change)
			want := bytes.Clone(data)
			b.write(0, want)
			for range 8 { // holes
				at, n := r.IntN(size-400), 8*r.IntN(50)
				clear(want[at*BlockSize : (at+n)*BlockSize])
				b.good(unhexf("93 %02x %016x %08x 00 00", bitNDOB, at, max(n, 1)), nil)
				clear(want[at*BlockSize : (at+max(n, 1))*BlockSize])
			}
			n := 1 + r.IntN(size/2+size/4)
			from, to := r.IntN(size-n), r.IntN(size-n)
			if r.IntN(2) == 0 {
				to = max(0, min(size-n, from+r.IntN(40)-20))
			}
			copy(want[to*BlockSize:(to+n)*BlockSize], want[from*BlockSize:(from+n)*BlockSize])
			list := copyParameters(1, 0, both, block(0, 0, uint16(n), uint64(from), uint64(to)))
			require.Equal(t, "GOOD", b.copy(list).outcome())
			b.nothingHeld()
			require.True(t, bytes.Equal(want, b.read(0, size)), "%d blocks from %d to %d", n, from,
				to)
		}
	}
}

// TestCopyOfHoles checks that holes are not written, and that the old content in their place is
// gone.
func TestCopyOfHoles(t *testing.T) {
	for _, c := range []struct {
		name          string
		change        func(one, two *LUN)
		zero, discard int
		writes        int
	}{
		{"to a thin disk", second(func(*LUN) {}), 3, 0, 2},
		{"to one that can only discard",
			second(func(l *LUN) { l.Disk = discardingDisk{l.Disk.(thinDisk).memDisk} }), 0, 3, 2},
		{"to a plain disk", second(plainDisk), 0, 0, 5},
		{"from a plain disk", first(plainDisk), 0, 0, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newCopyBench(t, c.change)
			b.write2(0, pattern(1024, 9))
			data := pattern(16, 1)
			b.write(16, data)
			b.write(800, data)
			b.disk.reset()
			b.other.reset()
			require.Equal(t, "GOOD",
				b.copy(copyParameters(1, 0, both, block(0, 1, 816, 0, 0))).outcome())
			require.Equal(t, 2, b.disk.count("read"), "holes are not read")
			require.Equal(t, make([]byte, 16*BlockSize), b.read2(0, 16))
			require.Equal(t, data, b.read2(16, 16))
			require.Equal(t, make([]byte, 768*BlockSize), b.read2(32, 768))
			require.Equal(t, data, b.read2(800, 16))
			require.Equal(t, pattern(1024, 9)[816*BlockSize:], b.read2(816, 208))
			require.Equal(t, []int{c.zero, c.discard, c.writes},
				[]int{b.other.count("zero"), b.other.count("discard"), b.other.count("write")})
		})
	}
}

// TestCopySegmentFails makes a segment fail in every way. The result is COPY ABORTED with a pointer
// into its descriptor, if that is wrong, and the residual if the segment has written anything.
func TestCopySegmentFails(t *testing.T) {
	good := block(0, 1, 8, 0, 100)
	for _, c := range []struct {
		name      string
		targets   []string
		segment   string
		want, sks string
		residual  int // -1: not valid
		change    func(one, two *LUN)
		prepare   func(b *copyBench)
	}{
		{name: "source is not in the list", targets: both, segment: block(3, 1, 8, 0, 0),
			want: "a/08/04", sks: "af0004", residual: -1},
		{name: "destination is not in the list", targets: both, segment: block(0, 3, 8, 0, 0),
			want: "a/08/04", sks: "af0006", residual: -1},
		{name: "source is not here", targets: []string{unknownNAA, otherNAA}, segment: good,
			want: "a/0d/02", sks: "af0004", residual: -1},
		{name: "destination is not here", targets: []string{ownNAA, unknownNAA}, segment: good,
			want: "a/0d/02", sks: "af0006", residual: -1},
		{name: "designator of another type",
			targets: []string{ownNAA, "e4 00 0000 01 02" + otherNAA[17:]}, segment: good,
			want: "a/0d/02", sks: "af0006", residual: -1},
		{name: "a tape", targets: []string{ownNAA, "e4 01" + otherNAA[5:]}, segment: good,
			want: "a/0d/03", sks: "af0006", residual: -1},
		{name: "source beyond the end", targets: both, segment: block(0, 1, 8, testBlocks, 0),
			want: "a/00/00", sks: "af000c", residual: -1},
		{name: "source reaches beyond the end", targets: both,
			segment: block(0, 1, 8, testBlocks-7, 0), want: "a/00/00", sks: "af000a",
			residual: -1},
		{name: "destination beyond the end", targets: both, segment: block(0, 1, 8, 0, 1<<63),
			want: "a/00/00", sks: "af0014", residual: -1},
		{name: "write-protected destination", targets: both, segment: good, want: "a/0d/01",
			sks: "000000", residual: -1,
			change: second(readOnly)},
		{name: "source cannot be read", targets: both, segment: good, want: "a/0d/01",
			sks: "000000", residual: -1,
			prepare: func(b *copyBench) {
				b.disk.failWith("read", &disk.MediumError{Op: "read", Err: errors.New("bad")})
			}},
		{name: "allocation of the source cannot be read", targets: both, segment: good,
			want: "a/0d/01", sks: "000000", residual: -1,
			prepare: func(b *copyBench) {
				b.disk.failWith("extent", &disk.MediumError{Op: "read", Err: errors.New("bad")})
			}},
		{name: "destination is full", targets: both, segment: good, want: "a/0d/01",
			sks: "000000", residual: -1,
			prepare: func(b *copyBench) { b.other.failWith("write", disk.ErrNoSpace) }},
		{name: "destination fails in the middle", targets: both, segment: block(0, 1, 1100, 0, 100),
			want: "a/0d/01", sks: "000000",
			residual: 1100 - 2*512,
			prepare: func(b *copyBench) {
				b.other.enter = func(method string) {
					// one for the test, and two for the two copies before
					if method == "write" && b.other.count("write") == 5 {
						b.other.failWith("write",
							&disk.MediumError{Op: "write", Err: errors.New("bad")})
					}
				}
			}},
		{name: "destination cannot flush", targets: both, segment: good, want: "a/0d/01",
			sks: "000000", residual: -1,
			prepare: func(b *copyBench) {
				b.runAs(b.nexus, lun2, cdb("15 10 00 00 18 00"),
					unhex("00000000 08 12 00 000000000000000000000000000000000000"))
				b.other.failWith("flush", disk.ErrFailed)
			}},
		{name: "destination is reserved", targets: both, segment: good, want: "a/0d/01",
			sks: "000000", residual: -1,
			prepare: reservesTwo},
		{name: "source is reserved", targets: both, segment: block(1, 0, 8, 0, 100),
			want: "a/0d/01", sks: "000000", residual: -1,
			prepare: reservesTwo},
		{name: "destination is another initiator's", targets: both, segment: good, want: "a/0d/01",
			sks: "000000", residual: -1, change: second(exclusive),
			prepare: func(b *copyBench) {
				require.Equal(b.t, "GOOD",
					b.runAs(b.attach("iqn.b", 0), lun2, cdb("28 00 00 00 00 00 00 00 01 00"),
						nil).outcome())
			}},
	} {
		t.Run(c.name, func(t *testing.T) {
			change := c.change
			if change == nil {
				change = func(one, two *LUN) {}
			}
			b := newCopyBench(t, change)
			b.write(0, pattern(2000, 1))
			if c.prepare != nil {
				c.prepare(b)
			}
			// The failing segment is the third; those before it stay within LUN 1, or do nothing.
			list := copyParameters(7, 0, append(c.targets, ownNAA), block(2, 2, 1, 0, 0),
				block(2, 2, 0, 0, 0), c.segment)
			if c.name == "destination fails in the middle" {
				list = copyParameters(7, 0, append(c.targets, ownNAA), block(0, 1, 1, 0, 0),
					block(0, 1, 1, 0, 1), c.segment)
				b.write2(0, pattern(1, 1))
			}
			if strings.Contains(c.name, "cannot be read") {
				list = copyParameters(7, 0, append(c.targets, ownNAA), block(2, 2, 0, 0, 0),
					block(2, 2, 0, 0, 0), c.segment)
			}
			r := b.copy(list)
			require.Equal(t, c.want, r.outcome())
			requireHex(t, c.sks, r.sense[15:18])
			if c.residual < 0 {
				require.Zero(t, r.sense[0]&0x80)
			} else {
				require.EqualValues(t, 0x80, r.sense[0]&0x80)
				require.EqualValues(t, c.residual, binary.BigEndian.Uint32(r.sense[3:]))
			}

		})
	}
}

// TestCopyTellsTheTroubleOfItsUnit: an initiator only learns that a copy has failed; people learn
// why, and of which disk.
func TestCopyTellsTheTroubleOfItsUnit(t *testing.T) {
	b := newCopyBench(t)
	b.write(0, pattern(8, 1))
	b.other.failWith("write", disk.ErrNoSpace)
	require.Equal(t, "a/0d/01", b.copy(copyParameters(1, 0, both, block(0, 1, 8, 0, 0))).outcome())
	require.Empty(t, b.d.nth(0).Troubles(time.Now()))
	troubles := b.d.nth(1).Troubles(time.Now())
	require.Len(t, troubles, 1)
	require.Equal(t, status.TroubleNoSpace, troubles[0].Kind)
	b.d.nth(1).Worked(serving.OpWrite, "WRITE(10)")
	require.Empty(t, b.d.nth(1).Troubles(time.Now().Add(time.Hour)), "a write ends it")

	b.disk.failWith("read", &disk.MediumError{Op: "read", Err: errors.New("bad")})
	require.Equal(t, "a/0d/01", b.copy(copyParameters(1, 0, both, block(0, 1, 8, 0, 0))).outcome())
	require.Len(t, b.d.nth(0).Troubles(time.Now()), 1)
	b.d.nth(0).Worked(serving.OpRead, "READ(10)")
	require.Empty(t, b.d.nth(0).Troubles(time.Now().Add(time.Hour)), "a read ends it")
}

// TestCopyMakesDurable checks that without a write cache a copy is durable before its status.
func TestCopyMakesDurable(t *testing.T) {
	b := newCopyBench(t)
	require.Equal(t, "GOOD", b.runAs(b.nexus, lun2, cdb("15 10 00 00 18 00"),
		unhex("00000000 08 12 00 000000000000000000000000000000000000")).outcome())
	before := b.other.count("flush")
	require.Equal(t, "GOOD", b.copy(copyParameters(1, 0, both, block(0, 1, 1, 0, 0),
		block(1, 0, 1, 0, 0))).outcome())
	require.Equal(t, before+1, b.other.count("flush"))
	require.Zero(t, b.disk.count("flush"))
}

// TestCopyClaims checks that a copy claims the exclusive units that it uses, and no others.
func TestCopyClaims(t *testing.T) {
	b := newCopyBench(t, first(exclusive), second(exclusive))
	stranger := b.attach("iqn.b", 0)
	read := cdb("28 00 00 00 00 00 00 00 01 00")
	require.Equal(t, "GOOD", b.copy(copyParameters(1, 0, both, block(1, 1, 1, 0, 1))).outcome())
	require.Equal(t, "RESERVATION CONFLICT", b.runAs(stranger, lun2, read, nil).outcome())
	require.Equal(t, "GOOD", b.runAs(stranger, lun1, read, nil).outcome(),
		"LUN 1 was only asked to copy")
	require.Equal(t, "RESERVATION CONFLICT",
		b.copy(copyParameters(1, 0, both, block(1, 1, 1, 0, 1))).outcome())
	require.Equal(t, "RESERVATION CONFLICT", b.run(receiveCopy(saCopyStatus, 1), nil).outcome())
}

// TestCopyAndPersistentReservations: a copy that is asked for elsewhere may do with a reserved unit
// what a READ and a WRITE of the same nexus may do.
func TestCopyAndPersistentReservations(t *testing.T) {
	b := newCopyBench(t)
	stranger := b.attach("iqn.b", 0)
	b.register(b.nexus, 1)
	b.mustPersist(b.nexus, saReserve, typeWriteExclusiveRO, 1, 0)
	copies := func(segment, want string) {
		t.Helper()
		list := copyParameters(1, 0, both, segment)
		require.Equal(t, want, b.runAs(stranger, lun2, extendedCopy(list), list).outcome())
	}
	copies(block(0, 1, 8, 0, 0), "GOOD")
	copies(block(1, 0, 8, 0, 0), "a/0d/01")
	require.Zero(t, b.disk.count("write"))
	b.register(stranger, 2)
	copies(block(1, 0, 8, 0, 0), "GOOD")
	b.mustPersist(b.nexus, saRelease, typeWriteExclusiveRO, 1, 0)
	b.mustPersist(b.nexus, saReserve, typeExclusiveAccess, 1, 0)
	copies(block(0, 1, 8, 0, 0), "a/0d/01")
}

// TestCopyLocksTheFirstUnitFirst checks the lock order that keeps copies from deadlock with
// exclusive commands between them. A copy that waits for the first unit holds nothing of the
// second, in either direction.
func TestCopyLocksTheFirstUnitFirst(t *testing.T) {
	for _, segment := range []string{block(0, 1, 8, 0, 0), block(1, 0, 8, 0, 0)} {
		b := newCopyBench(t)
		one, two := &b.d.nth(0).Ranges, &b.d.nth(1).Ranges
		var h rangelock.Hold
		h.Set(rangelock.Exclusive, "iqn.a", 0, memPage)
		one.Lock(&h)
		done := make(chan result)
		go func() { done <- b.copy(copyParameters(1, 0, both, segment)) }()
		b.waitsForRange(1)
		require.Zero(t, two.State())
		one.Unlock(&h)
		require.Equal(t, "GOOD", (<-done).outcome())
	}
}

// TestCopiesDoNotWaitForEachOther runs copies in both directions, within units, and exclusive
// commands over their ends, all at once: a wrong lock order would hang.
func TestCopiesDoNotWaitForEachOther(t *testing.T) {
	b := newCopyBench(t)
	var wg sync.WaitGroup
	for w := range 6 {
		n := b.attach("iqn.w", byte(w))
		list := copyParameters(0, 3, both, block(uint16(w%2), uint16(w/2%2), 700, 0, 600),
			block(uint16(w/2%2), uint16(w%2), 700, 600, 0))
		wg.Go(func() {
			for range 20 {
				require.Equal(b.t, "GOOD", b.runAs(n, lun1, extendedCopy(list), list).outcome())
			}
		})
	}
	for _, lun := range []uint64{lun1, lun2} {
		wg.Go(func() {
			for i := range 300 {
				r := b.runAs(b.nexus, lun, unhexf("89 00 %016x 000000 80 00 00", 500+i%100),
					make([]byte, 256*BlockSize))
				require.Contains(b.t, []string{"GOOD", "e/1d/00"}, r.outcome())
			}
		})
	}
	wg.Wait()
}
