package ext4

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
)

// xattrSet is the extended attributes of a file, or of many files that have the same.
type xattrSet struct {
	key   string // its content; "": the set is free
	attrs []xattr
	bytes int    // with headers
	block uint32 // 0: in the inode, or not allocated yet
	files uint32 // that have the set
	dirty bool
}

type xattr struct {
	index byte   // number of the prefix of its name
	name  string // without the prefix
	value string
}

const (
	xattrMagic     = 0xea020000
	xattrEntry     = 16 // without the name
	xattrHeader    = 32 // of a block
	maxXattrInside = inodeSize - xattrsAt - 4
	maxXattrBlock  = BlockSize - xattrHeader
	maxXattrName   = 255
	// maxXattrs bounds the memory for all different sets, in bytes.
	maxXattrs = 24 << 20
	// maxXattrFiles is how many files may share a block.
	maxXattrFiles = 1024
)

// xattrPrefixes are the prefixes of names that the kernel knows, and the numbers that are stored
// for them.
var xattrPrefixes = []struct {
	prefix string
	index  byte
}{{"user.", 1}, {"trusted.", 4}, {"security.", 6}}

const (
	aclAccess, aclAccessIndex   = "system.posix_acl_access", 2
	aclDefault, aclDefaultIndex = "system.posix_acl_default", 3
)

// encodeXattr turns an attribute into its stored form. ok is false if the mode expresses it, so
// that nothing needs to be stored.
func encodeXattr(name, value string, a *Attr, kind uint16) (x xattr, ok bool, err error) {
	if len(name) > maxXattrName {
		return x, false, fmt.Errorf("the extended attribute %.40q... has a name of %d bytes, "+
			"more than %d", name, len(name), maxXattrName)
	}
	switch name {
	case aclAccess:
		acl, mode, minimal, err := encodeACL(value, a.Mode)
		if err != nil {
			return x, false, fmt.Errorf("the extended attribute %s: %w", name, err)
		}
		a.Mode = mode
		return xattr{aclAccessIndex, "", acl}, !minimal, nil
	case aclDefault:
		if kind != TypeDir {
			return x, false, fmt.Errorf("only a directory has %s", name)
		}
		acl, _, _, err := encodeACL(value, 0)
		if err != nil {
			return x, false, fmt.Errorf("the extended attribute %s: %w", name, err)
		}
		return xattr{aclDefaultIndex, "", acl}, true, nil
	}
	for _, p := range xattrPrefixes {
		if rest, found := strings.CutPrefix(name, p.prefix); found && rest != "" &&
			strings.IndexByte(rest, 0) < 0 {
			return xattr{p.index, rest, value}, true, nil
		}
	}
	return x, false, fmt.Errorf("the extended attribute %q cannot be stored: only user, trusted, "+
		"security and POSIX ACLs can", name)
}

// intern returns the set of a file's extended attributes, and counts the file. An ACL may change
// the mode. Attributes in stay are kept unless a has the same name.
func (w *Writer) intern(a *Attr, kind uint16, stay []xattr) (uint32, error) {
	if len(a.Xattrs) == 0 && len(stay) == 0 {
		return 0, nil
	}
	attrs := make([]xattr, 0, len(a.Xattrs))
	for name, value := range a.Xattrs {
		x, ok, err := encodeXattr(name, value, a, kind)
		if err != nil {
			return 0, err
		}
		if ok {
			attrs = append(attrs, x)
		}
	}
	for _, x := range stay {
		if !slices.ContainsFunc(attrs, func(other xattr) bool {
			return other.index == x.index && other.name == x.name
		}) {
			attrs = append(attrs, x)
		}
	}
	if len(attrs) == 0 {
		return 0, nil
	}
	slices.SortFunc(attrs, func(a, b xattr) int { // the order of the kernel
		return cmp.Or(cmp.Compare(a.index, b.index), cmp.Compare(len(a.name), len(b.name)),
			cmp.Compare(a.name, b.name))
	})
	set := setOf(attrs)
	if set.bytes > maxXattrBlock {
		return 0, fmt.Errorf("its extended attributes take more than the %d bytes that a file "+
			"has for them", maxXattrBlock)
	}
	return w.useSet(set)
}

