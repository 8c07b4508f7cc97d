package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sys/unix"
)

// storage is a file that a map is kept in.
type storage interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	Sync() error
}

// mapHeaderSize is where the pages begin in a map file, page by page, sparse. Bytes.
const mapHeaderSize = 4 << 10

var mapMagic = [8]byte{'K', 'V', 'D', 'M', 'A', 'P', '1', '\n'}

// mapHeader identifies a map file: which disk it belongs to, and, for one that is not synced, the boot of the kernel
// whose page cache it is in. Encoded little-endian:
//
//	 0  magic
//	 8  granule, bytes
//	16  blocks
//	24  identifier of the disk's map, 16 bytes
//	40  boot, 36 characters, zeros for a file that survives one
//	76  zeros
//	80  xxhash64 of the bytes before
type mapHeader struct {
	granule, blocks int64
	id              [16]byte
	boot            string
}

const (
	mapHeaderBody = 80
	mapBootLength = 36
)

func (h *mapHeader) encode() []byte {
	buf := make([]byte, mapHeaderSize)
	copy(buf, mapMagic[:])
	binary.LittleEndian.PutUint64(buf[8:], uint64(h.granule))
	binary.LittleEndian.PutUint64(buf[16:], uint64(h.blocks))
	copy(buf[24:40], h.id[:])
	copy(buf[40:40+mapBootLength], h.boot)
	binary.LittleEndian.PutUint64(buf[mapHeaderBody:], xxhash.Sum64(buf[:mapHeaderBody]))
	return buf
}

// readMap merges a file's pages into a map. A file that is not the one that header describes is a *damagedError.
func readMap(f storage, size int64, header mapHeader, m *blockMap) error {
	buf := make([]byte, mapHeaderSize)
	if err := readFull(f, buf, 0); err != nil {
		return damagedMap("cannot be read: %v", err)
	}
	if string(buf) != string(header.encode()) {
		return damagedMap("belongs to another disk or another start of the machine, or is damaged")
	}
	for index := range int64(len(m.pages)) {
		off := mapHeaderSize + index*mapPageSize
		if off >= size {
			break
		}
		clear(buf)
		n, err := f.ReadAt(buf[:min(mapPageSize, size-off)], off)
		if err != nil && (!errors.Is(err, io.EOF) || n == 0) {
			return damagedMap("cannot be read: %v", err)
		}
		if !allZero(buf) {
			m.mergePage(index, buf)
		}
	}
	return nil
}

func damagedMap(format string, args ...any) error {
	return &damagedError{"map file", fmt.Sprintf(format, args...)}
}

// createMap makes a map file with the content of a map, in place of an older one. With durable it has reached storage.
func createMap(path string, header mapHeader, m *blockMap, durable bool) (*os.File, error) {
	out, err := createPartial(path, 0o600)
	if err != nil {
		return nil, err
	}
	fill := func() error {
		if _, err := out.file.Write(header.encode()); err != nil {
			return err
		}
		for index := range int64(len(m.pages)) {
			if err := writeMapPage(out.file, m, index); err != nil {
				return err
			}
		}
		if durable {
			return out.file.Sync()
		}
		return nil
	}
	if err := out.finish(fill()); err != nil {
		return nil, err
	}
	if durable {
		if err := syncParent(path); err != nil {
			return nil, err
		}
	}
	return openMap(path)
}

// writeMapPage writes a page of a map as it is now; one that is all clear stays a hole of a new file.
func writeMapPage(f io.WriterAt, m *blockMap, index int64) error {
	if m.pages[index].Load() == nil {
		return nil
	}
	buf := mapBuffers.Get().(*[mapPageSize]byte)
	defer mapBuffers.Put(buf)
	m.copyPage(index, buf[:])
	_, err := f.WriteAt(buf[:], mapHeaderSize+index*mapPageSize)
	return err
}

func openMap(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
}
