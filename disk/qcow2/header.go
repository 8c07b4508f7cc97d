package qcow2

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"strings"
)

const (
	magic = 0x514649fb

	headerLenV2 = 72
	headerLenV3 = 104

	minClusterBits         = 9
	maxClusterBits         = 21
	minExtendedClusterBits = 14 // 32 subclusters of at least 512 bytes

	maxL1Bytes       = 32 << 20
	maxRefTableBytes = 8 << 20
	maxNameLen       = 1023
	maxFormatLen     = 15      // QEMU's limit for the name of a backing format
	maxRefcountOrder = 6       // refcounts of 64 bits
	maxSnapshots     = 1 << 16 // QEMU's limit
	snapshotEntry    = 40      // bytes of a snapshot in its table, at least
	maxClusters      = 1 << 30 // of a file: each of its three bitmaps takes at most 128 MiB

	defaultMaxVirtualSize = 64 << 40

	incompatDirty       = 1 << 0
	incompatCorrupt     = 1 << 1
	incompatDataFile    = 1 << 2
	incompatCompression = 1 << 3
	incompatExtendedL2  = 1 << 4
	incompatKnown       = 1<<5 - 1

	extEnd           = 0
	extBackingFormat = 0xe2792aca
	extLUKS          = 0x0537be77
	extDataFile      = 0x44415441
	extFeatureNames  = 0x6803f857

	refcountOrder = 4 // of images that are written: 16 bits

	compressionZlib = 0
	compressionZstd = 1
)

// FormatError says what is wrong with an image.
type FormatError struct {
	Why string
	// what to do with an intact image that is not supported; "" if the image is damaged, or not
	// qcow2
	Action string
}

func (e *FormatError) Error() string {
	if e.Action != "" {
		return e.Why + "; " + e.Action
	}
	return e.Why
}

func bad(format string, args ...any) error {
	return &FormatError{Why: fmt.Sprintf(format, args...)}
}

// unsupported is the error for an image that is intact but cannot be served.
func unsupported(action, format string, args ...any) error {
	return &FormatError{Why: fmt.Sprintf(format, args...), Action: action}
}

const (
	actionConvert = "convert it with \"qemu-img convert -O qcow2\""
	actionDecrypt = "decrypt it with \"qemu-img convert\": a key cannot be given to the server"
)

// IsQcow2 reports whether a file that begins with head is a qcow2 image. It looks at four bytes.
func IsQcow2(head []byte) bool { return len(head) >= 4 && binary.BigEndian.Uint32(head) == magic }

// SizeOf returns the size of the disk of an image, as its beginning head claims. Bytes; 0: head is
// not an image's.
func SizeOf(head []byte) int64 {
	if !IsQcow2(head) || len(head) < headerLenV2 {
		return 0
	}
	return max(0, int64(binary.BigEndian.Uint64(head[24:])))
}

// NameEnd returns where the name of the backing file ends in an image, as its beginning head
// claims. 0: there is no such name, or head is not an image's.
func NameEnd(head []byte) int64 {
	if !IsQcow2(head) || len(head) < headerLenV2 {
		return 0
	}
	be := binary.BigEndian
	at, n := be.Uint64(head[8:]), be.Uint32(head[16:])
	if at == 0 || at > HeadSize || n > maxNameLen {
		return 0
	}
	return int64(at) + int64(n)
}

// header is the content of the header cluster, validated on its own.
type header struct {
	version        int
	clusterBits    uint
	size           int64
	l1Size         uint32
	l1Offset       int64
	refTableOffset int64
	refTableLen    int64 // clusters
	incompatible   uint64
	compression    uint8
	backingFile    string
	backingFormat  string
}

func (h *header) clusterSize() int64 { return 1 << h.clusterBits }
func (h *header) extended() bool     { return h.incompatible&incompatExtendedL2 != 0 }

// entrySize is the length of an L2 entry in bytes.
func (h *header) entrySize() int64 {
	if h.extended() {
		return 16
	}
	return 8
}

// l2Entries is the number of guest clusters that an L2 table maps.
func (h *header) l2Entries() int64 { return h.clusterSize() / h.entrySize() }

// l1Need is the number of L1 entries that the virtual size needs. If Options allow it, an image may
// claim nearly 2^63 bytes, so adding to the size could overflow.
func (h *header) l1Need() int64 { return (h.size-1)/(h.l2Entries()<<h.clusterBits) + 1 }

