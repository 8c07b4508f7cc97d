package scsi

import (
	"context"
	"encoding/binary"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func unhexf(format string, args ...any) []byte { return unhex(fmt.Sprintf(format, args...)) }

// receiveCopy is the CDB of a RECEIVE COPY RESULTS command.
func receiveCopy(action, id byte) []byte {
	return unhexf("84 %02x %02x 00000000000000 00000400 00 00", action, id)
}

// discardingDisk can discard, but it can neither zero nor report what is allocated.
type discardingDisk struct{ *memDisk }

func (d discardingDisk) Discard(ctx context.Context, off, length int64) error {
	return d.zero("discard", off, length)
}

func TestCopyOperatingParameters(t *testing.T) {
	b := newCopyBench(t)
	want := `0000002a 01 000000 0008 0040 00000800 01fffe00 00000000 00000000 00000000 0000 0010 10 09 00 00 000000 02 02 e4`
	requireHex(t, want, b.good(receiveCopy(saCopyParameters, 0), nil))
	requireHex(t, want, b.good(receiveCopy(saCopyParameters, 77), nil))
	requireHex(t, "0000002a 01", b.good(cdb("84 03 00 00000000000000 00000005 00 00"), nil))
	require.Empty(t, b.good(cdb("84 03 00 00000000000000 00000000 00 00"), nil))
	require.Equal(t, "5/24/00", b.run(receiveCopy(1, 0), nil).outcome(),
		"no segment descriptor holds data")
	require.Equal(t, "5/24/00", b.run(receiveCopy(4, 0), nil).outcome(),
		"only people would ask for details of a failure")
	require.Equal(t, "5/24/00", b.run(unhex("83 01"), nil).outcome(),
		"list identifiers of four bytes")
}

// TestThirdPartyCopyPage: libiscsi's suite looks here for what it may test.
func TestThirdPartyCopyPage(t *testing.T) {
	requireHex(t, `00 8f 0060
		0001 0008 07 83 01 00 84 02 00 03
		0004 001c 00000000 0008 0040 00000800 00000000 000000000000000000000000
		0008 0004 02 02 e4 00
		000c 0004 0002 ffff
		8001 0020 00000010 00000010 01fffe00 09 00 000000000000000000000000000000000000`,
		newBench(t).good(cdb("12 01 8f 00 ff 00"), nil))
}

func TestCopyStatus(t *testing.T) {
	b := newCopyBench(t)
	b.write(0, pattern(600, 1))
	status := func(id byte) string {
		r := b.run(receiveCopy(saCopyStatus, id), nil)
		if len(r.data) != 12 {
			return r.outcome()
		}
		return fmt.Sprintf("%x", r.data)
	}
	list := func(id, usage byte, segments ...string) []byte {
		return copyParameters(id, usage, both, segments...)
	}
	fine := []string{block(0, 1, 600, 0, 0), block(1, 0, 1, 0, 700)}

	require.Equal(t, "5/24/00", status(1), "no such copy")
	require.Equal(t, "GOOD", b.copy(list(1, listIDHold, fine...)).outcome())
	require.Equal(t, "GOOD", b.copy(list(2, listIDDiscard, fine...)).outcome())
	require.Equal(t, "GOOD", b.copy(list(0, listIDNone, fine...)).outcome())
	require.Equal(t, "a/08/04",
		b.copy(list(3, listIDHold, fine[0], block(9, 0, 1, 0, 0), fine[1])).outcome())
	require.Equal(t, "GOOD", b.copy(list(4, listIDHold)).outcome())
	require.Equal(t, "00000008"+"01"+"0002"+"00"+fmt.Sprintf("%08x", 601*BlockSize), status(1))
	require.Equal(t, "5/24/00", status(1), "it is told once")
	require.Equal(t, "00000008"+"01"+"0002"+"00"+fmt.Sprintf("%08x", 601*BlockSize), status(2))
	require.Equal(t, "5/24/00", status(0), "it had no identifier")
	require.Equal(t, "00000008"+"02"+"0002"+"00"+fmt.Sprintf("%08x", 600*BlockSize), status(3))
	require.Equal(t, "5/24/00", status(3))
	require.Equal(t, "00000008"+"01"+"0000"+"00"+"00000000", status(4))

	require.Equal(t, "GOOD", b.copy(list(6, listIDHold)).outcome())
	b.nexus.copies[0].bytes.Store(64 * maxSegmentBlocks << 12)
	require.Equal(t, "00000008"+"01"+"0000"+"01"+"00ffff00", status(6), "in KiB")

	require.Empty(t, b.nexus.copies, "nothing is left to tell")

	// Another copy with the identifier takes the place of one that has ended.
	require.Equal(t, "a/08/04", b.copy(list(5, listIDHold, block(9, 0, 1, 0, 0))).outcome())
	require.Equal(t, "GOOD", b.copy(list(5, listIDHold)).outcome())
	require.Equal(t, "00000008"+"01"+"0000"+"00"+"00000000", status(5))

	// Identifiers belong to a nexus and a unit, and end with a reset.
	require.Equal(t, "GOOD", b.copy(list(6, listIDHold)).outcome())
	require.Equal(t, "5/24/00", b.runAs(b.nexus, lun2, receiveCopy(saCopyStatus, 6), nil).outcome())
	require.Equal(t, "5/24/00", b.runAs(b.attach("iqn.b", 0), lun1, receiveCopy(saCopyStatus, 6),
		nil).outcome())
	b.d.ResetLUN(lun2)
	require.NotNil(t, b.nexus.copyLocked(b.d.nth(0), 6))
	b.d.ResetLUN(lun1)
	require.Equal(t, "6/29/03", status(6))
	require.Equal(t, "5/24/00", status(6))
}

// TestCopyResultsAreBounded begins copies with every list identifier and asks for none.
func TestCopyResultsAreBounded(t *testing.T) {
	b := newCopyBench(t)
	for id := range 256 {
		require.Equal(t, "GOOD", b.copy(copyParameters(byte(id), 0, nil)).outcome())
	}
	require.Len(t, b.nexus.copies, maxCopiesTold)
	require.Equal(t, "5/24/00", b.run(receiveCopy(saCopyStatus, 255-maxCopiesTold), nil).outcome())
	require.Equal(t, "GOOD", b.run(receiveCopy(saCopyStatus, 255), nil).outcome())
}

// pausedCopy begins a copy of two segments that stops in the write of its second step; resume lets
// it go on and returns its outcome.
func (b *copyBench) pausedCopy(n *Nexus, list []byte) (task *Task, resume func() result) {
	entered, release := make(chan struct{}), make(chan struct{})
	var calls atomic.Int32
	b.other.enter = func(method string) {
		if method != "write" {
			return
		}
		if calls.Add(1) == 2 {
			close(entered)
			<-release
		}
	}
	task = b.prepared(n, extendedCopy(list), nil)
	done := make(chan result, 1)
	go func() {
		status, sense := b.d.Outcome(task, task.Out(0, list), nil)
		done <- result{status: status, sense: sense}
	}()
	<-entered
	return task, func() result {
		close(release)
		return <-done
	}
}

func TestCopyUnderWay(t *testing.T) {
	long := func(id byte) []byte {
		return copyParameters(id, 0, both, block(0, 1, 1500, 0, 0), block(0, 1, 8, 0, 2000))
	}
	begin := func(t *testing.T) (*copyBench, *Task, func() result) {
		b := newCopyBench(t)
		b.write(0, pattern(1500, 1))
		task, resume := b.pausedCopy(b.nexus, long(9))
		return b, task, resume
	}
	t.Run("its status, and its identifier is taken", func(t *testing.T) {
		b, _, resume := begin(t)
		requireHex(t, "00000008 00 0001 00 00040000", b.good(receiveCopy(saCopyStatus, 9), nil))
		requireHex(t, "00000008 00 0001 00 00040000", b.good(receiveCopy(saCopyStatus, 9), nil))
		require.Equal(t, "5/00/16", b.copy(copyParameters(9, 0, nil)).outcome())
		require.Equal(t, "GOOD", b.copy(copyParameters(8, 0, nil)).outcome())
		require.Equal(t, "GOOD", b.runAs(b.nexus, lun2, extendedCopy(nil), nil).outcome())
		require.Equal(t, "GOOD", resume().outcome())
		requireHex(t, "00000008 01 0002 00 000bc800", b.good(receiveCopy(saCopyStatus, 9), nil))
	})
	t.Run("an abort stops it between steps", func(t *testing.T) {
		b, task, resume := begin(t)
		task.Abort()
		require.Equal(t, "GOOD", b.copy(copyParameters(9, 0, nil)).outcome(),
			"its identifier is free")
		resume()
		require.Equal(t, pattern(1500, 1)[:1024*BlockSize], b.read2(0, 1024),
			"the step that was under way")
		require.Equal(t, make([]byte, 476*BlockSize), b.read2(1024, 476), "and no other")
		require.Zero(t, b.d.copying)
		requireHex(t, "00000008 01 0000 00 00000000", b.good(receiveCopy(saCopyStatus, 9), nil))
	})
	t.Run("a write of the same blocks waits for the step only", func(t *testing.T) {
		b, task, resume := begin(t)
		task.Abort()
		newer := pattern(8, 77)
		written := make(chan result)
		go func() { written <- b.runAs(b.nexus, lun2, cdb("2a 00 000002f8 00 0008 00"), newer) }()
		require.Equal(t, "GOOD",
			b.runAs(b.nexus, lun2, cdb("2a 00 00000410 00 0008 00"), newer).outcome(),
			"other blocks of the segment do not")
		resume()
		require.Equal(t, "GOOD", (<-written).outcome())
		require.Equal(t, newer, b.read2(0x2f8, 8))
		require.Equal(t, newer, b.read2(0x410, 8),
			"the copy has not overwritten what came after its abort")
	})
	for _, c := range []struct {
		name string
		stop func(b *copyBench)
	}{
		{"a reset of the destination stops it",
			func(b *copyBench) { b.d.ResetLUN(lun2) }},
		{"a reservation stops it", reservesTwo},
		{"write protection stops it", func(b *copyBench) {
			require.Equal(b.t, "GOOD",
				b.runAs(b.nexus, lun2, cdb("15 10 00 00 10 00"),
					unhex("00000000 0a 0a 00 10 0800 0000 0000 0000")).outcome())
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b, _, resume := begin(t)
			c.stop(b)
			r := resume()
			require.Equal(t, "a/0d/01", r.outcome())
			require.EqualValues(t, 1500-1024, binary.BigEndian.Uint32(r.sense[3:]), "residual")
		})
	}
	t.Run("a reset of another unit does not", func(t *testing.T) {
		b := newCopyBench(t)
		b.write2(3000, pattern(1500, 1))
		_, resume := b.pausedCopy(b.nexus, copyParameters(9, 0, both, block(1, 1, 1500, 3000, 0)))
		b.d.ResetLUN(lun1)
		require.Equal(t, "GOOD", resume().outcome())
	})
	t.Run("there may be so many at once", func(t *testing.T) {
		b, _, resume := begin(t)
		b.d.mu.Lock()
		b.d.copying += maxCopies - 1
		b.d.mu.Unlock()
		require.Equal(t, "BUSY", b.copy(copyParameters(0, 3, nil)).outcome())
		require.Equal(t, "GOOD", resume().outcome())
		require.Equal(t, "GOOD", b.copy(copyParameters(0, 3, nil)).outcome())
	})
	t.Run("a disk that panics leaves no copy behind", func(t *testing.T) {
		b := newCopyBench(t)
		b.other.enter = func(string) { panic("a bug") }
		require.Panics(t, func() { b.copy(copyParameters(1, 0, both, block(1, 1, 1, 0, 1))) })
		require.Zero(t, b.d.copying)
		require.Empty(t, b.nexus.copies)
		b.other.enter = nil
		require.Equal(t, "GOOD", b.copy(copyParameters(1, 0, both, block(1, 1, 1, 0, 1))).outcome())
	})
}

// The CSCD descriptors of the logical units of the tests, and of one that is not there.
const (
	ownNAA     = "e4 00 0000 01 03 00 08 3011223344556677 000000000000000000000000 00 000200"
	otherNAA   = "e4 00 0000 01 03 00 08 3011223344556688 000000000000000000000000 00 000200"
	unknownNAA = "e4 00 0000 01 03 00 08 3011223344556699 000000000000000000000000 00 000200"
)

// block is a block device to block device segment descriptor.
func block(source, dest uint16, blocks uint16, from, to uint64) string {
	return fmt.Sprintf("02 00 0018 %04x %04x 0000 %04x %016x %016x", source, dest, blocks, from, to)
}

// copyParameters is a parameter list of EXTENDED COPY.
func copyParameters(id, usage byte, targets []string, segments ...string) []byte {
	t, s := unhex(strings.Join(targets, "")), unhex(strings.Join(segments, ""))
	b := make([]byte, copyHeaderLen)
	b[0], b[1] = id, usage<<3
	binary.BigEndian.PutUint16(b[2:], uint16(len(t)))
	binary.BigEndian.PutUint32(b[8:], uint32(len(s)))
	return append(append(b, t...), s...)
}

// extendedCopy is the CDB for a parameter list.
func extendedCopy(list []byte) []byte {
	b := make([]byte, 16)
	b[0] = opExtendedCopy
	binary.BigEndian.PutUint32(b[10:], uint32(len(list)))
	return b
}

func repeat(s string, n int) []string {
	list := make([]string, n)
	for i := range list {
		list[i] = s
	}
	return list
}

// TestCopyListRefused sends parameter lists that are refused before anything is copied: no sense
// key COPY ABORTED, and no residual.
func TestCopyListRefused(t *testing.T) {
	change := func(at int, value byte) []byte {
		p := copyParameters(1, 0, []string{ownNAA}, block(0, 0, 8, 0, 100))
		p[at] = value
		return p
	}
	whole := change(0, 1)
	one := block(0, 0, 8, 0, 100)
	for _, c := range []struct {
		name, want, sks string
		list            []byte
	}{
		{"shorter than a header", "5/1a/00", "000000", whole[:15]},
		{"ends within a CSCD descriptor", "5/1a/00", "000000", whole[:16+31]},
		{"ends within a segment descriptor", "5/1a/00", "000000", whole[:len(whole)-1]},
		{"descriptors are too long together", "5/1a/00", "000000",
			copyParameters(1, 0, repeat(ownNAA, 9), repeat(one, 64)...)},
		{"length of segment descriptors is huge", "5/1a/00", "000000", change(8, 0xff)},
		{"inline data", "5/26/0b", "8f000c", change(15, 1)},
		{"reserved bit of the header", "5/26/00", "8f0001", change(1, 0x80)},
		{"reserved LIST ID USAGE", "5/26/00", "8c0001", change(1, 0x08)},
		{"list identifier that is not to be used", "5/26/00", "8f0000", change(1, 0x18)},
		{"too many CSCD descriptors", "5/26/06", "8f0002",
			copyParameters(1, 0, repeat(ownNAA, 9), one)},
		{"too many segment descriptors", "5/26/08", "8f0008",
			copyParameters(1, 0, []string{ownNAA}, repeat(one, 65)...)},
		{"no whole number of CSCD descriptors", "5/26/00", "8f0002",
			copyParameters(1, 0, []string{ownNAA, "e4"}, one)},
		{"no whole number of segment descriptors", "5/26/00", "8f0008",
			copyParameters(1, 0, []string{ownNAA}, one, "02")},
		{"type of CSCD descriptor", "5/26/07", "8f0010", change(16, 0xe0)},
		{"type of the second CSCD descriptor", "5/26/07", "8f0030",
			copyParameters(1, 0, []string{ownNAA, "ff" + ownNAA[2:]}, one)},
		{"type of segment descriptor", "5/26/09", "8f0030", change(48, 0x03)},
		{"type of segment descriptor in place of a CSCD descriptor", "5/26/07", "8f0010",
			change(16, 0x02)},
		{"length of segment descriptor", "5/26/00", "8f0032", change(51, 0x14)},
		{"reserved bit of a segment descriptor", "5/26/00", "8c0031", change(49, 0x10)},
		{"association with a port", "5/26/00", "8d0015", change(21, 0x13)},
		{"designator beyond its field", "5/26/00", "8f0017", change(23, 21)},
		{"block length", "5/26/00", "8f002d", change(46, 0x10)},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newCopyBench(t)
			b.write(0, pattern(8, 1))
			r := drive(b.d, b.nexus, lun1, extendedCopy(c.list), c.list, 1<<20)
			require.Equal(t, c.want, r.outcome())
			requireHex(t, c.sks, r.sense[15:18])
			requireHex(t, "00000000", r.sense[8:12])
			require.Zero(t, r.sense[0]&0x80)
			require.Equal(t, make([]byte, 8*BlockSize), b.read(100, 8))
			require.Equal(t, "5/24/00", b.run(receiveCopy(saCopyStatus, 1), nil).outcome(),
				"no copy has begun")
		})
	}
}

