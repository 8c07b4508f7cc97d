package qcow2

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestLargestVirtualSize lifts the limit. A size that would overflow is refused like any other that
// the L1 table is too short for.
func TestLargestVirtualSize(t *testing.T) {
	for _, bits := range []uint{minClusterBits, 16, maxClusterBits} {
		for _, size := range []uint64{math.MaxInt64, math.MaxInt64 &^ 511} {
			im := newImage(bits, size, 1)
			im.put32(36, 1)
			_, err := Open(bg, near{hugeFile{im.b}}, 1<<38, Options{MaxVirtualSize: math.MaxInt64})
			require.ErrorContains(t, err, "the virtual size needs")
		}
	}
}

// TestTooManyClusters: a limit on the number of clusters bounds the memory of their maps.
func TestTooManyClusters(t *testing.T) {
	im := newImage(9, 8<<9, 1)
	require.NoError(t, testtool.Err(Open(bg, near{hugeFile{im.b}}, maxClusters<<9, Options{})))
	_, err := Open(bg, near{hugeFile{im.b}}, maxClusters<<9+1, Options{})
	require.ErrorContains(t, err, "too many")
}

// TestMetadataOfSeveralClusters puts data into each cluster of an L1 table and of a refcount table,
// and onto a block that the end of the latter names.
func TestMetadataOfSeveralClusters(t *testing.T) {
	const bits, cs = 9, 1 << 9
	const tables, l1Clusters = 2 * cs / 8, 2
	const refTable, refClusters = 3 + l1Clusters, 130 // more than is read of it at once
	const block, first = refTable + refClusters, refTable + refClusters + 1
	size := uint64(tables * cs / 8 * cs)
	build := func() *image {
		im := newImage(bits, size, first)
		im.put32(36, tables)
		im.put64(48, refTable<<bits)
		im.put32(56, refClusters)
		im.put64(block<<bits-8, block<<bits)
		// the L1 table has a second cluster where newImage has the L2 table
		im.put64(atL1<<bits, first<<bits|entryCopied)
		return im
	}
	require.NoError(t, testtool.Err(build().open()))
	// of the latter; the L1 table has more entries than it needs
	for _, size = range []uint64{size, 8 * cs} {
		for _, taken := range []uint64{atL1, atL1 + 1, refTable, refTable + 1,
			refTable + refClusters - 1, block, first} {
			im := build()
			im.put64(first<<bits, taken<<bits|entryCopied)
			_, err := im.open()
			require.ErrorContains(t, err, "in the image's metadata", "cluster %d", taken)
		}
	}
}

// TestExtensionsAndTheirEnd opens valid headers of every length, to the last byte.
func TestExtensionsAndTheirEnd(t *testing.T) {
	const bits, cs = 16, 1 << 16
	extension := func(im *image, at, kind, length int) {
		im.put32(at, uint32(kind))
		im.put32(at+4, uint32(length))
	}
	for name, c := range map[string]struct {
		change       func(im *image)
		file, format string
	}{
		"a name right behind the header": {func(im *image) {
			im.put64(8, headerLenV3)
			im.put32(16, 11)
			// as long as the extension of LUKS
			copy(im.b[headerLenV3:], "\x05\x37\xbe\x77.qcow2x")
		}, "\x05\x37\xbe\x77.qcow2x", ""},
		"a name at the end of the cluster": {func(im *image) {
			im.put64(8, cs-4)
			im.put32(16, 4)
			copy(im.b[cs-4:], "base")
		}, "base", ""},
		"a longest name": {func(im *image) {
			im.put64(8, 512)
			im.put32(16, maxNameLen)
			copy(im.b[512:], bytes.Repeat([]byte("n"), maxNameLen))
		}, string(bytes.Repeat([]byte("n"), maxNameLen)), ""},
		"an extension that ends where the name begins, without padding": {func(im *image) {
			extension(im, headerLenV3, extBackingFormat, 3)
			copy(im.b[headerLenV3+8:], "rawbase")
			im.put64(8, headerLenV3+11)
			im.put32(16, 4)
		}, "base", "raw"},
		"an extension to the end of the cluster": {func(im *image) {
			extension(im, headerLenV3, 0x12345678, cs-headerLenV3-8)
		}, "", ""},
		"behind the end of the extensions": {func(im *image) {
			extension(im, headerLenV3+8, extLUKS, 8)
		}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			im := newImage(bits, 8*cs, 1)
			c.change(im)
			got := im.opened(t)
			require.Equal(t, c.file, got.Info().BackingFile)
			require.Equal(t, c.format, got.Info().BackingFormat)
		})
	}
	im := newImage(bits, 8*cs, 1)
	extension(im, headerLenV3, extBackingFormat, 65)
	require.ErrorContains(t, testtool.Err(im.open()), "backing format name has 65 bytes")
}

