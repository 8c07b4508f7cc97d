package qcow2

import (
	"bytes"
	"math/rand"
	"testing"

	"github.com/stretchr/testify/require"
)

// claim is what an entry of the test says about compressed data.
type claim struct{ off, sectors int64 }

func (c claim) end() int64 { return (c.off>>sectorBits+c.sectors)<<sectorBits - 1 } // the last byte

// usedTwice is the slow form of what checkStarts promises. Two claims conflict if they begin at the
// same offset and both leave the place in which they begin, or neither does. Two of one offset
// also conflict if another claim begins in their place and leaves it.
func usedTwice(claims []claim, place uint) bool {
	large := func(c claim) bool { return c.off>>place != c.end()>>place }
	for i, a := range claims {
		for j, b := range claims {
			if i != j && a.off == b.off && large(a) == large(b) {
				return true
			}
			for k, other := range claims {
				if k != i && k != j && i != j && a.off == b.off && large(a) && large(other) &&
					other.off>>place == a.off>>place {
					return true
				}
			}
		}
	}
	return false
}

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
		place := max(sectorBits, bits-4)
		var claims []claim
		taken := map[int64]bool{}
		for range 2 + r.Intn(40) {
			c := claim{off: from + r.Int63n(room)/grain*grain, sectors: 1 + r.Int63n(2)}
			entry := r.Intn(tables * int(cs) / 8)
			if taken[int64(entry)] {
				continue
			}
			taken[int64(entry)] = true
			claims = append(claims, c)
			im.put64(im.l2(entry), entryCompressed|uint64(c.sectors-1)<<(62-(bits-8))|uint64(c.off))
		}
		want := usedTwice(claims, place)
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

// TestPlacesOfALargeFile checks that the memory for the beginnings of data does not grow with the
// file.
func TestPlacesOfALargeFile(t *testing.T) {
	const size = 1 << 45
	var s starts
	s.init(&header{clusterBits: 16}, size)
	require.LessOrEqual(t, len(s.large.pages)<<setPageBits, maxStarts+1<<setPageBits)
	for _, off := range []int64{0, 5 << s.shift, size - 1} {
		n := off >> s.shift
		c := claims{n >> 6, 1 << (n & 63)}
		require.Zero(t, s.large.word(c.word)&c.mask)
		s.add(c)
		require.Zero(t, s.twice.word(c.word)&c.mask)
		require.False(t, s.again.Load() && off == 0)
		s.add(c)
		require.Equal(t, c.mask, s.twice.word(c.word)&c.mask)
		require.True(t, s.again.Load())
	}
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
				_, err := im.open()
				require.NoError(t, err)
				im.put64(im.l2(i), entry)
				_, err = im.open()
				require.Error(t, err, "entry %d after %#x", i, n)
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
			_, err := im.open()
			require.Error(t, err)
			require.Regexp(t, "among compressed data|overlaps another cluster", err.Error())
			im.put64(im.l2(order[1]), entryCompressed|uint64(n*cs-sectorSize))
			_, err = im.open()
			require.NoError(t, err)
		}
	}
}

// changing returns other content from the second read of its first table on.
type changing struct {
	*bytes.Reader
	table int64
	then  []byte
	times int
}

func (c *changing) ReadAt(p []byte, off int64) (int, error) {
	if off == c.table {
		if c.times++; c.times > 1 {
			return copy(p, c.then), nil
		}
	}
	return c.Reader.ReadAt(p, off)
}

// TestTableThatChangesWhileItIsValidated has data that overlaps, so that the table is read again,
// and finds offsets far beyond the file then.
func TestTableThatChangesWhileItIsValidated(t *testing.T) {
	const bits, cs = 12, 1 << 12
	im := newImage(bits, 64*cs, 4)
	for i, off := range []uint64{atData * cs, atData*cs + 8} {
		im.put64(im.l2(i), entryCompressed|1<<(62-(bits-8))|off)
	}
	r := &changing{Reader: bytes.NewReader(im.b), table: atL2 * cs,
		then: bytes.Repeat([]byte{0x7f}, cs)}
	_, err := Open(bg, near{r}, int64(len(im.b)), Options{})
	require.NoError(t, err)
	require.Equal(t, 2, r.times)
}
