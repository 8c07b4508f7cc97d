package layer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sort"

	"github.com/klauspost/compress/zstd"

	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/registry/transport"
)

const (
	// maxPackedTables limits the tables that push puts into an index, and maxTables those that are
	// read from an index. Bytes, before compression.
	maxPackedTables = 64 << 20
	maxTables       = 256 << 20
	// tablesFrame is how much of the tables is one zstd frame, and tablesWindow the largest window
	// of a frame. Bytes.
	tablesFrame  = 64 << 10
	tablesWindow = 1 << 20
)

// Tables are the ranges of a file that opening reads, as the index has them. Fetching them chunk by
// chunk would take more round trips, and fetch much else.
type Tables struct {
	from   io.ReaderAt
	Ranges [][2]int64 // offset in the file and length, ascending
	at     []int64    // where each begins in from
}

// Has returns the index of the range that has all the bytes at off; -1: none.
func (t *Tables) Has(off, length int64) int {
	i := sort.Search(len(t.Ranges), func(i int) bool { return t.Ranges[i][0] > off }) - 1
	if i < 0 || off-t.Ranges[i][0] > t.Ranges[i][1]-length {
		return -1
	}
	return i
}

// ReadAt is Read as an io.ReaderAt. Bytes outside of the tables are an error.
func (t *Tables) ReadAt(p []byte, off int64) (int, error) {
	if !t.Read(p, off) {
		return 0, fmt.Errorf("%d bytes at %d are not in the tables", len(p), off)
	}
	return len(p), nil
}

// Read fills p from off on, if the tables have all of it.
func (t *Tables) Read(p []byte, off int64) bool {
	if t == nil || len(p) == 0 {
		return false
	}
	i := t.Has(off, int64(len(p)))
	if i < 0 {
		return false
	}
	n, _ := t.from.ReadAt(p, t.at[i]+off-t.Ranges[i][0])
	return n == len(p) // otherwise the caller fetches them
}

// Differ returns where the bytes of the file from off on differ from the tables; -1: nowhere.
func (t *Tables) Differ(p []byte, off int64) int64 {
	if t == nil {
		return -1
	}
	end := off + int64(len(p))
	for i := max(0, sort.Search(len(t.Ranges),
		func(i int) bool { return t.Ranges[i][0] > off })-1); i < len(t.Ranges); i++ {
		begin, stop := max(off, t.Ranges[i][0]), min(end, t.Ranges[i][0]+t.Ranges[i][1])
		if t.Ranges[i][0] >= end {
			break
		}
		if begin >= stop {
			continue
		}
		mine := make([]byte, stop-begin)
		// Bytes that cannot be read here are not used, either: see Read.
		if n, _ := t.from.ReadAt(mine, t.at[i]+begin-t.Ranges[i][0]); n < len(mine) {
			continue
		}
		if !bytes.Equal(mine, p[begin-off:stop-off]) {
			return begin
		}
	}
	return -1
}

// Ranges are parts of a file, as offset and length, and a reader of the file.
type Ranges struct {
	File   io.ReaderAt
	Ranges [][2]int64
}

// PackTables compresses the ranges of all files, one after the other. nil: there are none, or they
// are too large.
func PackTables(ctx context.Context, files []Ranges) ([]byte, error) {
	total, all := int64(0), []io.Reader{}
	for _, f := range files {
		for _, r := range f.Ranges {
			total += r[1]
			all = append(all, io.NewSectionReader(f.File, r[0], r[1]))
		}
	}
	if total == 0 || total > maxPackedTables {
		return nil, nil
	}
	in, frame := io.MultiReader(all...), make([]byte, tablesFrame)
	var packed []byte
	for ; total > 0; total -= int64(len(frame)) {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		frame = frame[:min(total, tablesFrame)]
		if _, err := io.ReadFull(in, frame); err != nil {
			return nil, transport.UnexpectedEnd(err)
		}
		var err error
		if packed, err = qcow2.AppendZstd(packed, frame); err != nil {
			return nil, err
		}
	}
	return packed, nil
}

// UnpackTables decompresses the tables of an index into a new file. nil: there are none.
func (x *Index) UnpackTables(file func() (*os.File, error)) (*os.File, error) {
	if x.Packed == nil {
		return nil, nil
	}
	total := int64(0)
	for i := range x.Files {
		for _, r := range x.Files[i].Metadata {
			if total += r[1]; total > maxTables {
				return nil, fmt.Errorf("it has more than %d bytes of metadata", maxTables)
			}
		}
	}
	in, err := zstd.NewReader(x.Packed, zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(tablesWindow))
	if err != nil {
		return nil, err
	}
	defer in.Close()
	out, err := file()
	if err != nil {
		return nil, err
	}
	n, err := io.Copy(out, io.LimitReader(in, total+1))
	if err == nil && n != total {
		err = fmt.Errorf("it has %d bytes of metadata or more, and says %d", n, total)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", tablesName, err), out.Close())
	}
	return out, nil
}

// TablesOf returns the tables of a file; nil: the index has none.
func (x *Index) TablesOf(f *IndexFile) *Tables {
	if x.Tables == nil {
		return nil
	}
	t, at := &Tables{from: x.Tables, Ranges: f.Metadata}, int64(0)
	for i := range x.Files {
		if &x.Files[i] == f {
			for _, r := range f.Metadata {
				t.at = append(t.at, at)
				at += r[1]
			}
			return t
		}
		for _, r := range x.Files[i].Metadata {
			at += r[1]
		}
	}
	return nil
}
