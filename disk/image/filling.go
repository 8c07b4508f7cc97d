package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/osfile"
)

const (
	// fillPiece is how many bytes a Filling writes at once.
	fillPiece = 1 << 20
	// fillWriters write side by side, so that one can wait for storage while the other copies.
	fillWriters = 2
	// fillPieces bounds the memory of a Filling: one piece for each writer, and two that are being
	// filled or wait.
	fillPieces = fillWriters + 2
)

// Filling writes a file whose content comes once, from its beginning to its end, such as that of an
// upload. Zeros become holes. One goroutine calls
//
//	p, err := f.Next(ctx)   // a buffer; waits while all buffers are being written
//	f.Put(p[:n])            // the next n bytes of the file
//
// until the end, and then Finish. Others may only call Sync meanwhile. Close closes the file in any
// case.
type Filling struct {
	to     *Destination
	off    int64 // of the next byte
	size   int64 // of the file, as expected; bytes
	parts  chan filled
	unused chan []byte

	pending sync.WaitGroup // pieces that are being written
	writers sync.WaitGroup
	stop    func() // ends the writers, once

	closeOnce sync.Once

	failed chan struct{} // closed with the first error
	once   sync.Once
	err    error // set before failed is closed
}

// filled is a piece on its way to the file.
type filled struct {
	p   []byte
	off int64
}