func TestInfo(t *testing.T) {
	im := newImage(16, 8<<16, 1)
	im.put32(60, 3) // snapshots, which are not counted
	im.put64(64, atData<<16)
	im.put64(80, 1) // lazy refcounts
	im.data(0, atData, 1)
	got := im.opened(t)
	require.Equal(t, Info{Version: 3, ClusterSize: 1 << 16, VirtualSize: 8 << 16,
		PlainSize: 1 << 16}, got.Info())
}

// TestSubclusters has a whole cluster of them, and one that the end of the disk cuts inside the
// second of its last three stored subclusters.
func TestSubclusters(t *testing.T) {
	const bits, cs, sub = 16, 1 << 16, 1 << 16 / 32
	const size = 2*cs + 6*sub + 512
	im := newImage(bits, size, 3)
	im.put64(72, incompatExtendedL2)
	im.data(0, atData, 1) // a plain entry, of which the next one is the bits
	im.data(2, atData+1, 2)
	im.put64(im.l2(4), (atData+2)<<bits|entryCopied)
	copy(im.cluster(atData+2), bytes.Repeat([]byte{3}, cs))
	im.put64(im.l2(1), 1<<31|1<<4|1<<3|1<<(32+5))
	im.put64(im.l2(3), 1<<32-1)
	im.put64(im.l2(5), 1<<5|1<<6|1<<7|1<<(32+4))
	want := make([]byte, size)
	for _, i := range []int{3, 4, 31} {
		copy(want[i*sub:], bytes.Repeat([]byte{1}, sub))
	}
	copy(want[cs:], bytes.Repeat([]byte{2}, cs))
	copy(want[2*cs+5*sub:], bytes.Repeat([]byte{3}, sub+512))
	got := im.opensAs(t, want)
	require.EqualValues(t, 3*sub+cs+sub+512, got.Info().PlainSize)
	for off, c := range map[int64]struct {
		n    int64
		kind Kind
	}{0: {3 * sub, KindUnallocated}, 3*sub + 10: {2*sub - 10, KindData}, 5 * sub: {sub, KindZero},
		31 * sub:     {cs + sub, KindData},
		2*cs + 4*sub: {sub, KindZero}, 2*cs + 5*sub: {sub + 512, KindData}} {
		n, kind := testtool.Must2(got.Extent(bg, off, size-off))(t)
		require.Equal(t, c.kind, kind, off)
		require.Equal(t, c.n, n, off)
	}
}

// TestReadsLeaveNothingOfTheBuffer reads everything that the file does not have into a buffer with
// other content. None of that content may remain.
func TestReadsLeaveNothingOfTheBuffer(t *testing.T) {
	const bits, cs = 16, 1 << 16
	im := newImage(bits, 8*cs, 1)
	im.data(0, atData, 7)
	im.put64(im.l2(1), entryZero)
	im.put64(im.l2(4), entryCopied)    // of no place, which is not that of the header
	im.put64(im.l2(8), math.MaxUint64) // behind the end, which is never read
	im.b = im.b[:atData*cs+1000]
	for _, backing := range []int{0, 2*cs + 1000} {
		got := im.opened(t)
		want := make([]byte, 8*cs)
		copy(want, bytes.Repeat([]byte{7}, 1000))
		if backing > 0 {
			got.SetBacking(near{bytes.NewReader(bytes.Repeat([]byte{9}, backing))}, int64(backing))
			copy(want[2*cs:], bytes.Repeat([]byte{9}, 1000))
		}
		// also where the backing file has nothing at all
		for _, off := range []int{0, 2*cs + 999, 2*cs + 1000, 4 * cs} {
			p := bytes.Repeat([]byte{0xa5}, 8*cs-off)
			require.NoError(t, testtool.Err(got.ReadAt(bg, p, int64(off))))
			require.True(t, bytes.Equal(want[off:], p), off)
		}
	}
}

// TestRestOfTheLastTable has garbage behind the entries that the virtual size needs, in the second
// of two tables, like a disk that was made smaller. The garbage is not looked at.
func TestRestOfTheLastTable(t *testing.T) {
	const bits, cs, entries = 9, 1 << 9, 1 << 9 / 8
	im := newImage(bits, (entries+3)*cs+512, 3)
	im.put64(atL1*cs+8, (atL2+1)*cs|entryCopied)
	im.data(entries+2, atData+1, 7)
	for i := entries + 4; i < 2*entries; i++ {
		im.put64(im.l2(i), math.MaxUint64)
	}
	want := make([]byte, (entries+3)*cs+512)
	copy(want[(entries+2)*cs:], bytes.Repeat([]byte{7}, cs))
	im.opensAs(t, want)
	im.put64(im.l2(entries+3), math.MaxUint64)
	require.ErrorAs(t, testtool.Err(im.open()), new(*FormatError))
}

