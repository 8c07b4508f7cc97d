package overlay

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"

	"github.com/cespare/xxhash/v2"

	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
)

// storage is a map file.
type storage interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	Sync() error
}

// mapHeader identifies a map file. See format.go.
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
// that the page has its own place in the file. A file that does not match header is a
// *DamagedError. Other errors say nothing about the file.
func readMap(f storage, size int64, header mapHeader, m *blockMap,
	news func(page int64, stored bool)) error {
	buf := make([]byte, mapHeaderSize)
	if err := osfile.ReadFull(f, buf, 0); errors.Is(err, io.ErrUnexpectedEOF) {
		return &DamagedError{"is too short"}
	} else if err != nil {
		return err
	}
	full := bytes.Clone(buf[mapFullBegin : mapFullBegin+mapFullLength])
	if header.volume == anyVolume {
		header.volume = string(buf[mapVolumeBegin : mapVolumeBegin+mapVolumeLength])
	}
	if !bytes.Equal(buf, header.encode(full)) {
		return &DamagedError{"belongs to another disk, another volume or another start of the " +
			"machine, or is damaged"}
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
				return &DamagedError{"became shorter while it was read"}
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

// DamagedError says that a map file cannot be used: it is missing, damaged, or belongs to something
// else.
type DamagedError struct{ reason string }

func (e *DamagedError) Error() string { return "its map file " + e.reason }

func isDamaged(err error) bool {
	var damaged *DamagedError
	return errors.As(err, &damaged)
}

// createMap makes a map file with the content of a map and replaces an older one. With synced it
// also syncs both.
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

// mapChunk is how much of a new map is written at once, in bytes. A large image needs only a few
// system calls. Larger chunks would make such large folios in the page cache that ext4 goes through
// hundreds of blocks for each later change of a few bytes.
const mapChunk = 8 * mapPageSize

// writeMapPages writes the current pages of a map to a new file, neighbours together. A page that
// is all clear stays a hole. A page with all blocks set gets its bit in full instead.
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
			index++ // after the chunk
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
