package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/qcow2"
)

// Arrival writes the disk of an image whose file is read once, from its beginning to its end, such
// as a file in a layer of a container image. It keeps no copy of the file.
//
//	a := NewArrival(...)
//	for !a.Done() { a.Pass(ctx, the file, from its beginning) }
//
// One pass is usually enough. A qcow2 file needs two or three if its tables lie behind the clusters
// that they map. The image is checked while it is read. If a check fails when the disk is half
// written, Destination.Finish removes the disk.
//
// A foreign image (Options.Foreign) has its parts in any order. So its file is first copied to
// os.TempDir.
type Arrival struct {
	name    string
	size    int64 // of the file
	opt     ArrivalOptions
	to      *Destination
	begun   bool // the destination is ready
	done    bool
	virtual int64
	qcow2   *qcow2.Arrival
	format  Format
}

// ArrivalOptions say what to make from the file.
type ArrivalOptions struct {
	Options
	// Original keeps the file as it is, whatever its format.
	Original bool
	// Raw means that the file is a raw disk, whatever its content looks like.
	Raw bool
	// Below is the arrival of the backing file. It must be done, and have the same destination. If
	// Below is nil, an image that names a backing file is refused with a *BackingError.
	Below *Arrival
}

// BackingError says that an image needs another file first. Nothing was written.
type BackingError struct {
	Image string
	File  string // its backing file, always in the same directory tree
}

func (e *BackingError) Error() string {
	return fmt.Sprintf("%q needs its backing file %q", e.Image, e.File)
}

// BackingOf returns the backing file that an image names, resolved in the same way as for serving.
// head is the beginning of the image's file: qcow2.HeadSize bytes, or all of a shorter file. For a
// file that names no backing file, or cannot be such an image, BackingOf returns "".
func BackingOf(name string, head []byte, size int64) string {
	if !qcow2.IsQcow2(head) {
		return ""
	}
	q, err := qcow2.NewArrival(head, size, qcow2.Options{})
	if err != nil {
		return ""
	}
	claim, _ := q.Backing()
	if claim == "" {
		return ""
	}
	file, err := backingName(name, claim)
	if err != nil {
		return ""
	}
	return file
}

// NewArrival prepares to write the content of a file of that name and size. size -1: unknown.
func NewArrival(name string, size int64, to *Destination, opt ArrivalOptions) *Arrival {
	return &Arrival{name: name, size: size, to: to, opt: opt}
}

// Done tells whether the disk is complete.
func (a *Arrival) Done() bool { return a.done }

// Format is the format of the file. It is known after a pass.
func (a *Arrival) Format() Format { return a.format }

// VirtualSize is the size of the disk in bytes. It is known after a pass.
func (a *Arrival) VirtualSize() int64 { return a.virtual }

// Pass reads the file once.
func (a *Arrival) Pass(ctx context.Context, in io.Reader) error {
	length := int64(qcow2.HeadSize)
	if a.size >= 0 {
		length = min(a.size, length)
	}
	head := make([]byte, length)
	switch n, err := io.ReadFull(in, head); {
	case a.size < 0 && (err == io.EOF || err == io.ErrUnexpectedEOF):
		head = head[:n]
	case err != nil:
		return a.short(int64(n), err)
	}
	in = io.MultiReader(bytes.NewReader(head), in)
	if a.qcow2 == nil {
		if err := a.recognise(head); err != nil {
			return err
		}
	}
	if IsForeign(a.format) && !a.opt.Original {
		return a.expand(ctx, in)
	}
	if !a.begun {
		if err := a.begin(ctx); err != nil {
			return err
		}
		a.begun = true
	}
	if a.qcow2 == nil {
		return a.copy(ctx, in)
	}
	w, done := a.to.writer(a.qcow2.ClusterSize() >= 4096)
	defer done()
	if err := a.qcow2.Pass(ctx, in, a.guest(w)); err != nil {
		if errors.As(err, new(*qcow2.FormatError)) {
			return refuseQcow2(a.name, err)
		}
		return fmt.Errorf("%s: %w", a.name, err)
	}
	if a.done = a.qcow2.Done(); a.done && a.to.device == 0 {
		return rememberCopy(a.to.file)
	}
	return nil
}

