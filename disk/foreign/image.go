package foreign

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Format is the format of an image.
type Format string

const (
	VHDX Format = "vhdx"
	VHD  Format = "vhd"
	VDI  Format = "vdi"
	VMDK Format = "vmdk" // one file, with grains that are not compressed
)

// parsers find the tables of the formats.
var parsers = map[Format]func(ctx context.Context, f *file) (*layout, error){
	VHDX: parseVHDX, VHD: parseVHD, VDI: parseVDI, VMDK: parseVMDK,
}

// Options bound what an image may claim. The zero value works.
type Options struct {
	MaxVirtualSize int64 // bytes; 0: 64 TiB
}

// Reader is the file of an image. Any number of goroutines may call it.
type Reader interface {
	// ReadAt fills p, or returns an error and how many bytes it has read, as an io.ReaderAt does.
	ReadAt(ctx context.Context, p []byte, off int64) (int, error)
}

// Error says why an image is refused.
type Error struct {
	Reason string // completes the sentence "<file> ..."
	Action string // what to do about it
}

func (e *Error) Error() string { return e.Reason + "; " + e.Action }

// layout is what a parser finds in a file. All numbers are bytes.
type layout struct {
	size   int64 // of the disk
	block  int64 // length of a block; the last one of the disk may be shorter
	unit   int64 // blocks lie at multiples of this; at least 1/65534 of a block
	before int64 // bytes in the file that belong to a block and lie before it
	entry  int64 // length of a table's entry for one block
	// table finds the entries of a block and of those that follow it: at is where the first one is
	// in the file, n how many are there in a row. at 0: there are none, and these blocks are zeros.
	// A nil table: the disk is one block, at the beginning of the file.
	table func(ctx context.Context, block int64) (at, n int64, err error)
	// place returns where a block lies, by its entry; -1: nowhere, so the block is zeros.
	place func(block int64, entry []byte) (int64, error)
	taken []span // ranges of the metadata
}

// span is a range of a file.
type span struct {
	name     string
	off, end int64
}

func (s span) overlaps(o span) bool { return s.off < o.end && o.off < s.end }

// Image is an open, validated image. Any number of goroutines may call its methods.
type Image struct {
	*layout
	file   *file
	stored int64
}

// Open reads and validates an image of fileSize bytes. A fault of the image is an *Error. Other
// errors are those of r. Reads after Open do not use ctx.
func Open(ctx context.Context, format Format, r Reader, fileSize int64, opt Options) (*Image,
	error) {
	parse := parsers[format]
	if parse == nil {
		return nil, fmt.Errorf("no reader for the format %q", format)
	}
	f := &file{what: strings.ToUpper(string(format)), r: r, size: fileSize}
	l, err := parse(ctx, f)
	if err != nil {
		return nil, f.explain(err)
	}
	limit := opt.MaxVirtualSize
	if limit <= 0 {
		limit = maxSize
	}
	if l.size > limit {
		return nil, f.unsupported("raise the limit if you trust the image",
			"of a disk of %d bytes, more than the limit of %d", l.size, limit)
	}
	if err := f.checkBlocks(l.blocks()); err != nil {
		return nil, err
	}
	im := &Image{layout: l, file: f}
	if err := im.validate(ctx); err != nil {
		return nil, f.explain(err)
	}
	return im, nil
}

// maxSize is the largest size of a disk: 64 TiB.
const maxSize = 64 << 40

// maxBlocks bounds the length of the table, so that going through it takes only seconds. VMware's
// largest disk has this many grains of 64 KiB.
const maxBlocks = maxSize / (64 << 10)

func (f *file) checkBlocks(n int64) error {
	if n > maxBlocks {
		return f.unsupported(byQEMU, "of %d blocks, which are too many to check", n)
	}
	return nil
}

// Size is the size of the disk in bytes.
func (im *Image) Size() int64 { return im.size }