// OpenFilling opens or makes the file at path, and keeps its first keep bytes. It is an error if
// the file has fewer, or if the path leads through a link: others may be able to write to its
// directory.
func OpenFilling(path string, keep int64) (*Filling, error) {
	file, err := osfile.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && info.Size() < keep {
		err = fmt.Errorf("%q has %d bytes, and should have %d", path, info.Size(), keep)
	}
	if err == nil {
		// The data behind keep may be an earlier attempt's, and zeros would not replace it.
		err = osfile.Retry(func() error { return file.Truncate(keep) })
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return newFilling(&Destination{file: file, name: path}, keep, keep), nil
}

// newFilling goes on at off with a destination of that size. The caller must call stop.
func newFilling(to *Destination, off, size int64) *Filling {
	f := &Filling{to: to, off: off, size: size, failed: make(chan struct{}),
		parts: make(chan filled), unused: make(chan []byte, fillPieces)}
	for range fillPieces {
		f.unused <- nil // Next makes the buffer
	}
	out, done := to.writer(true)
	for range fillWriters {
		f.writers.Go(func() { f.write(out) })
	}
	f.stop = sync.OnceFunc(func() {
		close(f.parts)
		f.writers.Wait()
		done()
	})
	return f
}

// Expect makes room for a file of this size. It returns a *SpaceError if no such file can exist.
func (f *Filling) Expect(size int64) error {
	if size <= f.size {
		return nil
	}
	f.size = size
	return f.to.resize(size)
}

// File is the file that is written. The data of the last Put may not be in it yet: see Drain.
func (f *Filling) File() *os.File { return f.to.file }

// Size is how many bytes Put has got.
func (f *Filling) Size() int64 { return f.off }

// Next returns a buffer of at least one byte for the next data. It returns the error of an earlier
// write, or a *SpaceError if there is no room.
func (f *Filling) Next(ctx context.Context) ([]byte, error) {
	// A buffer may be ready, too, and select would take either. But the error decides.
	if err := f.failure(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	select {
	case <-f.failed:
		return nil, f.err
	case <-ctx.Done():
		return nil, ctx.Err()
	case p := <-f.unused:
		if p == nil {
			p = make([]byte, fillPiece)
		}
		// After a cut, this piece is shorter, so that the next one begins at a multiple of
		// fillPiece: only whole blocks of storage are written fast.
		return p[:fillPiece-f.off%fillPiece], nil
	}
}

// Put appends p, the beginning of a buffer of Next. The caller must not use it any more.
func (f *Filling) Put(p []byte) {
	if len(p) == 0 {
		f.unused <- p[:fillPiece]
		return
	}
	f.pending.Add(1)
	f.parts <- filled{p, f.off}
	f.off += int64(len(p))
}

func (f *Filling) write(out *rawfile.Writer) {
	for part := range f.parts {
		if _, err := out.Store(part.p, part.off); err != nil {
			f.fail(f.to.explain(err, part.off+int64(len(part.p))))
		}
		f.unused <- part.p[:fillPiece]
		f.pending.Done()
	}
}

func (f *Filling) fail(err error) {
	f.once.Do(func() {
		f.err = err
		close(f.failed)
	})
}

// failure is the first error, or nil while there is none.
func (f *Filling) failure() error {
	select {
	case <-f.failed:
		return f.err
	default:
		return nil
	}
}

// Drain waits until everything that was put is in the file.
func (f *Filling) Drain() error {
	f.pending.Wait()
	if err := f.failure(); err != nil {
		return err
	}
	if f.off > f.size {
		f.size = f.off
		return f.to.resize(f.off) // the content may end with a hole
	}
	return nil
}

// Sync makes durable what was in the file before the call. After an error it is unknown what
// storage has: the content is lost.
func (f *Filling) Sync() error {
	err := osfile.Call(f.to.file, unix.Fdatasync)
	if err != nil {
		err = fmt.Errorf("%q did not reach storage: %w", f.to.name, err)
		f.fail(err)
	}
	return err
}

// Finish makes the file durable, with this size. It reads as zeros behind the content.
func (f *Filling) Finish(size int64) error {
	if err := f.Drain(); err != nil {
		return err
	}
	if err := f.to.resize(size); err != nil {
		return err
	}
	return f.Sync()
}

// Close closes the file as it is.
func (f *Filling) Close() error {
	var err error
	f.closeOnce.Do(func() {
		f.stop()
		err = f.to.file.Close()
	})
	return err
}

// Head is what the beginning of a file shows.
type Head struct {
	Format      Format // FormatRaw or FormatQcow2
	VirtualSize int64  // of a qcow2 image, bytes; 0 for a raw disk
}

// HeadSize is how many bytes of a file's beginning CheckHead needs, unless the file is shorter.
const HeadSize = qcow2.HeadSize

// DetectSize is how many bytes of a file's beginning Detect needs, unless the file is shorter.
const DetectSize = headSize

// Detect tells by the first bytes whether a file is a raw disk, a qcow2 image, or a foreign image.
// It refuses any other format that it recognises, and texts, with an *Error. name is for messages.
func Detect(name string, head []byte) (Format, error) {
	head = head[:min(len(head), headSize)]
	m := detect(head, nil)
	switch {
	case m != nil && m.format == FormatQcow2:
		return FormatQcow2, nil
	case m != nil && m.kind == kindForeign:
		return m.format, nil
	case m != nil:
		return "", m.refuse(name, useNamed)
	case len(head) == 0 || looksLikeText(head):
		return "", refuseUnknown(name, head, useNamed)
	}
	return FormatRaw, nil
}

// CheckHead looks for reasons to refuse a qcow2 image when only its beginning has come. size is the
// size of the file, or -1 while it is unknown. An image with a backing file is refused. A refusal
// is an *Error.
func CheckHead(name string, head []byte, size int64, opt Options) (Head, error) {
	a := NewArrival(name, size, nil, ArrivalOptions{Options: opt})
	err := a.openQcow2(head)
	if backing, ok := errors.AsType[*BackingError](err); ok {
		err = &Error{Name: name, Format: FormatQcow2,
			Reason: fmt.Sprintf("needs the backing file %q, which is not part of it", backing.File),
			Action: "flatten it with \"qemu-img convert -O qcow2\""}
	}
	if err != nil {
		return Head{}, err
	}
	return Head{Format: FormatQcow2, VirtualSize: a.virtual}, nil
}

// CheckRaw looks at the end of a raw disk of the given size: some formats can only be recognised
// there. A refusal is an *Error.
func CheckRaw(name string, r io.ReaderAt, size int64) error {
	a := NewArrival(name, size, nil, ArrivalOptions{})
	a.format = FormatRaw
	if err := a.checkRawSize(); err != nil {
		return err
	}
	head, tail, err := readEnds(r, size)
	if err != nil {
		return err
	}
	if m := detect(head, tail); m != nil {
		return m.refuse(name, useNamed)
	}
	return nil
}

// CheckAlone validates a qcow2 image as Open does, and refuses an image with a backing file. It
// returns the virtual size.
func CheckAlone(ctx context.Context, name string, f *os.File, opt Options) (int64, error) {
	img, err := OpenUnnamed(ctx, name, f, opt)
	if err != nil {
		return 0, err
	}
	if img.Format() != FormatQcow2 {
		err = &Error{Name: name, Format: img.Format(), Reason: "is not a qcow2 image"}
	}
	return img.Size(), errors.Join(err, img.Close())
}

// OpenUnnamed opens an image in a file that may have no name. name is for messages. An image with a
// backing file is refused. The caller still has to close f.
func OpenUnnamed(ctx context.Context, name string, f *os.File, opt Options) (*Image, error) {
	return OpenSource(ctx, name, func(_ context.Context, wanted string) (Source, error) {
		if wanted != name {
			return nil, os.ErrNotExist
		}
		return NewUnnamedSource(f)
	}, opt)
}
