package image

import (
	"context"
	"errors"
	"fmt"
	"os"

	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/words"
)

// maxChainExtent bounds the length of an extent of a chain. Bytes.
const maxChainExtent = 64 << 20

// layer is one file of an image: the image itself or one of its backing files. It is read-only. Any
// number of goroutines may use it.
type layer struct {
	name    string // relative to the image directory
	format  Format
	source  FormatSource
	looks   *magic // what the content looks like, if something else decided the format
	bytes   Source
	unsure  Unsure   // the source of bytes, if it has checks left to make; nil: it has none
	local   *os.File // the file of bytes; nil if it is not on this machine
	size    int64    // virtual, bytes
	content content  // nil: raw
	header  header
	below   *layer // the backing file, or nil
}

// content reads a format that stores a disk in its own way.
type content interface {
	// ReadAt reads the disk, including the layer below.
	qcow2.Reader
	Size() int64
	// extent describes the run at off, at most length bytes.
	extent(ctx context.Context, off, length int64) (int64, extentKind, error)
	// usage is what the layer itself stores.
	usage() usage
	// stored tells where the bytes at off are in the layer's own file, and how many of length bytes
	// are there unchanged and in one run.
	stored(ctx context.Context, off, length int64) (at, n int64, ok bool)
	// slow reports whether a read of the layer's own content at off has to decompress. If the
	// content is the layer's below, below is set. slow does not wait for storage.
	slow(off int64) (slow, below bool)
	setBelow(l *layer)
	header() header
}

// header is what a format says about an image. The name and the format of the backing file are
// claims of the image: do not trust them.
type header struct {
	version       int
	clusterSize   int64  // bytes; 0: no clusters
	compression   string // of the clusters that are compressed; "" if there are none
	backingName   string // "": none
	backingFormat string
}

// extentKind tells how much it costs to copy a run of bytes.
type extentKind int

const (
	extentHole       extentKind = iota // reads as zeros, nothing is stored
	extentPlain                        // stored as it is
	extentCompressed                   // stored compressed, perhaps far smaller
	// in the layer below, or zeros; layer.extent never returns it
	extentBelow
)

// known says in a message how the layer's format was found.
func (l *layer) known() string {
	switch l.source {
	case SourceServed:
		return "it was served raw before, and a guest may have written what it contains"
	case SourceDevice:
		return "it is a block device"
	case SourceTold:
		return "it is set to be " + string(l.format)
	}
	return "its content is " + string(l.format)
}

// id tells files apart: two layers with the same id are one file.
func (l *layer) id() fileID {
	id := l.bytes.Identity()
	switch {
	case id.Digest != "":
		return fileID{digest: id.Digest}
	case l.local != nil:
		return fileID{dev: id.Dev, ino: id.Ino}
	}
	return fileID{name: l.name}
}

// ReadAt reads the layer as a disk, including its backing files. Past the end it returns io.EOF.
func (l *layer) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	switch {
	case l.content != nil:
		return l.content.ReadAt(ctx, p, off)
	case l.local != nil:
		return l.local.ReadAt(p, off)
	}
	return l.bytes.ReadAt(ctx, p, off)
}

// extent describes the run at off, at most length bytes. A longer run may be possible.
func (l *layer) extent(ctx context.Context, off, length int64) (int64, extentKind, error) {
	length = min(length, l.size-off)
	if length <= 0 {
		return 0, extentHole, fmt.Errorf("extent at %d is outside of %q, which has %d bytes", off,
			l.name, l.size)
	}
	if l.content == nil {
		e, err := l.bytes.Extent(off, length)
		if e.Data {
			return e.Length, extentPlain, err
		}
		return e.Length, extentHole, err
	}
	if l.below != nil {
		// Otherwise the layer would look for the end of its own run, even if the run below is
		// short.
		length = min(length, maxChainExtent)
	}
	n, kind, err := l.content.extent(ctx, off, length)
	if err != nil || kind != extentBelow {
		return n, kind, err
	}
	if l.below == nil || off >= l.below.size { // past its end, the file reads as zeros
		return n, extentHole, nil
	}
	return l.below.extent(ctx, off, n)
}

// walk calls f for the runs of [off, end), in order and without gaps. It reads the tables of each
// layer once. Errors of reading are those of unread.
func (l *layer) walk(ctx context.Context, off, end int64,
	f func(off, n int64, kind extentKind) error) error {
	for off < end {
		n, kind, err := end-off, extentHole, error(nil)
		switch {
		case off >= l.size: // above a shorter backing file
		case l.content == nil:
			n, kind, err = l.extent(ctx, off, end-off)
		default:
			n, kind, err = l.content.extent(ctx, off, min(end, l.size)-off)
		}
		if err != nil {
			return unread(ctx, off, end-off, fmt.Errorf("image %s: %w", words.Name(l.name), err))
		}
		switch {
		case kind != extentBelow:
			err = f(off, n, kind)
		case l.below == nil:
			err = f(off, n, extentHole)
		default:
			err = l.below.walk(ctx, off, off+n, f)
		}
		if err != nil {
			return err
		}
		off += n
	}
	return nil
}

// chain calls f for the layer and for every layer below it.
func (l *layer) chain(f func(*layer)) {
	for ; l != nil; l = l.below {
		f(l)
	}
}

// close closes the layer and every layer below it.
func (l *layer) close() error {
	var errs []error
	l.chain(func(l *layer) { errs = append(errs, l.bytes.Close()) })
	return errors.Join(errs...)
}