// Stored is how many bytes of the disk the file has.
func (im *Image) Stored() int64 { return im.stored }

// validate goes through the whole table once.
func (im *Image) validate(ctx context.Context) error {
	for i, s := range im.taken {
		if s.off < 0 || s.end < s.off || s.end > im.file.size {
			return im.file.damaged("its %s at %d runs past the end of the file", s.name, s.off)
		}
		for _, o := range im.taken[:i] {
			if s.overlaps(o) {
				return im.file.damaged("its %s at %d overlaps its %s", s.name, s.off, o.name)
			}
		}
	}
	all, err := newClaims(im.file, im.file.size, im.before+im.block, im.unit)
	if err != nil {
		return err
	}
	return im.walk(ctx, 0, im.blocks(), func(i, at int64) error {
		if at < 0 {
			return nil
		}
		here := span{off: at - im.before, end: at + im.length(i)}
		for _, s := range im.taken {
			if here.overlaps(s) {
				return im.file.damaged("block %d of the disk lies at %d, in its %s", i, at, s.name)
			}
		}
		if !all.add(here.off) {
			return im.file.damaged("block %d of the disk lies at %d, where another one is", i, at)
		}
		im.stored += im.length(i)
		return nil
	})
}

func (l *layout) blocks() int64 { return (l.size + l.block - 1) / l.block }

// length is how many bytes a block has.
func (l *layout) length(block int64) int64 { return min(l.block, l.size-block*l.block) }

// errStop ends walk early.
var errStop = errors.New("enough")

// tablePiece is how much of a table is read at once. Bytes.
const tablePiece = 24 << 10

// walk calls f for the blocks from first on, and before end, with their places.
func (im *Image) walk(ctx context.Context, first, end int64, f func(block, at int64) error) error {
	if im.table == nil {
		return f(0, 0)
	}
	var buf []byte
	for i := first; i < end; {
		if err := ctx.Err(); err != nil {
			return err
		}
		table, n, err := im.table(ctx, i)
		if err != nil {
			return err
		}
		if n = min(n, end-i); table == 0 {
			for ; n > 0; i, n = i+1, n-1 {
				if err := f(i, -1); err != nil {
					return err
				}
			}
			continue
		}
		n = min(n, tablePiece/im.entry)
		if int64(len(buf)) < n*im.entry {
			buf = make([]byte, n*im.entry)
		}
		part := buf[:n*im.entry]
		if err := im.file.read(ctx, part, table); err != nil {
			return err
		}
		for ; len(part) > 0; i, part = i+1, part[im.entry:] {
			at, err := im.place(i, part[:im.entry])
			switch {
			case err != nil:
				return err
			case at >= 0 && (at%im.unit != 0 || at > im.file.size-im.length(i)):
				return im.file.damaged("block %d of the disk lies at %d, and the file has %d "+
					"bytes", i, at, im.file.size)
			}
			if err := f(i, at); err != nil {
				return err
			}
		}
	}
	return nil
}

// Run describes the bytes of the disk from off on, at most length of them: at is where they lie in
// the file in one piece, or -1 if they are zeros.
func (im *Image) Run(ctx context.Context, off, length int64) (at, n int64, err error) {
	if off < 0 || length <= 0 || off >= im.size {
		return -1, 0, fmt.Errorf("a run of %d bytes at %d of %d", length, off, im.size)
	}
	end := min(off+length, im.size)
	first, n := off/im.block, end-off
	err = im.walk(ctx, first, (end+im.block-1)/im.block, func(i, place int64) error {
		next := at
		if i == first {
			if at = place; at >= 0 {
				at += off % im.block
			}
			return nil
		}
		if next >= 0 {
			next += i*im.block - off
		}
		if place != next {
			n = i*im.block - off
			return errStop
		}
		return nil
	})
	if err != nil && err != errStop {
		return -1, 0, im.file.explain(err)
	}
	return at, n, nil
}