// TestFileEndsWithinASector has compressed data at the end of a file whose last sector is cut, at
// each of its bytes.
func TestFileEndsWithinASector(t *testing.T) {
	const bits, cs = 16, 1 << 16
	want := words(cs, 1)
	data := deflated(t, want)
	for _, last := range []int{1, 2, 300, 511, 512} { // bytes of it
		im := newImage(bits, 8*cs, 4)
		at := atData*cs + (last-len(data)&511+512)&511
		im.compressed(0, at, data)
		im.b = im.b[:at+len(data)]
		require.Equal(t, last&511, len(im.b)%512)
		im.opensAs(t, want)
	}
}

// TestScatteredClusters reads clusters that follow each other for the guest and not in the file,
// and asks where they lie.
func TestScatteredClusters(t *testing.T) {
	const bits, cs = 16, 1 << 16
	im := newImage(bits, 3*cs+512, 4)
	places := []int{atData + 2, atData + 3, atData, atData + 1}
	var want []byte
	for i, n := range places {
		im.data(i, n, byte(i+1))
		want = append(want, bytes.Repeat([]byte{byte(i + 1)}, cs)...)
	}
	want = want[:3*cs+512]
	got := im.opensAs(t, want)

	for _, c := range []struct{ off, length, host, n int64 }{
		{0, 4 * cs, (atData + 2) * cs, 2 * cs}, {cs + 5, 10, (atData+3)*cs + 5, 10},
		{2*cs + 512, 4 * cs, atData*cs + 512, cs},
	} {
		host, n, ok := got.Stored(bg, c.off, c.length)
		require.True(t, ok)
		require.Equal(t, []int64{c.host, c.n}, []int64{host, n})
	}
	for _, off := range []int64{-1, 3*cs + 512, math.MaxInt64} {
		_, _, ok := got.Stored(bg, off, 1)
		require.False(t, ok)
		require.ErrorContains(t, testtool.Err2(got.Extent(bg, off, 1)), "outside the image")
	}
	require.ErrorContains(t, testtool.Err2(got.Extent(bg, 0, 3*cs+513)), "outside the image")
}

// TestAdvice: what qemu-img check finds no fault with is not sent there.
func TestAdvice(t *testing.T) {
	for advice, change := range map[string]func(im *image){
		"resize":   func(im *image) { im.put64(24, 0) },
		"--shrink": func(im *image) { im.put64(24, 64<<40+512) },
	} {
		im := newImage(16, 1<<20, 1)
		change(im)
		_, err := im.open()
		format := new(FormatError)
		require.ErrorAs(t, err, &format)
		require.Contains(t, format.Action, advice)
	}
}

// TestReadError passes the errors of the file on.
func TestReadError(t *testing.T) {
	im := newImage(16, 8<<16, 4)
	im.data(0, atData, 1)
	broken := errors.New("disk on fire")
	for limit := range int64(atData) {
		_, err := Open(bg, near{failsFrom{im.b, limit << 16, broken}}, int64(len(im.b)), Options{})
		if limit != 2 { // the refcount block is not read
			require.ErrorIs(t, err, broken, "cluster %d", limit)
		}
	}
	got, err := Open(bg, near{failsFrom{im.b, atData << 16, broken}}, int64(len(im.b)), Options{})
	require.NoError(t, err)
	_, err = got.ReadAt(bg, make([]byte, 512), 0)
	require.ErrorIs(t, err, broken)
	require.ErrorContains(t, err, "guest offset 0")
}

// failsFrom fails every read that touches a byte in the cluster at from.
type failsFrom struct {
	b    []byte
	from int64
	err  error
}

func (f failsFrom) ReadAt(p []byte, off int64) (int, error) {
	if off < f.from+1<<16 && off+int64(len(p)) > f.from {
		return 0, f.err
	}
	return bytes.NewReader(f.b).ReadAt(p, off)
}

// TestCutCompressedDataArrives: the size of the file is unknown, and it ends within the compressed
// data of its last cluster. What is missing is not made up.
func TestCutCompressedDataArrives(t *testing.T) {
	im := newImage(16, 64<<10, 1)
	content := make([]byte, 64<<10)
	random := rand.New(rand.NewPCG(1, 2))
	for i := range content { // half of it is one letter: zeros decode to that
		content[i] = "aaaabcde"[random.IntN(8)]
	}
	packed := deflated(t, content)
	at := atData << 16
	im.compressed(0, at, packed)
	for _, cut := range []int{600, 5 << 10, len(packed) / 2} {
		file := im.b[:at+len(packed)-cut]
		a := testtool.Must(NewArrival(file, -1, Options{}))(t)
		err := a.Pass(bg, bytes.NewReader(file), Guest{Write: func([]byte, int64) error {
			return nil
		}})
		require.ErrorContains(t, err, "does not decode to a cluster", "cut by %d", cut)
	}
}