// setOf makes a set of sorted attributes. It has no block yet.
func setOf(attrs []xattr) xattrSet {
	set := xattrSet{attrs: attrs, bytes: 4}
	var key strings.Builder
	for _, x := range attrs {
		set.bytes += xattrEntry + align4(len(x.name)) + align4(len(x.value))
		fmt.Fprintf(&key, "%d %d %d\n%s%s", x.index, len(x.name), len(x.value), x.name, x.value)
	}
	set.key = key.String()
	return set
}

// useSet counts one more file for a set, and allocates its block.
func (w *Writer) useSet(set xattrSet) (uint32, error) {
	id := w.setIDs[set.key]
	if id == 0 || !set.inside() && w.sets.at(id).files == maxXattrFiles {
		if !set.inside() {
			start, _, err := w.alloc.take(1)
			if err != nil {
				return 0, err
			}
			set.block = start
		}
		if w.xattrBytes += set.bytes; w.xattrBytes > maxXattrs {
			return 0, fmt.Errorf("the extended attributes in the file system have more than %d "+
				"bytes", maxXattrs)
		}
		id = w.sets.add()
		*w.sets.at(id) = set
		w.setIDs[set.key] = id
	}
	w.sets.at(id).files++
	w.changeSet(id)
	return id, nil
}

// release takes a file from a set.
func (w *Writer) release(id uint32) {
	set := w.sets.at(id)
	set.files--
	w.changeSet(id)
	if set.files > 0 {
		return
	}
	if set.block != 0 {
		w.alloc.free(set.block, 1)
	}
	if w.setIDs[set.key] == id {
		delete(w.setIDs, set.key)
	}
	*set = xattrSet{}
}

func (w *Writer) changeSet(id uint32) {
	if set := w.sets.at(id); !set.inside() && !set.dirty {
		set.dirty = true
		w.changedSets = append(w.changedSets, id)
	}
}

func align4(n int) int { return (n + 3) &^ 3 }

// inside reports whether the set is stored in the inode.
func (s *xattrSet) inside() bool { return s.bytes <= maxXattrInside }

// put writes entries at the beginning of p and values at its end. Offsets of values count from
// base.
func (s *xattrSet) put(p []byte, base int, hashes bool) (sum uint32) {
	le := binary.LittleEndian
	at, end := 0, len(p)
	for _, x := range s.attrs {
		end -= align4(len(x.value))
		copy(p[end:], x.value)
		p[at], p[at+1] = byte(len(x.name)), x.index
		le.PutUint16(p[at+2:], uint16(base+end))
		le.PutUint32(p[at+8:], uint32(len(x.value)))
		if hashes {
			hash := x.hash()
			le.PutUint32(p[at+12:], hash)
			sum = sum<<16 ^ sum>>16 ^ hash
		}
		copy(p[at+xattrEntry:], x.name)
		at += xattrEntry + align4(len(x.name))
	}
	return sum
}

// putInside writes the set into the end of an inode.
func (s *xattrSet) putInside(p []byte) {
	binary.LittleEndian.PutUint32(p, xattrMagic)
	s.put(p[4:], 0, false)
}

// writeSet writes the block of a set.
func (w *Writer) writeSet(s *xattrSet) error {
	s.dirty = false
	if s.block == 0 {
		return nil
	}
	le := binary.LittleEndian
	p := w.scratch()
	le.PutUint32(p[0:], xattrMagic)
	le.PutUint32(p[4:], s.files)
	le.PutUint32(p[8:], 1) // blocks
	le.PutUint32(p[12:], s.put(p[xattrHeader:], xattrHeader, true))
	sum := crc32cNumber(crc32cNumber(checksumSeed, s.block), 0) // the number has 64 bits
	le.PutUint32(p[16:], crc32c(sum, p))
	return w.emit(s.block, p)
}

// hash is e_hash of the kernel: over the name, then over the value in words.
func (x *xattr) hash() (sum uint32) {
	for i := range len(x.name) {
		sum = sum<<5 ^ sum>>27 ^ uint32(x.name[i])
	}
	for value := x.value; value != ""; value = value[min(4, len(value)):] {
		var word [4]byte
		copy(word[:], value)
		sum = sum<<16 ^ sum>>16 ^ binary.LittleEndian.Uint32(word[:])
	}
	return sum
}
