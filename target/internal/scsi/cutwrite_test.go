package scsi

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
)

// cutWrites are the commands that take less data than their CDB asks for: 2000 blocks from LBA 16
// on, or 255.
var cutWrites = []struct {
	name, cdb string
	flushes   int
}{
	{name: "WRITE(6)", cdb: "0a 00 0010 ff 00"},
	{name: "WRITE(10)", cdb: "2a 00 00000010 00 07d0 00"},
	{name: "WRITE(10) with FUA", cdb: "2a 08 00000010 00 07d0 00", flushes: 1},
	{name: "WRITE(12)", cdb: "aa 00 00000010 000007d0 00 00"},
	{name: "WRITE(16)", cdb: "8a 00 0000000000000010 000007d0 00 00"},
	{name: "WRITE AND VERIFY(10)", cdb: "2e 00 00000010 00 07d0 00", flushes: 1},
	{name: "WRITE AND VERIFY(12) that compares", cdb: "ae 02 00000010 000007d0 00 00", flushes: 1},
	{name: "WRITE AND VERIFY(16) that compares", cdb: "8e 02 0000000000000010 000007d0 00 00",
		flushes: 1},
}

// TestWriteThatIsCutShort offers less data than the CDB asks for, as the expected data transfer
// length says. All of it is written, and nothing else changes, be it data or a hole.
func TestWriteThatIsCutShort(t *testing.T) {
	const blocks = 1100
	for _, c := range cutWrites {
		for _, n := range []int{0, 1, 200, 511, 512, 513, 700, 4096, 8192 + 3, 512<<10 + 1} {
			for _, old := range [][]byte{pattern(blocks, 9), make([]byte, blocks*BlockSize)} {
				if c.cdb[:2] == "0a" && n > 255*BlockSize {
					continue
				}
				t.Run(fmt.Sprintf("%s of %d bytes over %d", c.name, n, old[0]), func(t *testing.T) {
					b := newBench(t)
					if old[0] != 0 {
						b.write(16, old)
					}
					b.disk.reset()
					data := pattern(blocks, 3)[:n]
					b.good(cdb(c.cdb), data)
					flushes := c.flushes
					if n == 0 {
						flushes = 0
					}
					require.Equal(t, flushes, b.disk.count("flush"))
					want := bytes.Clone(old)
					copy(want, data)
					require.True(t, bytes.Equal(want, b.read(16, blocks)))
					require.Zero(t, b.d.nth(0).Ranges.State())
				})
			}
		}
	}
}

func TestCutWriteOfAProtectedUnit(t *testing.T) {
	b := newBench(t, readOnly)
	require.Equal(t, "7/27/00", b.run(cdb("2a 00 00000010 00 0002 00"), pattern(1,
		1)[:200]).outcome())
	require.Zero(t, b.disk.count("write"))
}

// blockDisk fails at one block, or stores something else there.
type blockDisk struct {
	thinDisk
	off           int64
	reads, writes error
	flips         bool // a bit of the stored data
}

func (d *blockDisk) hit(off int64, p []byte) bool {
	return off <= d.off && d.off < off+int64(len(p))
}

func (d *blockDisk) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if d.hit(off, p) && d.reads != nil {
		return 0, d.reads
	}
	return d.thinDisk.ReadAt(ctx, p, off)
}

func (d *blockDisk) WriteAt(ctx context.Context, p []byte, off int64) (int, error) {
	if d.hit(off, p) {
		if d.writes != nil {
			return 0, d.writes
		}
		if d.flips {
			p = bytes.Clone(p)
			p[d.off-off] ^= 1
		}
	}
	return d.thinDisk.WriteAt(ctx, p, off)
}

