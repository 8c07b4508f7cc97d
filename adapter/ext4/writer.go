package ext4

import (
	"bytes"
	"crypto/sha256"
	"io"
	"math"
)

// Writer writes a file system level by level. Only one goroutine may use it. After an error from
// writing or from reading content it cannot be used any more.
type Writer struct {
	dst   io.WriterAt // of this level; nil: nothing is written
	level int

	inodes  list[inode] // by number
	entries list[entry] // of all directories; 0 is not used
	dirs    list[directory]
	sets    list[xattrSet] // 0 is not used
	text    text
	names   nameTable
	unused  []uint32 // entries

	extents    []extent            // of the files; one after the other
	dirExtents map[uint32][]extent // by inode: those of a directory that has more than one
	nodes      map[uint32][]uint32 // by inode: the blocks of its tree of extents, if it has any
	longLinks  map[uint32]string   // by inode: targets that are not in the inode
	setIDs     map[string]uint32   // by content

	linkBytes, xattrBytes int // sums of everything that was ever in longLinks and sets

	alloc  allocator
	groups uint32 // at the last Finish

	touched     []uint64 // inode table blocks that have to be written, as bits
	changedDirs []uint32 // inodes
	changedSets []uint32

	// known has a part of the SHA-256 of each block of metadata on the disk. Other blocks are
	// zeros.
	known sums

	block  []byte // the buffer of scratch
	buffer []byte // for content
}

// New returns an empty file system: a root directory and lost+found. Nothing is written before
// Begin and Finish.
func New() *Writer {
	w := empty()
	for range firstInode - 1 {
		w.inodes.add()
	}
	w.touchAll()
	w.addHidden(journalInode, journalBlocks)
	w.addHidden(bootInode, BootSize/BlockSize)
	w.makeDir(rootInode, rootInode, Attr{Mode: 0o755})
	_, _ = w.Mkdir(Root, "lost+found", Attr{Mode: 0o700}) // cannot fail: the root is empty
	return w
}

// empty returns a Writer without any file.
func empty() *Writer {
	w := &Writer{
		names: newNameTable(), dirExtents: make(map[uint32][]extent),
		nodes: make(map[uint32][]uint32), longLinks: make(map[uint32]string),
		setIDs: make(map[string]uint32), known: newSums(),
		block: make([]byte, BlockSize), buffer: make([]byte, bufferSize),
	}
	w.entries.add()
	w.sets.add()
	w.inodes.add()
	return w
}

// fixedUUID is the UUID of every file system. To tell disks apart, use their serial numbers.
var fixedUUID = [16]byte{0x6b, 0x75, 0x62, 0x65, 0x76, 0x69, 0x47, 0x72,
	0x94, 0x2d, 0x64, 0x69, 0x73, 0x6b, 0x00, 0x01}

// Begin starts the next level. Whole blocks are written to dst, each at most once, at their place
// on the disk. If dst is nil, changes only update the state, as for a level that was written
// before.
func (w *Writer) Begin(dst io.WriterAt) {
	w.dst = dst
	w.level++
}

// Level is the number of the level that Begin started, from 1 on.
func (w *Writer) Level() int { return w.level }

// Size is the size of the file system in bytes at the last Finish.
func (w *Writer) Size() int64 { return int64(w.groups) * blocksPerGroup * BlockSize }

// addInode allocates the next inode.
func (w *Writer) addInode() (uint32, error) {
	if w.inodes.n >= maxGroups*inodesPerGroup || w.inodes.n == math.MaxUint32 {
		return 0, errFull
	}
	number := w.inodes.add()
	w.touch(number)
	return number, nil
}

// touch notes that an inode has to be written.
func (w *Writer) touch(number uint32) {
	i := (number - 1) / inodesPerBlock
	for uint32(len(w.touched)) <= i/64 {
		w.touched = append(w.touched, 0)
	}
	w.touched[i/64] |= 1 << (i % 64)
}

func (w *Writer) touchAll() {
	for number := uint32(1); number < w.inodes.n; number++ {
		w.touch(number)
	}
}

// addHidden makes a file without a name, whose blocks are reserved and not written: the journal
// except its superblock, and the space at BootOffset.
func (w *Writer) addHidden(number uint32, blocks uint32) {
	n := w.inodes.at(number)
	start, got, _ := w.alloc.take(blocks) // there is room in the first group
	n.set(Attr{Mode: 0o600}, TypeFile)
	n.size, n.links = uint64(blocks)*BlockSize, 1
	n.seconds = madeAt
	n.at, n.extents = uint32(len(w.extents)), 1
	w.extents = append(w.extents, extent{0, start, got})
}

// scratch returns a block of zeros, until the next call.
func (w *Writer) scratch() []byte {
	clear(w.block)
	return w.block
}

var zeros [holeSize]byte

// emit writes a block of metadata unless the disk has the same content already.
func (w *Writer) emit(block uint32, p []byte) error {
	sum := sha256.Sum256(p)
	key := blockSum(sum[:16])
	old, known := w.known.get(block)
	if known && key == old || !known && bytes.Equal(p, zeros[:BlockSize]) {
		return nil
	}
	w.known.set(block, key)
	return w.write(block, p)
}

// write writes whole blocks.
func (w *Writer) write(block uint32, p []byte) error {
	if w.dst == nil || len(p) == 0 {
		return nil
	}
	n, err := w.dst.WriteAt(p, int64(block)*BlockSize)
	if err == nil && n < len(p) {
		return io.ErrShortWrite
	}
	return err
}