// guest writes the disk. Zeros become holes if no backing file is below them.
func (a *Arrival) guest(w *rawfile.Writer) qcow2.Guest {
	if a.opt.Below == nil {
		return qcow2.Guest{Write: func(p []byte, off int64) error {
			_, err := w.Store(p, off)
			return a.to.explain(err, a.virtual)
		}}
	}
	return qcow2.Guest{
		Write: func(p []byte, off int64) error { return a.to.explain(w.Write(p, off), a.virtual) },
		Zero: func(off, length int64) error {
			return a.to.explain(a.to.zero(off, length), a.virtual)
		},
	}
}

// recognise decides the kind of the file by its first bytes.
func (a *Arrival) recognise(head []byte) error {
	a.format, a.virtual = FormatRaw, a.size
	m := detect(head[:min(len(head), headSize)], nil)
	switch {
	case a.opt.Raw:
	case m != nil && m.format == FormatQcow2:
		return a.openQcow2(head)
	case m != nil && m.kind == kindForeign && a.opt.Foreign:
		a.format = m.format
		return nil
	case m != nil:
		return m.refuse(a.name, useNamed)
	case len(head) == 0 || !HasRawExtension(a.name) &&
		looksLikeText(head[:min(len(head), headSize)]):
		return refuseUnknown(a.name, head, useNamed)
	}
	if limit := a.opt.maxVirtualSize(); a.size > limit {
		return &Error{Name: a.name, Format: FormatRaw,
			Reason: fmt.Sprintf("has %d bytes, more than the limit of %d", a.size, limit)}
	}
	return a.checkRawSize()
}

// checkRawSize checks the size of a raw disk. It accepts an unknown size.
func (a *Arrival) checkRawSize() error {
	if a.size%disk.SectorSize != 0 && a.size >= 0 {
		return &Error{Name: a.name, Format: FormatRaw,
			Reason: fmt.Sprintf("has a size of %d bytes, which is not a multiple of %d", a.size,
				disk.SectorSize),
			Action: "build the image again if it is incomplete"}
	}
	return nil
}

// openQcow2 starts with a qcow2 image.
func (a *Arrival) openQcow2(head []byte) error {
	a.format = FormatQcow2
	q, err := qcow2.NewArrival(head, a.size, qcow2.Options{MaxVirtualSize: a.opt.maxVirtualSize()})
	if err != nil {
		return refuseQcow2(a.name, err)
	}
	if a.opt.Original {
		return nil
	}
	a.virtual = q.Size()
	if a.virtual%disk.SectorSize != 0 {
		return &Error{Name: a.name, Format: FormatQcow2,
			Reason: fmt.Sprintf("has a virtual size of %d bytes, which is not a multiple of %d",
				a.virtual, disk.SectorSize),
			Action: "resize it with \"qemu-img resize\""}
	}
	claim, format := q.Backing()
	if claim != "" {
		if err := a.checkBacking(claim, Format(format)); err != nil {
			return err
		}
	}
	a.qcow2 = q
	return nil
}

// checkBacking refuses an image whose backing file is missing, or checks the backing file.
func (a *Arrival) checkBacking(claim string, format Format) error {
	refuse := func(reason string, args ...any) error {
		return &Error{Name: a.name, Format: FormatQcow2, Reason: fmt.Sprintf(reason, args...),
			Action: "rebase it with \"qemu-img rebase\", or flatten it with \"qemu-img convert\""}
	}
	name, err := backingName(a.name, claim)
	if err != nil {
		return refuse("names the backing file %q: %v", claim, err)
	}
	switch below := a.opt.Below; {
	case format != FormatRaw && format != FormatQcow2:
		return refuse("names the format %q for its backing file %q, and only raw and qcow2 are "+
			"supported", string(format), name)
	case below == nil:
		return &BackingError{Image: a.name, File: name}
	case path.Clean(below.name) != name:
		return refuse("needs the backing file %q, not %q", name, below.name)
	case below.format != format:
		return refuse("says that its backing file %q is %s, and it is %s", name, format,
			below.format)
	}
	return nil
}

