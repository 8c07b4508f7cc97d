package unpack

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"slices"

	"kubevirt.io/disk/disk/foreign"
)

// A stream-optimised VMDK image says twice where the grains of the disk are: by their markers, and
// by tables as in every VMDK image. Programs that read it at random, such as QEMU, use the tables.
// So both are compared, and an image with a difference is refused.

// vmdkTableSize is the size of a grain table in bytes.
const vmdkTableSize = vmdkTable * 4

// vmdkTables are the grain tables that are not empty, in order: a digest of all of them, and a
// number for each.
type vmdkTables struct {
	sum     hash.Hash
	numbers []uint32
	empty   []uint32 // numbers of the empty tables
}

// add adds a table. Grains of zeros count as missing, because both read the same.
func (t *vmdkTables) add(number uint32, table []byte, zeroGrains bool) {
	for e := table; zeroGrains && len(e) > 0; e = e[4:] {
		if binary.LittleEndian.Uint32(e) == 1 {
			clear(e[:4])
		}
	}
	if len(bytes.Trim(table, "\x00")) == 0 {
		t.empty = append(t.empty, number)
		return
	}
	t.sum.Write(table)
	t.numbers = append(t.numbers, number)
}

// vmdkComparison compares the tables with the grains. For each table it keeps a few bytes.
type vmdkComparison struct {
	entries int64 // of the grain directory

	// made are the tables as the markers give them, numbered in the order of the disk. now is the
	// last one, which is not complete yet.
	made   vmdkTables
	now    []byte
	number int64

	// said are the tables of the image. They are numbered as made if they come before the grains,
	// and otherwise by their sectors, because the directory comes last.
	said        vmdkTables
	directory   []byte
	directoryAt uint64 // sector
	footer      foreign.VMDKHeader
	footerEnd   int64 // bytes; 0: there is none
	endsAt      int64 // where the end marker is
	wrong       bool  // a difference was found
	head        foreign.VMDKHeader
}

func (c *vmdkComparison) init(h foreign.VMDKHeader) {
	span := h.Grain * vmdkTable
	c.head, c.entries = h, (h.Capacity+span-1)/span
	c.made.sum, c.said.sum, c.now = sha256.New(), sha256.New(), make([]byte, vmdkTableSize)
}

// grain adds a grain of the disk, and the sector of its marker. Grains come in order.
func (c *vmdkComparison) grain(n, sector int64) {
	if n/vmdkTable != c.number {
		c.flush()
		c.number = n / vmdkTable
	}
	c.wrong = c.wrong || sector >= 1<<32
	binary.LittleEndian.PutUint32(c.now[n%vmdkTable*4:], uint32(sector))
}

func (c *vmdkComparison) flush() {
	c.made.add(uint32(c.number), c.now, false)
	c.made.empty = nil
	clear(c.now)
}

// same reports whether the tables agree with the markers.
func (c *vmdkComparison) same(atEnd bool) bool {
	c.flush()
	if c.wrong || !bytes.Equal(c.made.sum.Sum(nil), c.said.sum.Sum(nil)) {
		return false
	}
	if !atEnd {
		return slices.Equal(c.made.numbers, c.said.numbers)
	}
	footer := c.footer
	footer.Directory = c.head.Directory
	if footer != c.head || c.footer.Directory != c.directoryAt || c.footerEnd != c.endsAt ||
		c.directory == nil || len(c.made.numbers) != len(c.said.numbers) {
		return false
	}
	next := 0
	for i := range c.entries {
		at := binary.LittleEndian.Uint32(c.directory[i*4:])
		if next < len(c.made.numbers) && int64(c.made.numbers[next]) == i {
			if at != c.said.numbers[next] {
				return false
			}
			next++
			continue
		}
		// The sectors of tables ascend, because the tables were read in that order.
		if _, empty := slices.BinarySearch(c.said.empty, at); at != 0 && !empty {
			return false
		}
	}
	return next == len(c.made.numbers)
}

// readTables reads what follows a marker, up to end.
func (v *vmdkReader) readTables(kind uint32, end int64) error {
	c := &v.compare
	switch kind {
	case vmdkGT:
		for table := make([]byte, vmdkTableSize); end-v.pos >= vmdkTableSize; {
			if int64(len(c.said.numbers)+len(c.said.empty)) >= 2*c.entries {
				return refuse("is a damaged VMDK image: it has too many tables")
			}
			sector := v.pos / vmdkSector
			if err := v.take(table); err != nil {
				return err
			}
			c.wrong = c.wrong || sector >= 1<<32
			c.said.add(uint32(sector), table, v.head.ZeroGrains())
		}
	case vmdkGD:
		if end-v.pos < c.entries*4 {
			return refuse("is a damaged VMDK image: its grain directory has %d bytes", end-v.pos)
		}
		c.directory, c.directoryAt = make([]byte, c.entries*4), uint64(v.pos/vmdkSector)
		return v.take(c.directory)
	case vmdkFooter:
		if end-v.pos < vmdkSector {
			return refuse("is a damaged VMDK image: its footer has %d bytes", end-v.pos)
		}
		head := make([]byte, vmdkSector)
		if err := v.take(head); err != nil {
			return err
		}
		var err error
		if c.footer, err = foreign.ReadVMDKHeader(head); err != nil {
			return refuse("%v", err)
		}
		c.wrong = c.wrong || string(head[:4]) != vmdkMagic
		c.footerEnd = end
	}
	return nil
}
