package overlay

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/cespare/xxhash/v2"

	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
)

// A map file says which blocks of an image the disk's own file has. It begins with a header, and a
// page of the map follows in each 4 KiB. Numbers are little-endian. Bytes that are not drawn are
// zero, and what was never written is a hole of the file.
//
//	    0 +--------------------------------------------------+
//	      | magic "KVDMAP1\n"                                |
//	    8 | size of a block, bytes                           |
//	   16 | how many blocks the image has                    |
//	   24 | identifier of the disk's map, 16 bytes           |
//	   40 | boot of the kernel, 36 characters      (live)    |
//	   80 | volume, up to 48 characters            (live)    |
//	 1024 | a bit for each page: it was full when the file   |
//	      | was made, so it is not stored below              |
//	 4088 | xxhash64 of the bytes before                     |
//	 4096 +--------------------------------------------------+
//	      | page 0: a bit for each of blocks 0 to 32767;     |
//	      | 1: the disk's own file has it, 0: the image      |
//	 8192 +--------------------------------------------------+
//	      | page 1: blocks 32768 to 65535                    |
//	12288 +--------------------------------------------------+
//	      | ...                                              |
//
// Bits are only ever set, never cleared. So a write that is cut off leaves an older map, which is
// right, too: it lacks only blocks that no flush has acknowledged. The header never changes, unless
// a flush fails: then the header of the live file becomes zeros, and the file is not used any more.
//
// A disk has one or two such files. The live one gets each change at once and is never synced: it
// is right while the kernel runs. It is used only in the boot and on the volume that its header
// names. The durable one has neither of these two fields. It gets pages when the disk is flushed,
// after the data.
const (
	mapMagic        = rawfile.MapMagic
	mapGranuleBegin = 8
	mapBlocksBegin  = 16
	mapIDBegin      = 24
	mapBootBegin    = 40
	mapBootLength   = 36
	mapVolumeBegin  = 80
	mapVolumeLength = 48
	mapFullBegin    = 1 << 10
	mapFullLength   = maxMapBlocks / mapPageBlocks / 8
	mapHeaderBody   = mapHeaderSize - 8
	mapHeaderSize   = 4 << 10

	// A page has this many words, blocks and bytes, in memory and in a file.
	mapPageWords  = 512
	mapPageBlocks = mapPageWords * 64
	mapPageSize   = mapPageWords * 8
)

// storage is a map file.
type storage interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	Sync() error
}

// mapHeader identifies a map file. See mapMagic.
type mapHeader struct {
	granule, blocks int64
	id              [16]byte
	boot, volume    string
}

// encode returns the header of a file, with the bits of full pages.
func (h *mapHeader) encode(full []byte) []byte {
	buf := make([]byte, mapHeaderSize)
	copy(buf, mapMagic)
	binary.LittleEndian.PutUint64(buf[mapGranuleBegin:], uint64(h.granule))
	binary.LittleEndian.PutUint64(buf[mapBlocksBegin:], uint64(h.blocks))
	copy(buf[mapIDBegin:], h.id[:])
	copy(buf[mapBootBegin:mapBootBegin+mapBootLength], h.boot)
	copy(buf[mapVolumeBegin:mapVolumeBegin+mapVolumeLength], h.volume)
	copy(buf[mapFullBegin:mapFullBegin+mapFullLength], full)
	binary.LittleEndian.PutUint64(buf[mapHeaderBody:], xxhash.Sum64(buf[:mapHeaderBody]))
	return buf
}

// anyVolume in an expected header accepts every volume.
const anyVolume = "*"

