package scsi

import (
	"encoding/binary"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestStuckWriteIsNotOvertaken holds a write in the disk, as if it had been aborted. Later writes
// of its blocks come after it, in order, and other blocks are not delayed.
func TestStuckWriteIsNotOvertaken(t *testing.T) {
	for _, later := range []struct {
		name, cdb string
		data      []byte
		want      []byte
	}{
		{"WRITE", "2a 00 00 00 00 00 00 00 01 00", pattern(1, 50), pattern(1, 50)},
		{"WRITE SAME", "41 00 00 00 00 00 00 00 08 00", pattern(1, 60), pattern(1, 60)},
		{"WRITE SAME of zeros", "93 01 00 00 00 00 00 00 00 00 00 00 00 08 00 00", nil,
			make([]byte, BlockSize)},
		{"UNMAP", "42 00 00 00 00 00 00 00 28 00", unmapList(64, 8, 0, 8), make([]byte, BlockSize)},
		{"COMPARE AND WRITE", "89 00 00 00 00 00 00 00 00 00 00 00 00 01 00 00",
			append(pattern(1, 7), pattern(1, 70)...), pattern(1, 70)},
	} {
		t.Run(later.name, func(t *testing.T) {
			b := newBench(t)
			other := b.attach("iqn.b", 0)
			arrived, goOn := b.hang("write")
			var wg sync.WaitGroup
			wg.Go(func() { b.run(cdb(writeOne), pattern(1, 7)) })
			<-arrived
			wg.Go(func() {
				r := b.runAs(other, lun1, cdb(later.cdb), later.data)
				if r.outcome() != "GOOD" {
					t.Errorf("later command: %s", r.outcome())
				}
			})
			b.waitsForRange(1)
			require.Zero(t, b.disk.count("zero")+b.disk.count("discard"))
			b.disk.mu.Lock()
			require.Empty(t, b.disk.written)
			b.disk.mu.Unlock()
			if later.name != "COMPARE AND WRITE" {
				b.read(0, 1) // a read waits for no write
			}
			close(goOn)
			wg.Wait()
			require.Equal(t, later.want, b.read(0, 1))
			require.Zero(t, b.d.nth(0).Ranges.State())
		})
	}
}

func TestWritesOfOtherBlocksDoNotWait(t *testing.T) {
	b := newBench(t)
	arrived, goOn := b.hang("write")
	var wg sync.WaitGroup
	wg.Go(func() { b.run(cdb(writeOne), pattern(1, 7)) })
	<-arrived
	wg.Go(func() { b.run(cdb("2a 00 00 00 00 01 00 00 01 00"), pattern(1, 8)) })
	<-arrived // both are in the disk
	close(goOn)
	wg.Wait()
}

// TestWaitingWritesKeepTheirOrder lets two writes wait for a third: the one that came first must
// also land first.
func TestWaitingWritesKeepTheirOrder(t *testing.T) {
	b := newBench(t)
	arrived, goOn := b.hang("write")
	var wg sync.WaitGroup
	for i := range 5 {
		wg.Go(func() { b.run(cdb(writeOne), pattern(1, byte(i))) })
		if i == 0 {
			<-arrived
		} else {
			b.waitsForRange(i)
		}
	}
	close(goOn)
	wg.Wait()
	require.Equal(t, pattern(1, 4), b.read(0, 1))
}

func TestReadsWaitForCompareAndWrite(t *testing.T) {
	b := newBench(t)
	b.write(0, pattern(1, 1))
	arrived, goOn := b.hang("write")
	var wg sync.WaitGroup
	wg.Go(func() {
		b.run(cdb("89 00 00 00 00 00 00 00 00 00 00 00 00 01 00 00"),
			append(pattern(1, 1), pattern(1, 2)...))
	})
	<-arrived
	b.read(8, 1) // other blocks
	var got []byte
	wg.Go(func() { got = b.run(cdb(readOne), nil).data })
	b.waitsForRange(1)
	close(goOn)
	wg.Wait()
	require.Equal(t, pattern(1, 2), got)
}

// TestCompareAndWriteWaitsForReads checks that a read which began earlier does not see half of the
// change.
func TestCompareAndWriteWaitsForReads(t *testing.T) {
	b := newBench(t)
	arrived, goOn := b.hang("read")
	var wg sync.WaitGroup
	var got []byte
	wg.Go(func() { got = b.run(cdb(readOne), nil).data })
	<-arrived
	wg.Go(func() {
		b.run(cdb("89 00 00 00 00 00 00 00 00 00 00 00 00 01 00 00"),
			append(make([]byte, BlockSize), pattern(1, 2)...))
	})
	b.waitsForRange(1)
	close(goOn)
	wg.Wait()
	require.Equal(t, make([]byte, BlockSize), got)
	require.Equal(t, pattern(1, 2), b.read(0, 1))
}

// TestCompareAndWriteIsAtomic counts with COMPARE AND WRITE from several sessions at once, among
// reads and writes of neighbouring blocks: no increment may be lost and no read may see halves of
// two.
func TestCompareAndWriteIsAtomic(t *testing.T) {
	const workers, rounds, blocks = 4, 100, 2
	b := newBench(t)
	counter := func(n uint64) []byte {
		p := make([]byte, blocks*BlockSize)
		for i := 0; i < len(p); i += 8 {
			binary.BigEndian.PutUint64(p[i:], n)
		}
		return p
	}
	value := func(p []byte) uint64 {
		n := binary.BigEndian.Uint64(p)
		for i := 0; i < len(p); i += 8 {
			if binary.BigEndian.Uint64(p[i:]) != n {
				t.Error("a read saw halves of two writes")
			}
		}
		return n
	}
	readBoth := cdb("28 00 00 00 00 10 00 00 02 00")
	var wg sync.WaitGroup
	for w := range workers {
		n := b.attach("iqn.w", byte(w))
		wg.Go(func() {
			for done := 0; done < rounds; {
				r := b.runAs(n, lun1, readBoth, nil)
				old := value(r.data)
				r = b.runAs(n, lun1, cdb("89 00 00 00 00 00 00 00 00 10 00 00 00 02 00 00"),
					append(counter(old), counter(old+1)...))
				switch r.outcome() {
				case "GOOD":
					done++
				case "e/1d/00":
				default:
					t.Error(r.outcome())
					return
				}
			}
		})
		wg.Go(func() {
			for range rounds {
				b.runAs(n, lun1, cdb("2a 00 00 00 00 12 00 00 04 00"), pattern(4, byte(w)))
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, workers*rounds, value(b.read(16, blocks)))
	require.Zero(t, b.d.nth(0).Ranges.State())
}

// TestManyNexuses attaches, works, resets and detaches from many goroutines at once, for the race
// detector.
func TestManyNexuses(t *testing.T) {
	b := newBench(t, exclusive)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for range 50 {
				n := b.d.Attach(InitiatorPort{Name: "iqn." + string(rune('a'+w%3)),
					ISID: [6]byte{byte(w)}})
				for _, c := range []string{testReady, writeOne, readOne, "1a 00 3f 00 ff 00",
					"89 00 00 00 00 00 00 00 00 00 00 00 00 01 00 00"} {
					r := b.runAs(n, lun1, cdb(c), pattern(2, 1))
					if code := r.code(); len(code) > 0 && code[0] == '4' {
						t.Error(c, code)
					}
				}
				b.d.TasksCleared(lun1, nil, []*Nexus{n})
				if w == 0 {
					b.d.ResetTarget()
				}
				b.d.Detach(n)
			}
		})
	}
	wg.Wait()
	b.d.mu.Lock()
	defer b.d.mu.Unlock()
	require.Len(t, b.d.nexuses, 1)
}