func readHeader(ctx context.Context, r Reader, fileSize int64, opt Options) (*header, error) {
	var fixed [headerLenV3 + 1]byte
	n, err := r.ReadAt(ctx, fixed[:min(int64(len(fixed)), fileSize)], 0)
	if err != nil && err != io.EOF {
		return nil, fmt.Errorf("reading the header: %w", err)
	}
	switch {
	case n < 4 || !IsQcow2(fixed[:]):
		return nil, bad("is not a qcow2 image")
	case n < headerLenV2:
		return nil, bad("the file ends within the header")
	}
	be := binary.BigEndian
	u32 := func(off int) uint32 { return be.Uint32(fixed[off:]) }
	u64 := func(off int) uint64 { return be.Uint64(fixed[off:]) }
	h := &header{version: int(u32(4))}
	headerLen := int64(headerLenV2)
	switch h.version {
	case 2:
	case 3:
		if n < headerLenV3 {
			return nil, bad("the file ends within the header")
		}
		headerLen = int64(u32(100))
		h.incompatible = u64(72)
		if order := u32(96); order > maxRefcountOrder {
			return nil, bad("refcount_order is %d, over %d", order, maxRefcountOrder)
		}
	case 1:
		return nil, unsupported("convert it with \"qemu-img convert -f qcow -O qcow2\"",
			"its version 1 is not supported, and versions 2 and 3 are")
	default:
		return nil, bad("its version %d is not supported, and versions 2 and 3 are", h.version)
	}
	bits := u32(20)
	if bits < minClusterBits || bits > maxClusterBits {
		return nil, bad("cluster_bits is %d, outside %d to %d", bits, minClusterBits,
			maxClusterBits)
	}
	h.clusterBits = uint(bits)
	if h.version == 3 && (headerLen < headerLenV3 || headerLen > h.clusterSize() ||
		headerLen%8 != 0) {
		return nil, bad("header_length is %d, outside %d to the cluster size", headerLen,
			headerLenV3)
	}
	if fileSize > maxClusters<<h.clusterBits {
		return nil, bad("the file has %d bytes, too many for clusters of %d", fileSize,
			h.clusterSize())
	}
	if err := h.checkFeatures(); err != nil {
		return nil, err
	}
	if method := u32(32); method != 0 {
		return nil, unsupported(actionDecrypt, "the image is encrypted (%s)",
			encryptionName(method))
	}
	if headerLen > headerLenV3 && n > headerLenV3 {
		h.compression = fixed[headerLenV3]
	}
	switch set := h.incompatible&incompatCompression != 0; {
	case h.compression > compressionZstd:
		return nil, bad("compression type %d is unknown", h.compression)
	case set != (h.compression != compressionZlib):
		return nil, bad("the compression type %d and its feature bit contradict each other",
			h.compression)
	}
	limit := opt.MaxVirtualSize
	if limit <= 0 {
		limit = defaultMaxVirtualSize
	}
	switch size := u64(24); {
	case size == 0:
		return nil, unsupported("give it a size with \"qemu-img resize\"", "the virtual size is 0")
	case size > uint64(limit) && size <= 1<<62:
		return nil, unsupported("make it smaller with \"qemu-img resize --shrink\"",
			"the virtual size of %d bytes is over the limit of %d", size, limit)
	case size > uint64(limit):
		return nil, bad("the virtual size of %d bytes is over the limit of %d", size, limit)
	default:
		h.size = int64(size)
	}
	h.l1Size = u32(36)
	if h.l1Offset, err = h.table("L1 table", u64(40), int64(h.l1Size)*8, maxL1Bytes,
		fileSize); err != nil {
		return nil, err
	}
	if need := h.l1Need(); int64(h.l1Size) < need {
		return nil, bad("the L1 table has %d entries, and the virtual size needs %d", h.l1Size,
			need)
	}
	if h.refTableLen = int64(u32(56)); h.refTableLen == 0 {
		return nil, bad("the image has no refcount table")
	}
	if h.refTableOffset, err = h.table("refcount table", u64(48), h.refTableLen<<h.clusterBits,
		maxRefTableBytes, fileSize); err != nil {
		return nil, err
	}
	// Snapshots in the image are not served. But QEMU refuses an image whose snapshot table cannot
	// be where the header says.
	if _, err := h.table("snapshot table", u64(64), int64(u32(60))*snapshotEntry,
		maxSnapshots*snapshotEntry, fileSize); err != nil {
		return nil, err
	}
	return h, h.readNames(ctx, r, fileSize, headerLen, u64(8), u32(16))
}

func encryptionName(method uint32) string {
	switch method {
	case 1:
		return "AES"
	case 2:
		return "LUKS"
	}
	return fmt.Sprintf("method %d", method)
}