func TestCopyListAccepted(t *testing.T) {
	list := func(at int, value byte) []byte {
		p := copyParameters(1, 0, []string{ownNAA}, block(0, 0, 8, 0, 100))
		p[at] = value
		return p
	}
	for _, c := range []struct {
		name   string
		list   []byte
		copies bool
	}{
		{"no descriptors", copyParameters(1, 0, nil), false},
		{"no parameter list", nil, false},
		{"CSCD descriptors only", copyParameters(1, 0, []string{ownNAA, unknownNAA}), false},
		{"no blocks", copyParameters(1, 0, []string{ownNAA}, block(0, 0, 0, 0, 100)), false},
		{"as many descriptors as there may be",
			copyParameters(1, 0, append(repeat(unknownNAA, 7), ownNAA),
				repeat(block(7, 7, 8, 0, 100), 64)...), true},
		{"STR and priority", list(1, 0x27), true},
		{"LIST ID USAGE: discard", list(1, 0x10), true},
		{"LIST ID USAGE: none", copyParameters(0, 3, []string{ownNAA}, block(0, 0, 8, 0, 100)),
			true},
		{"LU ID TYPE has no meaning in this descriptor", list(17, 0xc0), true},
		{"relative initiator port", list(19, 7), true},
		{"DC and CAT", list(49, 3), true},
		{"unit that the command was sent to",
			copyParameters(1, 0, nil, block(0xffff, 0xffff, 8, 0, 100)), true},
		{"more bytes than descriptors", append(list(0, 1), 1, 2, 3), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newCopyBench(t)
			want := pattern(8, 1)
			b.write(0, want)
			b.good(extendedCopy(c.list), c.list)
			if !c.copies {
				want = make([]byte, len(want))
			}
			require.Equal(t, want, b.read(100, 8))
		})
	}
}

