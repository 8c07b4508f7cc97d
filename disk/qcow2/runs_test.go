package qcow2

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// tablesOf makes an image with clusters of 512 bytes and that many L2 tables of 64 entries, some of
// which are missing.
func tablesOf(r *rand.Rand, tables int) *image {
	const bits, cs, entries = 9, 1 << 9, 64
	clusters := tables * entries
	im := newImage(bits, uint64(clusters*cs-r.IntN(cs/512)*512), tables+2*clusters)
	next := atL2 + tables
	for i := range tables {
		if r.IntN(4) == 0 {
			im.put64(atL1*cs+8*i, 0)
			continue
		}
		im.put64(atL1*cs+8*i, uint64(atL2+i)*cs|entryCopied)
		for at := 0; at < entries; {
			kind := r.IntN(5)
			for n := 1 + r.IntN(1+r.IntN(200)); n > 0 && at < entries; n, at = n-1, at+1 {
				var e uint64
				switch kind {
				case 1:
					e = entryZero
				case 2:
					e = uint64(next)*cs | entryZero // zeros that keep their place in the file
				case 3:
					e = entryCompressed | uint64(next)*cs
				case 4:
					e = uint64(next)*cs | entryCopied
				}
				if r.IntN(20) == 0 {
					next++
				}
				if kind > 1 {
					next++
				}
				im.put64(im.l2(i*entries+at), e)
			}
		}
	}
	return im
}

// TestRuns compares what is noted of an image's runs with what its tables say.
func TestRuns(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 11))
	compare := func(im *Image, noted bool) {
		require.Equal(t, noted, im.runs != nil)
		fromTables := func(off int64) (int64, Kind, error) {
			runs := im.runs
			defer func() { im.runs = runs }()
			im.runs = nil
			return im.Extent(bg, off, im.Size()-off)
		}
		for off := int64(0); off < im.Size(); {
			n, kind, err := im.Extent(bg, off, im.Size()-off)
			m, of, tablesErr := fromTables(off)
			from, length := off+r.Int64N(n), int64(1)
			length += r.Int64N(im.Size() - from)
			cut, cutKind, cutErr := im.Extent(bg, from, length)
			// Not by require, which would take most of the test's time here.
			if err := errors.Join(err, tablesErr, cutErr); err != nil {
				t.Fatalf("at %d: %v", off, err)
			}
			if n != m || kind != of || cutKind != of || cut != min(length, off+n-from) {
				t.Fatalf("at %d: %d %v, %d %v of %d at %d; the tables say %d %v", off, n, kind,
					cut, cutKind, length, from, m, of)
			}
			off += n
		}
	}
	for range 100 {
		im, err := tablesOf(r, 1+r.IntN(40)).open()
		require.NoError(t, err)
		compare(im, true)
	}
	// Too many to be noted: the tables tell.
	const bits, clusters = 13, maxRuns + 1
	many := newImage(bits, clusters<<bits, clusters*8>>bits+clusters/2)
	for i := range clusters*8>>bits + 1 {
		many.put64(atL1<<bits+8*i, uint64(atL2+i)<<bits|entryCopied)
	}
	for i := 0; i < clusters; i += 2 {
		many.put64(many.l2(i), entryZero)
	}
	im, err := many.open()
	require.NoError(t, err)
	compare(im, false)
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
	opened, err := build().open()
	require.NoError(t, err)
	require.EqualValues(t, n*cs, opened.Info().PlainSize)
	require.Len(t, opened.runs, 2)

	im := build()
	// the last cluster but one is cut off in the middle, which is allowed
	im.b = im.b[:(atData+n-2)*cs+1]
	im.put64(im.l2(n-1), 0)
	_, err = im.open()
	require.NoError(t, err)
	im.put64(im.l2(n-1), uint64(atData+n-1)*cs|entryCopied)
	_, err = im.open()
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
	_, err = im.open()
	require.ErrorContains(t, err, "reserved bits")
}