func (h *header) checkFeatures() error {
	switch f := h.incompatible; {
	case f&incompatCorrupt != 0:
		return unsupported("repair it with \"qemu-img check -r all\"",
			"the image is marked corrupt (incompatible feature bit 1)")
	case f&incompatDataFile != 0:
		return unsupported(actionConvert, "the image keeps its data in an external file "+
			"(incompatible feature bit 2)")
	case f&^uint64(incompatKnown) != 0:
		unknown := f &^ incompatKnown
		bit := 0
		for unknown>>bit&1 == 0 {
			bit++
		}
		return unsupported(actionConvert, "the image needs an unknown feature (incompatible "+
			"feature bit %d)", bit)
	case f&incompatExtendedL2 != 0 && h.clusterBits < minExtendedClusterBits:
		return bad("extended L2 entries need clusters of at least 16 KiB, and they have %d bytes",
			h.clusterSize())
	}
	return nil
}

// table checks the place of a table. It must be aligned, inside the file, not in the header
// cluster, and at most limit bytes long.
func (h *header) table(what string, offset uint64, length, limit, fileSize int64) (int64, error) {
	switch {
	case length > limit:
		return 0, bad("the %s has %d bytes, over the limit of %d", what, length, limit)
	case offset&uint64(h.clusterSize()-1) != 0: // of an empty table, too, as QEMU has it
		return 0, bad("the %s at %#x is not aligned to a cluster", what, offset)
	case length == 0 && int64(offset) >= 0:
		return 0, nil
	case offset < uint64(h.clusterSize()):
		return 0, bad("the %s at %#x lies in the header", what, offset)
	case offset > uint64(fileSize) || length > fileSize-int64(offset):
		return 0, bad("the %s at %#x, %d bytes, runs past the end of the file", what, offset,
			length)
	}
	return int64(offset), nil
}

// readNames reads the header extensions and the backing file's name. Both are in the first cluster.
func (h *header) readNames(ctx context.Context, r Reader, fileSize, headerLen int64,
	nameOffset uint64, nameLen uint32) error {
	first := make([]byte, min(h.clusterSize(), fileSize))
	if err := readFull(ctx, r, first, 0); err != nil {
		return fmt.Errorf("reading the header: %w", err)
	}
	if headerLen > int64(len(first)) {
		return bad("the file ends within the header")
	}
	ext := first[headerLen:]
	if nameOffset != 0 {
		switch {
		case nameLen == 0 || nameLen > maxNameLen:
			return bad("the backing file name has %d bytes, outside 1 to %d", nameLen, maxNameLen)
		case nameOffset < uint64(headerLen) || nameOffset > uint64(len(first)) ||
			uint64(nameLen) > uint64(len(first))-nameOffset:
			return bad("the backing file name lies outside the header cluster")
		}
		h.backingFile = string(first[nameOffset:][:nameLen])
		if strings.IndexByte(h.backingFile, 0) >= 0 {
			return bad("the backing file name has a NUL in it")
		}
		ext = first[headerLen:nameOffset]
	}
	for len(ext) >= 8 {
		kind, n := binary.BigEndian.Uint32(ext), int64(binary.BigEndian.Uint32(ext[4:]))
		if kind == extEnd {
			return nil
		}
		if n > int64(len(ext)-8) {
			return bad("header extension %#x of %d bytes runs past the header cluster", kind, n)
		}
		body := ext[8 : 8+n]
		switch kind {
		case extBackingFormat:
			if len(body) > maxFormatLen {
				return bad("the backing format name has %d bytes", len(body))
			}
			h.backingFormat = string(body)
		case extLUKS:
			return unsupported(actionDecrypt, "the image is encrypted (LUKS)")
		case extDataFile:
			return unsupported(actionConvert, "the image names an external data file")
		}
		ext = ext[min(8+(n+7)&^7, int64(len(ext))):]
	}
	return nil
}

const (
	sectorBits = 9 // lengths of compressed data are in sectors
	sectorSize = 1 << sectorBits
)

// lengthShift is the bit at which the length begins in an entry for compressed data. The offset is
// in the bits below.
func (h *header) lengthShift() uint { return lengthShift(h.clusterBits) }

func lengthShift(clusterBits uint) uint { return 62 - (clusterBits - 8) }

// compressedRange returns where an entry's compressed data lies. The length is in sectors, so the
// last data of a file may end up to a sector past the file's end.
func (h *header) compressedRange(e uint64) (off, length int64) {
	shift := h.lengthShift()
	off = int64(e & (1<<shift - 1))
	sectors := int64(e&(entryCompressed-1)>>shift) + 1
	return off, sectors<<sectorBits - off&(sectorSize-1)
}