// TestCutBlockThatFails makes reading or writing of the cut block fail. The whole blocks before it
// are on the disk, and the sense data names the block where these are as durable as was asked for:
// see TestBlockOfAFailedWrite.
func TestCutBlockThatFails(t *testing.T) {
	const lba, cut = 16, 18
	read := &disk.MediumError{Op: "read", Off: 17 * BlockSize, Length: 4096,
		Err: errors.New("input/output error")}
	write := &disk.MediumError{Op: "write", Off: cut * BlockSize, Length: BlockSize,
		Err: errors.New("input/output error")}
	for _, c := range []struct {
		name, cdb, want string
		d               blockDisk
	}{
		{"read", "2a 00 00000010 00 0008 00", "f0 00 03 00000012 0a 00000000 1100 00 000000",
			blockDisk{reads: read}},
		{"read with FUA", "2a 08 00000010 00 0008 00",
			"70 00 03 00000000 0a 00000000 1100 00 000000", blockDisk{reads: read}},
		{"write", "2a 00 00000010 00 0008 00", "f0 00 03 00000012 0a 00000000 0c00 00 000000",
			blockDisk{writes: write}},
		{"no space", "2a 00 00000010 00 0008 00", "70 00 07 00000000 0a 00000000 2707 00 000000",
			blockDisk{writes: disk.ErrNoSpace}},
		{"failed", "2a 00 00000010 00 0008 00", "70 00 04 00000000 0a 00000000 4400 00 000000",
			blockDisk{writes: disk.ErrFailed}},
		{"other content, WRITE AND VERIFY", "2e 02 00000010 00 0008 00",
			"f0 00 0e 00000400 0a 00000000 1d00 00 000000", blockDisk{flips: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			broken := &c.d
			broken.off = cut * BlockSize
			b := newBench(t, func(l *LUN) { broken.thinDisk = l.Disk.(thinDisk); l.Disk = broken })
			data := pattern(8, 5)[:(cut-lba)*BlockSize+200]
			requireHex(t, c.want, b.run(cdb(c.cdb), data).sense)
			require.Equal(t, data[:(cut-lba)*BlockSize], b.read(lba, cut-lba))
			require.Zero(t, b.d.nth(0).Ranges.State())
		})
	}
}

// TestCutWriteOnAFullDisk has space for the whole blocks and none for the one that is cut.
func TestCutWriteOnAFullDisk(t *testing.T) {
	b := newBench(t)
	b.disk.content.SetFree(memPage)
	data := pattern(9, 5)[:8*BlockSize+200]
	require.Equal(t, "7/27/07", b.run(cdb("2a 00 00000010 00 0010 00"), data).outcome())
	require.Equal(t, append(bytes.Clone(data[:8*BlockSize]), make([]byte, BlockSize)...), b.read(16,
		9))
}

// TestCutBlockIsHeld lets a COMPARE AND WRITE of the cut block come between reading and writing it:
// it waits, and finds the content after the write. So does another write.
func TestCutBlockIsHeld(t *testing.T) {
	b := newBench(t)
	old := pattern(1, 9)
	b.write(17, old)
	stuck, release := b.hang("read")
	ended := make(chan string, 3)
	data := pattern(2, 5)[:BlockSize+200]
	go func() { ended <- b.run(cdb("2a 00 00000010 00 0008 00"), data).outcome() }()
	select {
	case <-stuck:
	case outcome := <-ended:
		require.Fail(t, "it has not read the block", outcome)
	}
	merged := append(bytes.Clone(data[BlockSize:]), old[200:]...)
	last := pattern(1, 77)
	other := b.attach("iqn.b", 0)
	go func() {
		ended <- b.runAs(other, lun1, cdb("89 00 0000000000000011 000000 01 00 00"),
			append(bytes.Clone(merged), last...)).outcome()
	}()
	b.waitsForRange(1)
	go func() {
		ended <- b.runAs(other, lun1, cdb("2a 00 00000011 00 0001 00"), pattern(1, 33)).outcome()
	}()
	b.waitsForRange(2)
	close(release)
	for range cap(ended) {
		require.Equal(t, "GOOD", <-ended)
	}
	require.Equal(t, pattern(1, 33), b.read(17, 1))
	require.Equal(t, data[:BlockSize], b.read(16, 1))
}

// TestNothingIsLostBesideACutWrite counts in the end of a block by COMPARE AND WRITE while others
// write its beginning.
func TestNothingIsLostBesideACutWrite(t *testing.T) {
	b := newBench(t)
	const adders, adds = 2, 100
	read, swap := cdb("28 00 00000010 00 0001 00"), cdb("89 00 0000000000000010 000000 01 00 00")
	var wg sync.WaitGroup
	done := make(chan struct{})
	for i := range 2 {
		n := b.attach("iqn.w", byte(i))
		wg.Go(func() {
			for seed := byte(0); ; seed++ {
				select {
				case <-done:
					return
				default:
				}
				head := bytes.Repeat([]byte{seed}, 200)
				if r := b.runAs(n, lun1, cdb("2a 00 00000010 00 0002 00"),
					head); r.outcome() != "GOOD" {
					t.Errorf("write: %s", r.outcome())
					return
				}
			}
		})
	}
	var counting sync.WaitGroup
	for i := range adders {
		n := b.attach("iqn.c", byte(i))
		counting.Go(func() {
			for added := 0; added < adds; {
				before := b.runAs(n, lun1, read, nil).data
				after := bytes.Clone(before)
				binary.BigEndian.PutUint32(after[508:], binary.BigEndian.Uint32(after[508:])+1)
				switch outcome := b.runAs(n, lun1, swap, append(before,
					after...)).outcome(); outcome {
				case "GOOD":
					added++
				case "e/1d/00":
				default:
					t.Errorf("COMPARE AND WRITE: %s", outcome)
					return
				}
			}
		})
	}
	counting.Wait()
	close(done)
	wg.Wait()
	require.EqualValues(t, adders*adds, binary.BigEndian.Uint32(b.read(16, 1)[508:]))
}

