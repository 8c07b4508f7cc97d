package qcow2

import (
	"bytes"
	"io"
	"math"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// TestRefused has an image for each attack that a hostile one can try, and the reason that a person
// reads.
func TestRefused(t *testing.T) {
	const bits, cs = 16, 1 << 16
	put32 := func(at int, value uint32) func(*image) {
		return func(im *image) { im.put32(at, value) }
	}
	put64 := func(at int, value uint64) func(*image) {
		return func(im *image) { im.put64(at, value) }
	}
	for _, c := range []struct {
		name   string
		want   string
		change func(im *image)
	}{
		{"not qcow2", "is not a qcow2 image", func(im *image) { im.b[0] = 'X' }},
		{"ends in the header", "ends within the header", func(im *image) { im.b = im.b[:50] }},
		{"version 1", "version 1 is not supported", put32(4, 1)},
		{"version 4", "version 4 is not supported", put32(4, 4)},
		{"cluster_bits 8", "cluster_bits is 8", put32(20, 8)},
		{"cluster_bits 22", "cluster_bits is 22", put32(20, 22)},
		{"cluster_bits 2^32-1", "cluster_bits is 4294967295", put32(20, math.MaxUint32)},
		{"header_length 72 in version 3", "header_length is 72", put32(100, 72)},
		{"header_length beyond the cluster", "header_length is 65544", put32(100, cs+8)},
		{"header_length unaligned", "header_length is 105", put32(100, 105)},
		{"size 0", "virtual size is 0", put64(24, 0)},
		{"size 2^63", "over the limit", put64(24, 1<<63)},
		{"size 2^64-1", "over the limit", put64(24, math.MaxUint64)},
		{"size over 64 TiB", "over the limit", put64(24, 64<<40+512)},
		{"refcounts of 128 bits", "refcount_order is 7", put32(96, 7)},
		{"refcount_order 2^32-1", "refcount_order", put32(96, math.MaxUint32)},
		{"one snapshot too many", "over the limit", put32(60, 1<<16+1)},
		{"snapshots in the header", "lies in the header", put32(60, 1)},
		{"snapshots outside", "runs past the end", func(im *image) {
			im.put32(60, 1)
			im.put64(64, math.MaxUint64-cs+1)
		}},
		{"no snapshots, unaligned", "not aligned", put64(64, cs+8)},
		{"long backing format", "backing format name has 16 bytes", func(im *image) {
			im.put32(104, extBackingFormat)
			im.put32(108, 16)
		}},
		{"corrupt bit", "marked corrupt", put64(72, incompatCorrupt)},
		{"data file bit", "external file", put64(72, incompatDataFile)},
		{"unknown bit", "unknown feature (incompatible feature bit 17)", put64(72, 1<<17)},
		{"the first unknown bit", "unknown feature (incompatible feature bit 5)", put64(72, 1<<5)},
		{"the last unknown bit", "unknown feature (incompatible feature bit 63)", put64(72, 1<<63)},
		{"compression bit without type", "contradict", put64(72, incompatCompression)},
		{"compression type 2", "compression type 2 is unknown", func(im *image) {
			im.put64(72, incompatCompression)
			im.put32(100, 112)
			im.b[104] = 2
		}},
		{"compression type without bit", "contradict", func(im *image) {
			im.put32(100, 112)
			im.b[104] = 1
		}},
		{"AES", "encrypted (AES)", put32(32, 1)},
		{"LUKS", "encrypted (LUKS)", put32(32, 2)},
		{"LUKS header", "encrypted (LUKS)", func(im *image) {
			im.put32(104, extLUKS)
			im.put32(108, 16)
		}},
		{"data file name", "external data file", func(im *image) {
			im.put32(104, extDataFile)
			im.put32(108, 11)
		}},
		{"extension past the cluster", "runs past the header cluster", func(im *image) {
			im.put32(104, 0x12345678)
			im.put32(108, cs)
		}},
		{"extension of 2^32-1", "runs past the header cluster", func(im *image) {
			im.put32(104, 0x12345678)
			im.put32(108, math.MaxUint32)
		}},
		{"extension one byte past the cluster", "runs past the header cluster", func(im *image) {
			im.put32(104, 0x12345678)
			im.put32(108, cs-headerLenV3-8+1)
		}},
		{"L1 size 2^32-1", "over the limit", put32(36, math.MaxUint32)},
		{"L1 over 32 MiB", "over the limit", put32(36, 4<<20+1)},
		{"L1 too small", "the virtual size needs", put64(24, 1<<40)},
		{"L1 too small by one", "the L1 table has 1 entries, and the virtual size needs 2",
			put64(24, cs*cs/8+512)},
		{"L1 at the end", "runs past the end", func(im *image) { im.put64(40, uint64(len(im.b))) }},
		{"L1 offset overflows", "runs past the end", put64(40, math.MaxUint64-cs+1)},
		{"L1 unaligned", "not aligned", put64(40, atL1*cs+512)},
		{"L1 in the header", "lies in the header", put64(40, 0)},
		{"L1 on the refcount table", "overlaps other metadata", put64(40, cs)},
		{"refcount table too long", "over the limit", put32(56, math.MaxUint32)},
		{"refcount table over 8 MiB", "over the limit", put32(56, 8<<20/cs+1)},
		{"refcount table outside", "runs past the end", put64(48, 1<<40)},
		{"refcount block outside", "runs past the end", put64(cs, 1<<40)},
		{"refcount block unaligned", "not aligned", put64(cs, 2*cs+8)},
		{"refcount block 2^64-1", "past the end", put64(cs, math.MaxUint64)},
		{"L1 entry reserved bits", "reserved bits", put64(atL1*cs, atL2*cs|1)},
		{"L2 outside", "past the end", put64(atL1*cs, 1<<40)},
		{"L2 unaligned", "not aligned", put64(atL1*cs, atL2*cs+512)},
		{"L2 in the header", "", func(im *image) { im.put64(atL1*cs, 0); im.put64(40, 0) }},
		{"L2 on L1", "overlaps other metadata", put64(atL1*cs, atL1*cs)},
		{"L2 on refcounts", "overlaps other metadata", put64(atL1*cs, 2*cs)},
		{"data outside", "past the end", func(im *image) { im.put64(im.l2(0), 1<<40) }},
		{"data just at the end", "past the end",
			func(im *image) { im.put64(im.l2(0), uint64(len(im.b))) }},
		{"data unaligned", "not aligned", func(im *image) { im.put64(im.l2(0), atData*cs+512) }},
		{"data on L2", "in the image's metadata", func(im *image) { im.put64(im.l2(0), atL2*cs) }},
		{"data on L1", "in the image's metadata", func(im *image) { im.put64(im.l2(0), atL1*cs) }},
		{"data on refcounts", "in the image's metadata",
			func(im *image) { im.put64(im.l2(0), 2*cs) }},
		{"data twice", "used by more than one",
			func(im *image) { im.data(0, atData, 1); im.data(7, atData, 1) }},
		{"L2 entry reserved bits", "reserved bits",
			func(im *image) { im.put64(im.l2(0), atData*cs|2) }},
		{"L2 entry high reserved bits", "reserved bits",
			func(im *image) { im.put64(im.l2(0), atData*cs|1<<60) }},
		{"zero flag in version 2", "reserved bits",
			func(im *image) { im.put32(4, 2); im.put64(im.l2(0), 1) }},
		{"compressed outside", "past the end",
			func(im *image) { im.put64(im.l2(0), entryCompressed|1<<40) }},
		{"compressed runs out", "past the end", func(im *image) {
			im.put64(im.l2(0), entryCompressed|255<<54|uint64(len(im.b)-1024))
		}},
		{"compressed runs out by a sector", "past the end", func(im *image) {
			im.put64(im.l2(0), entryCompressed|2<<54|uint64(len(im.b)-1024))
		}},
		{"compressed in metadata", "in the image's metadata",
			func(im *image) { im.put64(im.l2(0), entryCompressed|atL2*cs) }},
		{"compressed in the header", "in the image's metadata",
			func(im *image) { im.put64(im.l2(0), entryCompressed|512) }},
		{"compressed into data", "overlaps another cluster", func(im *image) {
			im.put64(im.l2(0), entryCompressed|1<<54|((atData+1)*cs-512)) // its second sector
			im.data(1, atData+1, 1)
		}},
		{"compressed on data", "overlaps another cluster", func(im *image) {
			im.data(0, atData, 1)
			im.put64(im.l2(1), entryCompressed|atData*cs)
		}},
		{"data on compressed", "overlaps another cluster", func(im *image) {
			im.put64(im.l2(0), entryCompressed|atData*cs)
			im.data(1, atData, 1)
		}},
		{"compressed twice", "used by more than one", func(im *image) {
			d := deflated(t, make([]byte, cs))
			im.compressed(0, atData*cs, d)
			im.compressed(1, atData*cs, d)
		}},
		{"compressed and copied", "not shared", func(im *image) {
			im.put64(im.l2(0), entryCompressed|entryCopied|atData*cs)
		}},
		{"backing name too long", "backing file name has 1024 bytes",
			func(im *image) { im.put64(8, 200); im.put32(16, 1024) }},
		{"backing name empty", "backing file name has 0 bytes", put64(8, 200)},
		{"backing name outside", "outside the header cluster",
			func(im *image) { im.put64(8, cs-4); im.put32(16, 8) }},
		{"backing name one byte outside", "outside the header cluster",
			func(im *image) { im.put64(8, cs-4); im.put32(16, 5) }},
		{"backing name overflows", "outside the header cluster",
			func(im *image) { im.put64(8, math.MaxUint64-3); im.put32(16, 8) }},
		{"backing name in the header", "outside the header cluster",
			func(im *image) { im.put64(8, 24); im.put32(16, 8) }},
		{"backing name with NUL", "NUL", func(im *image) { im.put64(8, 200); im.put32(16, 8) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			im := newImage(bits, 8*cs, 4)
			c.change(im)
			_, err := im.open()
			require.ErrorContains(t, err, c.want)
			var format *FormatError
			require.ErrorAs(t, err, &format)
			require.Equal(t, format.Action != "",
				strings.HasSuffix(err.Error(), format.Why+"; "+format.Action), "what to do")
		})
	}
}

// TestRefusedSubclusters is for attacks that need extended L2 entries.
func TestRefusedSubclusters(t *testing.T) {
	extended := func(bits uint, entry, sub uint64) error {
		im := newImage(bits, 8<<bits, 4)
		im.put64(72, incompatExtendedL2)
		im.put64(im.l2(0), entry)
		im.put64(im.l2(1), sub)
		_, err := im.open()
		return err
	}
	const cs = 1 << 16
	require.NoError(t, extended(16, atData*cs, 1<<32|2))
	require.ErrorContains(t, extended(13, 0, 0), "at least 16 KiB")
	require.ErrorContains(t, extended(16, atData*cs, 1<<32|1), "both allocated and zero")
	require.ErrorContains(t, extended(16, 0, 1), "allocated nowhere")
	require.ErrorContains(t, extended(16, atData*cs|1, 1), "reserved bits")
	require.ErrorContains(t, extended(16, entryCompressed|atData*cs, 1), "has subclusters")
}

// TestAccepted has images that look odd but are valid.
func TestAccepted(t *testing.T) {
	const bits, cs = 16, 1 << 16
	t.Run("dirty", func(t *testing.T) {
		im := newImage(bits, 8*cs, 4)
		im.put64(72, incompatDirty)
		require.NoError(t, testtool.Err(im.open()))
	})
	t.Run("a table for no snapshots, at the end", func(t *testing.T) {
		im := newImage(bits, 8*cs, 4)
		im.put64(64, uint64(len(im.b)+cs-1)&^(cs-1))
		require.NoError(t, testtool.Err(im.open()))
	})
	t.Run("zero cluster with a place", func(t *testing.T) {
		im := newImage(bits, 8*cs, 4)
		im.data(0, atData, 7)
		im.put64(im.l2(0), atData*cs|entryZero)
		got := im.opened(t)
		require.Equal(t, make([]byte, cs), filetest.Read(t, got, 0, cs))
	})
	t.Run("the file ends within the last cluster", func(t *testing.T) {
		im := newImage(bits, 8*cs, 1)
		im.data(0, atData, 7)
		im.b = im.b[:atData*cs+1000]
		got := im.opened(t)
		p := filetest.Read(t, got, 0, cs)
		require.Equal(t, append(bytes.Repeat([]byte{7}, 1000), make([]byte, cs-1000)...), p)
	})
	t.Run("unknown extension", func(t *testing.T) {
		im := newImage(bits, 8*cs, 4)
		im.put32(104, 0x12345678)
		im.put32(108, 3)
		im.put32(120, extBackingFormat)
		im.put32(124, 3)
		copy(im.b[128:], "raw")
		got := im.opened(t)
		require.Equal(t, "raw", got.Info().BackingFormat)
	})
	t.Run("reading past the end", func(t *testing.T) {
		got := testtool.Must(newImage(bits, 8*cs, 1).open())(t)
		n, err := got.ReadAt(bg, make([]byte, 1024), 8*cs-512)
		require.Equal(t, 512, n)
		require.ErrorIs(t, err, io.EOF)
	})
}

// TestCompressed decodes both kinds, packed one behind the other, and finds streams that yield too
// little.
func TestCompressed(t *testing.T) {
	const bits, cs = 16, 1 << 16
	want := bytes.Repeat([]byte("kubevirt"), cs/8)
	for _, kind := range []string{"zlib", "zstd"} {
		encode := deflated
		if kind == "zstd" {
			encode = zstandard
		}
		create := func() *image {
			im := newImage(bits, 8*cs, 4)
			if kind == "zstd" {
				im.zstd()
			}
			return im
		}
		t.Run(kind, func(t *testing.T) {
			im := create()
			d := encode(t, want)
			im.compressed(0, atData*cs+100, d)
			im.compressed(1, atData*cs+100+len(d), d)
			got := im.opened(t)
			require.Equal(t, kind, got.Info().Compression)
			p := filetest.Read(t, got, 0, 2*cs)
			require.Equal(t, append(bytes.Clone(want), want...), p)
			part := make([]byte, 10)
			for off := int64(cs - 5); off < cs+5; off++ {
				require.NoError(t, testtool.Err(got.ReadAt(bg, part, off)))
				require.Equal(t, p[off:off+10], part)
			}
		})
		t.Run(kind+" that is short", func(t *testing.T) {
			im := create()
			im.compressed(3, atData*cs, encode(t, want[:cs-1]))
			got := im.opened(t)
			// A read in the middle of a cluster decodes only up to there.
			_, err := got.ReadAt(bg, make([]byte, 512), 3*cs)
			require.ErrorContains(t, err, "guest offset 196608")
			require.ErrorAs(t, err, new(*FormatError))
			_, err = got.ReadAt(bg, make([]byte, 512), 0)
			require.NoError(t, err, "the rest of the image is readable")
		})
		t.Run(kind+" that yields more", func(t *testing.T) {
			im := create()
			im.compressed(0, atData*cs, encode(t, append(bytes.Clone(want), 1, 2, 3)))
			got := im.opened(t)
			p := make([]byte, cs)
			_, err := got.ReadAt(bg, p, 0)
			// QEMU, too, asks for the end of the frame, and of deflate only for enough of it
			if kind == "zstd" {
				require.ErrorAs(t, err, new(*FormatError))
				return
			}
			require.NoError(t, err)
			require.Equal(t, want, p)
		})
		if kind == "zstd" {
			t.Run("zstd in several frames", func(t *testing.T) {
				im := create()
				skippable := append([]byte{0x51, 0x2a, 0x4d, 0x18, 3, 0, 0, 0}, "any"...)
				frames := append(append(encode(t, want[:1000]), skippable...),
					encode(t, want[1000:])...)
				im.compressed(0, atData*cs, frames)
				got := im.opened(t)
				require.Equal(t, want, filetest.Read(t, got, 0, cs))
			})
		}
		t.Run(kind+" cut at every byte", func(t *testing.T) {
			im := create()
			data := encode(t, want)
			got := im.opened(t)
			p := make([]byte, cs)
			end := len(data)
			if kind == "zlib" {
				end -= 5 // an empty block of compress/flate's, and the end of the one before
			}
			for n := range end {
				require.ErrorAs(t, got.codec.decode(p, data[:n], 0), new(*FormatError),
					"%d of %d bytes", n, len(data))
			}
			require.NoError(t, got.codec.decode(p, data, 0))
		})
		t.Run(kind+" that is garbage", func(t *testing.T) {
			im := create()
			im.compressed(0, atData*cs, bytes.Repeat([]byte{0xff}, 2000))
			got := im.opened(t)
			_, err := got.ReadAt(bg, make([]byte, 512), 0)
			require.ErrorAs(t, err, new(*FormatError))
		})
	}
}

// hugeFile is a sparse file: the image, and then zeros up to a size that does not fit into memory.
type hugeFile struct{ head []byte }

func (f hugeFile) ReadAt(p []byte, off int64) (int, error) {
	clear(p)
	if off < int64(len(f.head)) {
		copy(p, f.head[off:])
	}
	return len(p), nil
}

// openHuge opens the image as a sparse file of that size, and tells how much memory that took.
func openHuge(t *testing.T, im *image, size int64) (got *Image, allocated uint64) {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	got, err := Open(bg, near{hugeFile{im.b}}, size, Options{})
	runtime.ReadMemStats(&after)
	require.NoError(t, err)
	return got, after.TotalAlloc - before.TotalAlloc
}

// TestMemory opens a file of a few bytes that claims as much as it can.
func TestMemory(t *testing.T) {
	im := newImage(21, 64<<40, 0)
	got, allocated := openHuge(t, im, 64<<40)
	require.Equal(t, int64(64<<40), got.Size())
	require.Less(t, allocated, uint64(16<<20))
	n, kind := testtool.Must2(got.Extent(bg, 0, got.Size()))(t)
	require.Equal(t, KindUnallocated, kind)
	require.Equal(t, got.Size(), n)
}

// TestMemoryOfScatteredClusters opens a file of 600 KiB and a very large hole, the tables of which
// name a plain and a compressed cluster in every part of it.
func TestMemoryOfScatteredClusters(t *testing.T) {
	const bits, parts, perTable = 9, 1 << 15, 1 << 9 / 8
	const fileSize = maxClusters << bits
	const tables = 2 * parts / perTable
	const refTable = 1 + tables/perTable + tables // the last cluster
	im := &image{make([]byte, (refTable+1)<<bits), bits}
	copy(im.b, newImage(bits, 2*parts<<bits, 0).b[:1<<bits])
	im.put64(40, 1<<bits)
	im.put64(48, refTable<<bits)
	first := 1 + tables/perTable // cluster of the first L2 table
	for i := range tables {
		im.put64(1<<bits+8*i, uint64(first+i)<<bits|entryCopied)
	}
	for i := range parts - 1 {
		at := uint64(fileSize / parts * (i + 1))
		im.put64(first<<bits+16*i, at|entryCopied)
		im.put64(first<<bits+16*i+8, (at+2<<bits)|entryCompressed)
	}
	got, allocated := openHuge(t, im, fileSize)
	require.EqualValues(t, (parts-1)<<bits, got.Info().PlainSize)
	require.EqualValues(t, (parts-1)<<bits, got.Info().CompressedSize)
	require.Less(t, allocated, uint64(48<<20))
}
