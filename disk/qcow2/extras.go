package qcow2

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

const (
	maxSnapshotExtra = 1 << 10 // bytes of a snapshot's further data: QEMU's limit
	maxBitmaps       = 1<<16 - 1
	maxBitmapEntry   = 1 << 10 // bytes of a bitmap's entry, on average: QEMU's limit
	bitmapEntry      = 24      // bytes of a bitmap's entry, without its name
	maxBitmapTable   = 1 << 27 // entries
	maxBitmapBytes   = 1 << 29
	bitmapInUse      = 1 << 0
	bitmapFlags      = 1<<2 - 1 // the flags that QEMU knows
	minGranularity   = 9        // bits
	maxGranularity   = 31

	autoclearBitmaps = 1 << 0
)

// bitmaps is the place of the directory of bitmaps, which are not served. n is 0 if there is none,
// or if the image says that it is out of date.
type bitmaps struct {
	n           uint32
	off, length int64
}

// checkExtras checks what is never served and QEMU reads when it opens an image: its snapshots and
// its bitmaps, in the order of the file. An image that QEMU refuses is of no use to anybody who
// moves on with it.
func (h *header) checkExtras(ctx context.Context, r Reader, fileSize int64) error {
	first, second := h.checkSnapshotEntries, h.checkBitmaps
	if h.bitmaps.off < h.snapshotsAt {
		first, second = second, first
	}
	err := first(ctx, r, fileSize)
	if err == nil {
		err = second(ctx, r, fileSize)
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return bad("the table of snapshots or bitmaps runs past its end")
	}
	return err
}

// from reads a part of the file from its beginning to its end.
func from(ctx context.Context, r Reader, off, length int64) *bufio.Reader {
	return bufio.NewReader(io.NewSectionReader(readerAt{ctx, r}, off, length))
}

type readerAt struct {
	ctx context.Context
	r   Reader
}

func (r readerAt) ReadAt(p []byte, off int64) (int, error) { return r.r.ReadAt(r.ctx, p, off) }

func (h *header) checkSnapshotEntries(ctx context.Context, r Reader, fileSize int64) error {
	if h.snapshots == 0 {
		return nil
	}
	table := from(ctx, r, h.snapshotsAt, fileSize-h.snapshotsAt)
	for i := range h.snapshots {
		var e [snapshotEntry]byte
		if _, err := io.ReadFull(table, e[:]); err != nil {
			return fmt.Errorf("reading the snapshot table: %w", err)
		}
		extra := binary.BigEndian.Uint32(e[36:])
		if extra > maxSnapshotExtra {
			return bad("snapshot %d has %d bytes of further data, over the limit of %d", i, extra,
				maxSnapshotExtra)
		}
		rest := int(extra) + int(binary.BigEndian.Uint16(e[12:])) +
			int(binary.BigEndian.Uint16(e[14:]))
		last := i == h.snapshots-1 // it needs no padding
		if !last {
			rest = (rest + 7) &^ 7
		}
		if _, err := table.Discard(rest); err != nil {
			return fmt.Errorf("reading the snapshot table: %w", err)
		}
	}
	return nil
}

// readBitmaps reads the header extension that says where the bitmaps are.
func (h *header) readBitmaps(body []byte, fileSize int64) error {
	if h.version < 3 || h.autoclear&autoclearBitmaps == 0 {
		return nil // whoever wrote the image last did not know them
	}
	if len(body) != 24 {
		return bad("the bitmaps extension has %d bytes, and needs 24", len(body))
	}
	be := binary.BigEndian
	n, length, off := be.Uint32(body), be.Uint64(body[8:]), be.Uint64(body[16:])
	switch {
	case n == 0 || n > maxBitmaps:
		return bad("the image has %d bitmaps, outside 1 to %d", n, maxBitmaps)
	case be.Uint32(body[4:]) != 0:
		return bad("a reserved field of the bitmaps extension is not 0")
	case length < uint64(n)*bitmapEntry || length > maxBitmaps*maxBitmapEntry:
		return bad("the directory of %d bitmaps cannot have %d bytes", n, length)
	case off&uint64(h.clusterSize()-1) != 0 || off == 0:
		return bad("the directory of bitmaps at %#x is not aligned to a cluster", off)
	case off > uint64(fileSize) || length > uint64(fileSize)-off:
		return bad("the directory of bitmaps at %#x, %d bytes, runs past the end of the file", off,
			length)
	}
	h.bitmaps = bitmaps{n, int64(off), int64(length)}
	return nil
}

func (h *header) checkBitmaps(ctx context.Context, r Reader, fileSize int64) error {
	if h.bitmaps.n == 0 {
		return nil
	}
	directory, left := from(ctx, r, h.bitmaps.off, h.bitmaps.length), h.bitmaps.length
	n := uint32(0)
	for ; left > 0; n++ {
		var e [bitmapEntry]byte
		if _, err := io.ReadFull(directory, e[:]); err != nil {
			return fmt.Errorf("reading the directory of bitmaps: %w", err)
		}
		if err := h.checkBitmap(e[:], fileSize); err != nil {
			return err
		}
		name := (int64(binary.BigEndian.Uint16(e[18:])) + 7) &^ 7
		if _, err := directory.Discard(int(name)); err != nil {
			return fmt.Errorf("reading the directory of bitmaps: %w", err)
		}
		left -= bitmapEntry + name
	}
	if n != h.bitmaps.n {
		return bad("the directory has %d bitmaps, and the header says %d", n, h.bitmaps.n)
	}
	return nil
}

// checkBitmap checks an entry of the directory.
func (h *header) checkBitmap(e []byte, fileSize int64) error {
	be := binary.BigEndian
	table, entries, flags := be.Uint64(e), int64(be.Uint32(e[8:])), be.Uint32(e[12:])
	kind, granularity, name, extra := e[16], e[17], be.Uint16(e[18:]), be.Uint32(e[20:])
	switch {
	case table == 0 || table&uint64(h.clusterSize()-1) != 0:
		return bad("the table of a bitmap at %#x is not aligned to a cluster", table)
	case entries == 0 || entries > maxBitmapTable || entries<<h.clusterBits > maxBitmapBytes:
		return bad("a bitmap has %d clusters, outside what QEMU reads", entries)
	case table > uint64(fileSize) || entries*8 > fileSize-int64(table):
		return bad("the table of a bitmap at %#x, %d bytes, runs past the end of the file", table,
			entries*8)
	case flags&^bitmapFlags != 0:
		return bad("a bitmap has unknown flags %#x", flags)
	case kind != 1:
		return bad("a bitmap has the unknown type %d", kind)
	case granularity < minGranularity || granularity > maxGranularity:
		return bad("the granularity of a bitmap has %d bits, outside %d to %d", granularity,
			minGranularity, maxGranularity)
	case name == 0 || name > maxNameLen:
		return bad("the name of a bitmap has %d bytes, outside 1 to %d", name, maxNameLen)
	case extra != 0:
		return bad("a bitmap has %d bytes of further data, and none are defined", extra)
	case flags&bitmapInUse != 0:
		return nil // its content is not used
	}
	perWord := int64(64) << granularity // bytes of the disk
	words := (h.size&^(sectorSize-1) + perWord - 1) / perWord
	if want := (words*8 + h.clusterSize() - 1) >> h.clusterBits; want != entries {
		return bad("a bitmap has %d clusters, and the virtual size needs %d", entries, want)
	}
	return nil
}