// forgetfulDisk changes a byte of each write.
type forgetfulDisk struct{ *memDisk }

func (d forgetfulDisk) WriteAt(ctx context.Context, p []byte, off int64) (int, error) {
	p = bytes.Clone(p)
	p[len(p)-3] ^= 1
	return d.memDisk.WriteAt(ctx, p, off)
}

func TestWriteAndVerify(t *testing.T) {
	data := pattern(40, 3)
	for _, c := range []struct {
		name, cdb, want string
		forgetful       bool
		data            []byte
	}{
		{"10", "2e 00 00 00 00 08 00 00 28 00", "GOOD", false, data},
		{"12", "ae 00 00 00 00 08 00 00 00 28 00 00", "GOOD", false, data},
		{"16", "8e 00 00 00 00 00 00 00 00 08 00 00 00 28 00 00", "GOOD", false, data},
		{"10, compare, DPO", "2e 12 00 00 00 08 00 00 28 00", "GOOD", false, data},
		{"10, medium lost something", "2e 00 00 00 00 08 00 00 28 00", "GOOD", true, data},
		{"10, compare, medium lost something", "2e 02 00 00 00 08 00 00 28 00", "e/1d/00", true,
			data},
		{"10, reserved BYTCHK", "2e 04 00 00 00 08 00 00 28 00", "5/24/00", false, nil},
		{"10, repeated block", "2e 06 00 00 00 08 00 00 28 00", "5/24/00", false, nil},
		{"10, protection", "2e 20 00 00 00 08 00 00 28 00", "5/24/00", false, nil},
		{"10, beyond the end", "2e 00 00 00 4e 1f 00 00 02 00", "5/21/00", false, nil},
		{"10, nothing", "2e 00 00 00 00 08 00 00 00 00", "GOOD", false, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, func(l *LUN) {
				if c.forgetful {
					l.Disk = forgetfulDisk{l.Disk.(thinDisk).memDisk}
				}
			})
			r := b.run(cdb(c.cdb), c.data)
			require.Equal(t, c.want, r.outcome())
			switch {
			case c.want == "e/1d/00":
				require.Equal(t, unhex("00001ffd"), r.sense[3:7],
					"third last byte of the first chunk")
			case c.want == "GOOD" && c.data != nil && !c.forgetful:
				require.Equal(t, data, b.read(8, 40))
				require.Equal(t, 1, b.disk.count("flush"))
			}
		})
	}
}

func TestPrefetch(t *testing.T) {
	for _, c := range []struct {
		name, cdb, want string
		reads           int
	}{
		{"10", "34 00 00 00 00 00 00 04 00 00", "GOOD", 2},
		{"10, group", "34 00 00 00 00 00 03 00 01 00", "GOOD", 1},
		{"10, to the end", "34 00 00 00 4e 00 00 00 00 00", "GOOD", 1},
		{"10, immediately", "34 02 00 00 00 00 00 04 00 00", "GOOD", 0},
		{"16", "90 00 00 00 00 00 00 00 00 00 00 00 00 01 00 00", "GOOD", 1},
		{"16, group", "90 00 00 00 00 00 00 00 00 00 00 00 00 01 1f 00", "GOOD", 1},
		{"16, beyond the end", "90 00 00 00 00 00 00 00 4e 1f 00 00 00 02 00 00", "5/21/00", 0},
		{"10, nothing beyond the end", "34 00 00 00 4e 21 00 00 00 00", "5/21/00", 0},
		{"10, reserved bit", "34 01 00 00 00 00 00 00 01 00", "5/24/00", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			require.Equal(t, c.want, b.run(cdb(c.cdb), nil).outcome())
			require.Equal(t, c.reads, b.disk.count("read"))
		})
	}
	big := newBench(t, func(l *LUN) {
		m := newMemDisk(1 << 40)
		l.Disk = m
	})
	big.good(cdb("90 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"), nil)
	require.Equal(t, maxTransfer/scratchSize,
		big.d.nth(0).Disk.(*memDisk).count("read"), "one command does not read a whole disk")
}
