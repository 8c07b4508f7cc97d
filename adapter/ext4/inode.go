package ext4

import "encoding/binary"

// The types of files, as they are in the mode of an inode.
const (
	TypeMask   = 0xf000
	TypeFIFO   = 0x1000
	TypeChar   = 0x2000
	TypeDir    = 0x4000
	TypeBlock  = 0x6000
	TypeFile   = 0x8000
	TypeLink   = 0xa000
	TypeSocket = 0xc000
)

// Inode is the number of a file.
type Inode uint32

// Root is the root directory.
const Root Inode = rootInode

// Attr is the metadata of a file.
type Attr struct {
	Mode     uint16 // permissions, setuid, setgid and sticky bit
	UID, GID uint32
	// Seconds and Nanoseconds are the modification time. A time that an inode cannot store becomes
	// the nearest one that it can.
	Seconds     int64
	Nanoseconds uint32
	// Xattrs are extended attributes by their full names, such as "user.x". ACLs have the form that
	// getxattr(2) returns.
	Xattrs map[string]string
}

const (
	minSeconds = -1 << 31
	// maxSeconds is in 2310. Inodes can store later times, but e2fsck takes them for times before
	// 1970 that an old kernel wrote.
	maxSeconds = 1<<33 + 1<<31 - 1
)

// inode is the Writer's record of a file. Checksum, bitmap and place in the table follow from it.
// It has no pointers, because there may be a million.
type inode struct {
	size     uint64 // bytes; of a device: its number
	seconds  int64
	nanos    uint32
	uid, gid uint32
	links    uint32 // names; not used for a directory
	at       uint32 // index of the first extent, of a short link's target, or in Writer.dirs
	extents  uint32 // how many
	xattrs   uint32 // in Writer.sets; 0: none
	mode     uint16 // 0: the inode is free
}

func (n *inode) kind() uint16 { return n.mode & TypeMask }

// maxShortLink is the longest target that is kept in the inode, in bytes.
const maxShortLink = 59

func (n *inode) shortLink() bool { return n.kind() == TypeLink && n.size <= maxShortLink }

// hasExtents reports whether the inode maps blocks.
func (n *inode) hasExtents() bool {
	return n.kind() == TypeFile || n.kind() == TypeDir || n.kind() == TypeLink && !n.shortLink()
}

const (
	flagExtents = 0x80000
	flagIndex   = 0x1000

	extraSize    = 32    // of an inode, behind the first 128 bytes
	xattrsAt     = 160   // where extended attributes begin in an inode
	maxDirLinks  = 65000 // a directory with more says 1 (dir_nlink)
	maxFileLinks = 65000
)

// putInode writes the inode into p, which has 256 bytes of zeros.
func (w *Writer) putInode(p []byte, number uint32) {
	n := w.inodes.at(number)
	if n.mode == 0 {
		return
	}
	le := binary.LittleEndian
	size, links, flags := n.size, n.links, uint32(0)
	mapped := uint64(len(w.nodes[number]))
	if n.hasExtents() {
		flags |= flagExtents
		for _, e := range w.extentsOf(n) {
			mapped += uint64(e.length)
		}
	}
	switch n.kind() {
	case TypeDir:
		d := w.dirs.at(n.at)
		if links = 2 + d.subdirs; links > maxDirLinks {
			links = 1
		}
		if d.indexed {
			flags |= flagIndex
		}
	case TypeChar, TypeBlock:
		size = 0
	}
	le.PutUint16(p[0:], n.mode)
	le.PutUint16(p[2:], uint16(n.uid))
	le.PutUint32(p[4:], uint32(size))
	for _, off := range [...]int{8, 12, 16, 144} { // access, change, modification, creation
		le.PutUint32(p[off:], uint32(n.seconds))
	}
	extra := n.nanos<<2 | uint32((n.seconds-int64(int32(n.seconds)))>>32)&3
	for _, off := range [...]int{132, 136, 140, 148} {
		le.PutUint32(p[off:], extra)
	}
	le.PutUint16(p[24:], uint16(n.gid))
	le.PutUint16(p[26:], uint16(links))
	le.PutUint32(p[32:], flags)
	le.PutUint32(p[108:], uint32(size>>32))
	le.PutUint16(p[120:], uint16(n.uid>>16))
	le.PutUint16(p[122:], uint16(n.gid>>16))
	le.PutUint16(p[128:], extraSize)
	w.putMap(p[40:100], n, number)
	if n.xattrs != 0 {
		set := w.sets.at(n.xattrs)
		if set.inside() {
			set.putInside(p[xattrsAt:])
		} else {
			le.PutUint32(p[104:], set.block)
			mapped++
		}
	}
	sectors := mapped * (BlockSize / 512)
	le.PutUint32(p[28:], uint32(sectors))
	le.PutUint16(p[116:], uint16(sectors>>32))
	sum := crc32c(inodeSeed(number), p)
	le.PutUint16(p[124:], uint16(sum))
	le.PutUint16(p[130:], uint16(sum>>16))
}

// putMap writes i_block: the extents, the target of a short link, or the number of a device.
func (w *Writer) putMap(p []byte, n *inode, number uint32) {
	switch {
	case n.hasExtents():
		putRoot(p, w.extentsOf(n), w.nodes[number])
	case n.kind() == TypeLink:
		copy(p, w.text.get(n.at, int(n.size)))
	case n.kind() == TypeChar, n.kind() == TypeBlock:
		major, minor := uint32(n.size>>32), uint32(n.size)
		if major < 256 && minor < 256 {
			binary.LittleEndian.PutUint32(p, major<<8|minor)
		} else {
			binary.LittleEndian.PutUint32(p[4:], minor&0xff|major<<8|minor&^0xff<<12)
		}
	}
}

func (n *inode) set(a Attr, kind uint16) {
	n.mode = kind | a.Mode&^TypeMask
	n.uid, n.gid = a.UID, a.GID
	n.seconds, n.nanos = a.Seconds, min(a.Nanoseconds, 999999999)
	if n.seconds < minSeconds {
		n.seconds, n.nanos = minSeconds, 0
	} else if n.seconds > maxSeconds {
		n.seconds, n.nanos = maxSeconds, 0
	}
}
