package qcow2

import (
	"context"
	"encoding/binary"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// madeFile is a file that a test makes as it is read: each part fills its bytes from an offset in
// it on, and zeros are in between.
type madeFile struct {
	size  int64
	parts []madePart
}

type madePart struct {
	off, length int64
	word        func(i int64) uint64 // the big-endian number i of the part
}

func (f *madeFile) ReadAt(p []byte, off int64) (int, error) {
	if off >= f.size {
		return 0, io.EOF
	}
	var end error
	if int64(len(p)) > f.size-off {
		p, end = p[:f.size-off], io.EOF
	}
	clear(p)
	for _, part := range f.parts {
		from, to := max(off, part.off), min(off+int64(len(p)), part.off+part.length)
		for at := from; at < to; {
			var word [8]byte
			i := (at - part.off) / 8
			binary.BigEndian.PutUint64(word[:], part.word(i))
			at += int64(copy(p[at-off:to-off], word[(at-part.off)%8:]))
		}
	}
	return len(p), end
}

// bytesPart are the parts of a small image.
func bytesPart(b []byte) madePart {
	return madePart{0, int64(len(b)), func(i int64) uint64 {
		return binary.BigEndian.Uint64(b[i*8:])
	}}
}

// tableImage is an image with an L1 table of n entries behind the header, and the L2 tables behind
// that, whose entries entry gives. data is behind the tables.
func tableImage(bits uint, n int64, data int64, entry func(guest, end int64) uint64) *madeFile {
	size := int64(1) << bits
	l1 := 4 * size
	l2 := (l1 + n*8 + size - 1) &^ (size - 1)
	end := l2 + n*size
	im := newImage(bits, uint64(n*size/8*size), 0)
	im.put32(36, uint32(n))
	im.put64(40, uint64(l1))
	im.put64(1<<bits, 0)
	parts := []madePart{bytesPart(im.b[:size]), {l1, n * 8, func(i int64) uint64 {
		return uint64(l2+i*size) | entryCopied
	}}}
	if entry != nil {
		parts = append(parts, madePart{l2, n * size, func(i int64) uint64 { return entry(i, end) }})
	}
	return &madeFile{size: end + data, parts: parts}
}

// TestMemoryOfTables reads images whose tables are as many and as bad as they may be. Whether they
// are read or refused, the memory for them has a limit.
func TestMemoryOfTables(t *testing.T) {
	const many = 1 << 20 // a quarter of what an L1 table may have
	for name, c := range map[string]struct {
		file  func() *madeFile
		open  int64  // how much memory opening may take, MiB; 0: it is not tried
		pass  int64  // the same for reading it as it comes
		wrong string // what is said about it; "": nothing
	}{
		"empty L2 tables": {func() *madeFile { return tableImage(9, many, 0, nil) }, 40, 40, ""},
		// The entries lead behind all tables, so all are kept until then.
		"full L2 tables before the data": {func() *madeFile {
			return tableImage(9, 1<<19, 1<<19*64<<9, func(guest, end int64) uint64 {
				return uint64(end+guest<<9) | entryCopied
			})
		}, 0, 300, "too many tables"},
		"compressed clusters of a byte": {func() *madeFile {
			return tableImage(12, 1<<11, 2<<20, func(guest, end int64) uint64 {
				return entryCompressed | uint64(end+guest)
			})
		}, 40, 40, "does not decode"},
		"many compressed clusters": {func() *madeFile {
			return tableImage(9, 4*many, 16<<20, func(guest, end int64) uint64 {
				return entryCompressed | uint64(end+guest)
			})
		}, 120, 0, "compressed clusters"},
		"refcount blocks": {func() *madeFile {
			f := tableImage(9, 1, 32<<20+1<<29, nil)
			f.parts[0] = bytesPart(f.head(func(im *image) {
				im.put64(48, 8<<9)
				im.put32(56, 8<<20>>9)
			}))
			f.parts = append(f.parts, madePart{8 << 9, 8 << 20, func(i int64) uint64 {
				return uint64(16<<20 + i<<9)
			}})
			return f
		}, 20, 10, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := c.file()
			check := func(err error) {
				if c.wrong == "" {
					require.NoError(t, err)
				} else {
					require.ErrorContains(t, err, c.wrong)
				}
			}
			if c.open > 0 {
				var err error
				grew := testtool.HeapGrowth(t, func() {
					_, err = Open(bg, near{f}, f.size, Options{})
				})
				if name != "compressed clusters of a byte" {
					check(err)
				}
				require.Less(t, grew, c.open<<20)
			}
			if c.pass == 0 {
				return
			}
			var err error
			grew := testtool.HeapGrowth(t, func() { err = f.arrive(bg) })
			check(err)
			require.Less(t, grew, c.pass<<20)
		})
	}
}

// head is the header of the image, changed.
func (f *madeFile) head(change func(im *image)) []byte {
	im := &image{make([]byte, 512), 9}
	_, _ = f.ReadAt(im.b, 0)
	change(im)
	return im.b
}

// arrive reads the image as it comes.
func (f *madeFile) arrive(ctx context.Context) error {
	head := make([]byte, HeadSize)
	n, _ := f.ReadAt(head, 0)
	a, err := NewArrival(head[:n], f.size, Options{})
	for err == nil && !a.Done() {
		err = a.Pass(ctx, io.NewSectionReader(f, 0, f.size), Guest{
			Write: func([]byte, int64) error { return nil }})
	}
	return err
}

// TestTablesEnd: who reads many tables stops when that is not wanted any more.
func TestTablesEnd(t *testing.T) {
	f := tableImage(9, 1<<20, 0, nil)
	ctx, cancel := context.WithCancel(bg)
	l1 := f.parts[1].word
	f.parts[1].word = func(i int64) uint64 {
		if i == 1<<16 {
			cancel()
		}
		return l1(i)
	}
	require.ErrorIs(t, f.arrive(ctx), context.Canceled)
	ctx, cancel = context.WithCancel(bg)
	defer cancel()
	require.ErrorIs(t, testtool.Err(Open(ctx, near{f}, f.size, Options{})), context.Canceled)
}