// begin makes the destination ready.
func (a *Arrival) begin(ctx context.Context) error {
	switch {
	case a.virtual < 0 && a.to.device > 0:
		return a.to.clear(ctx, a.to.device)
	case a.qcow2 == nil || a.opt.Below == nil:
		return a.to.clear(ctx, max(a.virtual, 0))
	}
	return a.to.extend(ctx, a.opt.Below.virtual, a.virtual)
}

// copy writes the file as it is, with holes for its zeros.
func (a *Arrival) copy(ctx context.Context, in io.Reader) error {
	known := a.size >= 0
	f := newFilling(a.to, 0, max(a.size, 0))
	defer f.stop()
	for ended := false; !ended && (!known || f.off < a.size); {
		p, err := f.Next(ctx)
		if err != nil {
			return err
		}
		if known {
			p = p[:min(int64(len(p)), a.size-f.off)]
		}
		n, err := io.ReadFull(in, p)
		end := f.off + int64(n)
		switch {
		case !known && (err == io.EOF || err == io.ErrUnexpectedEOF):
			ended = true
		case err != nil:
			return a.short(end, err)
		case end > a.opt.maxVirtualSize():
			return &Error{Name: a.name, Format: FormatRaw,
				Reason: fmt.Sprintf("has more than the limit of %d bytes", a.opt.maxVirtualSize())}
		case a.to.device > 0 && end > a.to.device:
			return fmt.Errorf("block device %q has %d bytes, and the disk more", a.to.name,
				a.to.device)
		}
		f.Put(p[:n])
	}
	if err := f.Drain(); err != nil {
		return err
	}
	if !known {
		a.size, a.virtual = f.off, f.off
		if err := a.checkRawSize(); a.format == FormatRaw && err != nil {
			return err
		}
	}
	a.done = true
	if a.format != FormatRaw || a.opt.Raw {
		return nil
	}
	// Some formats can only be recognised by their end.
	head, tail, err := readEnds(io.NewSectionReader(a.to.file, 0, a.size), a.size)
	if err == nil {
		if m := detect(head, tail); m != nil {
			err = a.cut(ctx, m)
		}
	}
	return err
}

// cut removes the footer of a fixed VHD image, which was written as if it were a part of the disk.
func (a *Arrival) cut(ctx context.Context, m *magic) error {
	switch {
	case m.kind != kindForeign || !a.opt.Foreign || a.to.device > 0:
		return m.refuse(a.name, useNamed)
	case a.opt.Original:
		a.format = m.format
		return nil
	}
	img, err := OpenUnnamed(ctx, a.name, a.to.file, a.opt.Options)
	if err != nil {
		return err
	}
	at, n, ok := img.stored(ctx, 0, img.Size())
	if err := img.Close(); err != nil {
		return err
	}
	if !ok || at != 0 || n != img.Size() {
		return m.refuse(a.name, useNamed)
	}
	a.format, a.virtual = m.format, n
	if err := a.to.resize(n); err != nil {
		return err
	}
	return rememberCopy(a.to.file)
}

// expand writes the disk of a foreign image.
func (a *Arrival) expand(ctx context.Context, in io.Reader) (err error) {
	aside, err := Scratch(os.TempDir())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, aside.Finish(nil)) }()
	whole := NewArrival(a.name, a.size, aside, ArrivalOptions{Options: a.opt.Options,
		Original: true})
	if err := whole.Pass(ctx, in); err != nil {
		return InTempDir(err)
	}
	img, err := OpenUnnamed(ctx, a.name, aside.file, a.opt.Options)
	if err != nil {
		return err
	}
	defer img.Close()
	a.virtual = img.Size()
	err = Expand(ctx, img, a.to, nil)
	a.done = err == nil
	return err
}

// short is the error for a file of which only n bytes could be read. If its size is unknown, err
// comes from unpacking, and says what is wrong.
func (a *Arrival) short(n int64, err error) error {
	if a.size < 0 {
		return err
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%s ends after %d of %d bytes: %w", a.name, n, a.size, err)
}