func FuzzCopyList(f *testing.F) {
	f.Add(copyParameters(1, 0, []string{ownNAA, otherNAA}, block(0, 1, 8, 0, 100),
		block(0xffff, 0, 65535, 1, 1<<40)))
	f.Add(copyParameters(0, 3, repeat(ownNAA, 8), repeat(block(0, 0, 1, 0, 1), 64)...))
	f.Add(copyParameters(9, 2, repeat(ownNAA, 9), repeat(block(0, 0, 1, 0, 1), 65)...))
	f.Fuzz(func(t *testing.T, p []byte) {
		if len(p) < copyHeaderLen {
			return
		}
		list, err := parseCopyList(p)
		if err != nil {
			var sense *senseError
			require.ErrorAs(t, err, &sense)
			require.Equal(t, IllegalRequest, sense.key)
			return
		}
		require.LessOrEqual(t, len(list.targets), maxCopyTargets)
		require.LessOrEqual(t, len(list.segments), maxCopySegments)
		require.Equal(t, int(binary.BigEndian.Uint16(p[2:])), copyTargetLen*len(list.targets))
		require.Equal(t, int(binary.BigEndian.Uint32(p[8:])), copySegmentLen*len(list.segments))
		// Encoding the parsed list gives the same list.
		targets, segments := make([]string, len(list.targets)), make([]string, len(list.segments))
		for i, target := range list.targets {
			at := copyHeaderLen + copyTargetLen*i
			targets[i] = fmt.Sprintf("%x", p[at:at+copyTargetLen])
			require.Equal(t, target.isNAA,
				target.naa != [8]byte{} || p[at+7] == 8 && p[at+4]&0xf == 1 && p[at+5]&0xf == 3)
		}
		for i, s := range list.segments {
			segments[i] = block(s.source, s.dest, uint16(s.blocks), s.from, s.to)
		}
		usage := p[1] >> 3 & 3
		again, err := parseCopyList(copyParameters(list.id, usage, targets, segments...))
		require.NoError(t, err)
		require.Equal(t, list, again)
	})
}