// readMap merges a file's pages into a map, and calls news for each page with new bits. stored says
// that the page has its own place in the file. For a file that does not match header, the error is
// a *DamagedError. After other errors, the file may be intact.
func readMap(f storage, path string, size int64, header mapHeader, m *blockMap,
	news func(page int64, stored bool)) error {
	buf := make([]byte, mapHeaderSize)
	if err := osfile.ReadFull(f, buf, 0); errors.Is(err, io.ErrUnexpectedEOF) {
		return &DamagedError{path, "is too short"}
	} else if err != nil {
		return err
	}
	full := bytes.Clone(buf[mapFullBegin : mapFullBegin+mapFullLength])
	if header.volume == anyVolume {
		header.volume = string(buf[mapVolumeBegin : mapVolumeBegin+mapVolumeLength])
	}
	if !bytes.Equal(buf, header.encode(full)) {
		return &DamagedError{path, "belongs to another disk, another volume or another start of " +
			"the machine, or is damaged"}
	}
	for index := range int64(len(m.pages)) {
		off := mapHeaderSize + index*mapPageSize
		stored := full[index/8]>>(index%8)&1 == 0
		switch {
		case !stored:
			copy(buf, fullWords)
		case off < size:
			clear(buf)
			n, err := f.ReadAt(buf[:min(mapPageSize, size-off)], off)
			if errors.Is(err, io.EOF) && n == 0 {
				return &DamagedError{path, "became shorter while it was read"}
			} else if err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			if rawfile.AllZero(buf) {
				continue
			}
		default:
			continue
		}
		if m.mergePage(index, buf) {
			news(index, stored)
		}
	}
	return nil
}

// DamagedError says that a map file cannot be used: it is missing, damaged, or not this disk's.
type DamagedError struct{ path, reason string }

func (e *DamagedError) Error() string { return fmt.Sprintf("its map file %q %s", e.path, e.reason) }

func isDamaged(err error) bool {
	return errors.As(err, new(*DamagedError))
}

// createMap makes a map file with the content of a map, and replaces an older one. With synced, the
// file and its name are synced.
func createMap(path string, header mapHeader, m *blockMap, synced bool) (*os.File, error) {
	out, err := durable.Create(path, 0o600)
	if err != nil {
		return nil, err
	}
	fill := func() error {
		full, err := writeMapPages(out.File, m)
		if err != nil {
			return err
		}
		if _, err := out.File.WriteAt(header.encode(full), 0); err != nil {
			return err
		}
		if synced {
			return out.File.Sync()
		}
		return nil
	}
	if err := out.Finish(fill()); err != nil {
		return nil, err
	}
	if synced {
		if err := durable.SyncParent(path); err != nil {
			return nil, err
		}
	}
	return openMap(path)
}

// mapChunk is how much of a new map is written at once, in bytes: enough for few system calls. With
// larger chunks, the page cache would have folios so large that ext4 goes through hundreds of
// blocks for each later change of a few bytes.
const mapChunk = 8 * mapPageSize

// writeMapPages writes the current pages of a map to a new file, neighbours together. It leaves a
// hole for a page that is all clear, and sets the bit in full for a page with all blocks set.
func writeMapPages(f io.WriterAt, m *blockMap) (full []byte, err error) {
	full = make([]byte, mapFullLength)
	chunk := make([]byte, 0, mapChunk)
	for index := range int64(len(m.pages)) {
		p := m.pages[index].Load()
		if p == m.full {
			full[index/8] |= 1 << (index % 8)
		} else if p != nil {
			chunk = chunk[:len(chunk)+mapPageSize]
			m.copyPage(index, chunk[len(chunk)-mapPageSize:])
			index++ // the page after the chunk
			if len(chunk) < mapChunk && index < int64(len(m.pages)) {
				continue
			}
		}
		if len(chunk) > 0 {
			if _, err := f.WriteAt(chunk, mapHeaderSize+index*mapPageSize-int64(len(chunk))); err !=
				nil {
				return nil, err
			}
			chunk = chunk[:0]
		}
	}
	return full, nil
}

func openMap(path string) (*os.File, error) {
	return osfile.OpenFile(path, os.O_RDWR, 0)
}
