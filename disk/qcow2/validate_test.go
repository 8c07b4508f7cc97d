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

// TestCompressedDataUsedTwice: no two entries may begin at the same place, whatever lengths they
// claim.
func TestCompressedDataUsedTwice(t *testing.T) {
	r := rand.New(rand.NewSource(3))
	found := map[bool]int{}
	for round := range 450 {
		bits := []uint{9, 12, 16}[round%3]
		const tables = 6
		cs := int64(1) << bits
		first := atL2 + tables // the first cluster behind the tables
		dataClusters := 2 + 512>>(bits-9)
		im := newImage(bits, uint64(tables*cs/8*cs), first-atData+dataClusters)
		for i := range tables {
			im.put64(atL1<<bits+8*i, uint64(atL2+i)<<bits|entryCopied)
		}
		from, room := int64(first)*cs, int64(dataClusters-1)*cs
		grain := int64(1) << r.Intn(13) // coarse ones meet more often
		claims := map[int64]int64{}     // the offsets, by their entry
		offsets := map[int64]bool{}
		for range 2 + r.Intn(40) {
			off, sectors := from+r.Int63n(room)/grain*grain, uint64(1+r.Int63n(2))
			entry := r.Intn(tables * int(cs) / 8)
			if claims[int64(entry)] != 0 {
				continue
			}
			claims[int64(entry)], offsets[off] = off, true
			im.put64(im.l2(entry), entryCompressed|(sectors-1)<<(62-(bits-8))|uint64(off))
		}
		want := len(offsets) < len(claims)
		_, err := Open(bg, near{bytes.NewReader(im.b)}, int64(len(im.b)), Options{})
		if want {
			require.ErrorContains(t, err, "is used by more than one cluster", "%d: %v", round,
				claims)
		} else {
			require.NoError(t, err, "%d: %v", round, claims)
		}
		found[want]++
	}
	require.Greater(t, found[true], 60)
	require.Greater(t, found[false], 60)
}

// TestEveryEntryIsLookedAt has one bad entry at a time, far from every other one and beside one of
// each kind.
func TestEveryEntryIsLookedAt(t *testing.T) {
	const bits, cs, entries = 12, 1 << 12, 1 << 9
	neighbours := []uint64{0, entryZero, (atData + 1) * cs, entryCompressed | (atData+2)*cs}
	for _, n := range neighbours {
		for i := range entries {
			// in the header, and with a reserved bit
			for _, entry := range []uint64{cs | 1<<62, 1 << 60} {
				im := newImage(bits, entries*cs, 4)
				if i > 0 {
					im.put64(im.l2(i-1), n)
				}
				require.NoError(t, testtool.Err(im.open()))
				im.put64(im.l2(i), entry)
				require.Error(t, testtool.Err(im.open()), "entry %d after %#x", i, n)
			}
		}
	}
}

// TestCompressedDataReachesIntoData has compressed data that ends in a cluster that is stored, at
// every distance from where words of 64 clusters begin.
func TestCompressedDataReachesIntoData(t *testing.T) {
	const bits, cs = 12, 1 << 12
	for n := int64(60); n < 70; n++ {
		for _, order := range [][2]int{{0, 1}, {1, 0}} {
			im := newImage(bits, 64*cs, 70)
			im.data(order[0], int(n), 1)
			im.put64(im.l2(order[1]), entryCompressed|1<<(62-(bits-8))|uint64(n*cs-sectorSize))
			require.ErrorContains(t, testtool.Err(im.open()), "overlaps another cluster")
			im.put64(im.l2(order[1]), entryCompressed|uint64(n*cs-sectorSize))
			require.NoError(t, testtool.Err(im.open()))
		}
	}
}

// TestNeighbours has clusters that lie one behind the other and run into something that they must
// not touch.
func TestNeighbours(t *testing.T) {
	const bits, cs, n = 9, 1 << 9, 40
	build := func() *image {
		im := newImage(bits, 64*cs, n)
		for i := range n {
			im.put64(im.l2(i), uint64(atData+i)*cs|entryCopied)
		}
		return im
	}
	opened := build().opened(t)
	require.EqualValues(t, n*cs, opened.Info().PlainSize)

	im := build()
	// the last cluster but one is cut off in the middle, which is allowed
	im.b = im.b[:(atData+n-2)*cs+1]
	im.put64(im.l2(n-1), 0)
	require.NoError(t, testtool.Err(im.open()))
	im.put64(im.l2(n-1), uint64(atData+n-1)*cs|entryCopied)
	_, err := im.open()
	require.ErrorContains(t, err, "the cluster of guest offset 19968 lies at 0x5800, past the "+
		"end of the file")

	im = build()
	im.put64(im.l2(50), uint64(atData+n-1)*cs|entryCopied)
	_, err = im.open()
	require.ErrorContains(t, err, "the cluster at 0x5800 is used by more than one guest cluster")

	im = build()
	for i := range n { // they begin in the metadata
		im.put64(im.l2(i), uint64(atL2+i)*cs|entryCopied)
	}
	_, err = im.open()
	require.ErrorContains(t, err, "the cluster of guest offset 0 lies at 0x800, in the image's "+
		"metadata")

	im = build()
	im.put64(im.l2(n-1), (uint64(atData+n-1)*cs|entryCopied)+2) // a reserved bit in the last
	require.ErrorContains(t, testtool.Err(im.open()), "reserved bits")
}