// ReadAt reads the disk. It reads len(p) bytes or fails. A read across the end returns the bytes
// before the end, and io.EOF.
func (im *Image) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if off >= im.size {
		return 0, io.EOF
	}
	var short error
	if int64(len(p)) > im.size-off {
		p, short = p[:im.size-off], io.EOF
	}
	for done := 0; done < len(p); {
		at, n, err := im.Run(ctx, off+int64(done), int64(len(p)-done))
		if err != nil {
			return done, err
		}
		part := p[done : done+int(n)]
		if at < 0 {
			clear(part)
		} else if err := im.file.read(ctx, part, at); err != nil {
			return done, err
		}
		done += len(part)
	}
	return len(p), short
}

// file is the file of an image.
type file struct {
	what string // the title of its format
	r    Reader
	size int64
}

// damaged is the error of an image that contradicts itself.
func (f *file) damaged(format string, args ...any) error {
	return &Error{Reason: fmt.Sprintf("is a damaged %s image: %s", f.what,
		fmt.Sprintf(format, args...)), Action: "fetch or build it again"}
}

// unsupported is the error of an image that may be intact. action says what to do.
func (f *file) unsupported(action, format string, args ...any) error {
	return &Error{Reason: fmt.Sprintf("is a %s image %s", f.what, fmt.Sprintf(format, args...)),
		Action: action}
}

// byQEMU is the action for an image that QEMU may be able to read.
const byQEMU = "convert it with \"qemu-img convert -O qcow2\""

// hasParent is the error of an image that has only its differences from another one.
func (f *file) hasParent() error {
	return f.unsupported("merge the two first, or convert it where both are, with \"qemu-img "+
		"convert -O qcow2\"", "that has only what differs from another image, its parent")
}

// errShort is a read past the end of the file.
var errShort = errors.New("the file ends too early")

// read fills p.
func (f *file) read(ctx context.Context, p []byte, off int64) error {
	if off < 0 || off > f.size-int64(len(p)) {
		return errShort
	}
	n, err := f.r.ReadAt(ctx, p, off)
	switch {
	case n == len(p):
		return nil
	case err == nil || errors.Is(err, io.EOF):
		return errShort // the file has become shorter
	}
	return err
}

func (f *file) part(ctx context.Context, off, n int64) ([]byte, error) {
	p := make([]byte, n)
	return p, f.read(ctx, p, off)
}

// explain says that an image is cut off.
func (f *file) explain(err error) error {
	if errors.Is(err, errShort) {
		return f.damaged("it is cut off after %d bytes", f.size)
	}
	return err
}

// claims are the places of equally long ranges of a file that must not overlap. The file is cut
// into pieces of that length. At most one range begins in a piece, so one number for each piece is
// enough.
type claims struct {
	length, unit int64
	begins       []uint16 // for each piece: the unit, from 1 on, where a range begins; 0: none
}

// maxClaims bounds the memory of claims to 64 MiB.
const maxClaims = 32 << 20

func newClaims(f *file, size, length, unit int64) (*claims, error) {
	n := size/length + 1
	if n > maxClaims {
		return nil, f.unsupported(byQEMU, "of %d bytes in blocks of %d, which are too many to "+
			"check", size, length)
	}
	return &claims{length: length, unit: unit, begins: make([]uint16, n)}, nil
}

// add claims the range at off, which is a multiple of the unit and inside the file. It returns
// false if the range overlaps another one.
func (c *claims) add(off int64) bool {
	i, unit := off/c.length, off%c.length/c.unit+1
	free := c.begins[i] == 0 &&
		(i == 0 || int64(c.begins[i-1]) <= unit) &&
		(i+1 == int64(len(c.begins)) || c.begins[i+1] == 0 || int64(c.begins[i+1]) >= unit)
	if free {
		c.begins[i] = uint16(unit)
	}
	return free
}
