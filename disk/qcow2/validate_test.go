package qcow2

import (
	"bytes"
	"encoding/binary"
	"io"
	"math/rand"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestConflictsBetweenTables has entries of different tables claim the same place of the file.
func TestConflictsBetweenTables(t *testing.T) {
	const (
		bits, cs = 9, 1 << 9
		tables   = 64
		entries  = 64
		first    = atL2 + tables // the first cluster behind the tables
		clusters = tables * entries
	)
	r := rand.New(rand.NewSource(1))
	build := func() *image {
		im := newImage(bits, clusters*cs, tables+clusters)
		for i := range tables {
			im.put64(atL1*cs+8*i, uint64(atL2+i)*cs|entryCopied)
		}
		for i, n := range r.Perm(clusters) { // every other one is compressed
			if i%2 == 0 {
				im.put64(im.l2(i), uint64(first+n)*cs|entryCopied)
			} else {
				// one sector, so that it ends with its cluster
				im.put64(im.l2(i), entryCompressed|uint64(first+n)*cs+uint64(n%cs))
			}
		}
		return im
	}
	opened := build().opened(t)
	require.EqualValues(t, clusters/2*cs, opened.Info().CompressedSize)
	require.EqualValues(t, clusters/2*cs, opened.Info().PlainSize)
	for range 40 {
		im := build()
		a := r.Intn(clusters)
		b := (a + entries + r.Intn(clusters-2*entries)) % clusters // of another table
		copy(im.b[im.l2(a):im.l2(a)+8], im.b[im.l2(b):im.l2(b)+8])
		require.ErrorContains(t, testtool.Err(im.open()), "used by more than one")

		im = build()
		a, b = a|1, b&^1
		host := binary.BigEndian.Uint64(im.b[im.l2(b):]) & offsetMask
		im.put64(im.l2(a), entryCompressed|host+8)
		require.ErrorContains(t, testtool.Err(im.open()), "overlaps another cluster")
	}
}

// listener notes what is announced and what is read, in their order.
type listener struct {
	io.ReaderAt
	mu        sync.Mutex
	announced map[int64]int64 // lengths, by offset
	read      []int64
	early     []int // how many were announced when each was read
	sudden    []int64
}

func (l *listener) willRead(off, length int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.announced[off] = length
}

func (l *listener) ReadAt(p []byte, off int64) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.announced[off] < int64(len(p)) {
		l.sudden = append(l.sudden, off)
	}
	l.read, l.early = append(l.read, off), append(l.early, len(l.announced))
	return l.ReaderAt.ReadAt(p, off)
}

// TestTablesAreAnnounced opens an image of many tables, some of which are missing: storage is told
// of each long before it is read.
func TestTablesAreAnnounced(t *testing.T) {
	for bits, want := range map[int]bool{12: true, 11: false} {
		const tables = 3 * tablesAhead
		cs := 1 << bits
		im := newImage(uint(bits), uint64(tables*cs/8*cs), tables)
		there := map[int64]bool{}
		for i := range tables {
			var e uint64
			if i%7 != 3 {
				e = uint64((atL2+i)*cs) | entryCopied
				there[int64(atL2+i)*int64(cs)] = true
			}
			im.put64(atL1*cs+8*i, e)
		}
		l := &listener{ReaderAt: bytes.NewReader(im.b), announced: map[int64]int64{}}
		_, err := Open(bg, near{l}, int64(len(im.b)), Options{WillRead: l.willRead})
		require.NoError(t, err)
		seen := 0
		for i, off := range l.read {
			if !there[off] {
				continue
			}
			seen++
			require.Equal(t, !want, slices.Contains(l.sudden, off), "%#x", off)
			if want {
				require.GreaterOrEqual(t, l.early[i], min(seen+tablesAhead/2, len(there)))
			}
		}
		require.Equal(t, len(there), seen)
		if want {
			require.Len(t, l.announced, len(there)+1) // and the refcount table
		}
	}
}
