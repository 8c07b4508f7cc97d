package unpack

import (
	"archive/tar"
	"bufio"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"kubevirt.io/disk/disk/image"
)

const (
	// maxBeside is how many bytes of other files an archive may have in addition to the disk.
	maxBeside = 64 << 20
	// maxFiles is how many files an archive may have. With more, it is one of a file system.
	maxFiles = 1024
	// maxPadding is how many bytes may follow the end of an archive: programs for tapes fill up
	// their last block.
	maxPadding = 1 << 20
	// leastRaw is the size of the smallest file that is taken for a raw disk without the name of
	// one. Signatures and keys are smaller, and look the same. Bytes.
	leastRaw = 1 << 20
)

// archive is a tar archive with one disk in it.
type archive struct {
	root   *source // the reader below all wrappings
	from   *bufio.Reader
	tar    *tar.Reader
	opt    Options
	within int // how many wrappings a file of the archive lies in

	files  int
	beside int64  // bytes of other files so far
	found  string // the name of the disk
	other  error  // why a file that is meant as a disk is refused; nil: there is none
	link   string // name of an entry that is no regular file

	disk io.Reader
	end  error        // what Read returns when the disk has ended
	done func() error // frees the decoder
}

// openTar finds the disk in an archive.
func (c *Content) openTar(opt Options) error {
	a := &archive{root: c.root, from: c.in.(*bufio.Reader), opt: opt,
		within: len(c.Formats), done: func() error { return nil }}
	a.tar = tar.NewReader(a.from)
	for a.found == "" {
		h, err := a.next()
		if err == io.EOF {
			return a.noDisk()
		}
		if err != nil {
			return err
		}
		if err := a.consider(h, c); err != nil {
			return err
		}
	}
	c.in, c.close = a, append(c.close, func() error { return a.done() })
	return nil
}

func (a *archive) noDisk() error {
	switch {
	case a.other != nil:
		return a.other
	case a.link != "":
		return refuse("is a tar archive without a disk: %q in it is a link or a device; put the "+
			"disk itself into the archive", a.link)
	}
	return refuse("is a tar archive without a disk: none of its %d files is one; name the disk "+
		"itself", a.files)
}

// next goes to the next regular file.
func (a *archive) next() (*tar.Header, error) {
	for {
		h, err := a.tar.Next()
		if err == io.EOF {
			return nil, a.padding()
		}
		if err != nil {
			return nil, a.explain(err)
		}
		if a.files++; a.files > maxFiles {
			return nil, refuse("is a tar archive of more than %d files, and not of a disk; name "+
				"the disk itself", maxFiles)
		}
		switch h.Typeflag {
		case tar.TypeReg, tar.TypeGNUSparse: // the library returns the holes as zeros
			return h, nil
		case tar.TypeDir, tar.TypeXGlobalHeader:
		case tar.TypeLink, tar.TypeSymlink, tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
			a.link = shown(h.Name) // the size is that of another file
		default: // another type may have content
			a.link = shown(h.Name)
			if err := a.passOver(h); err != nil {
				return nil, err
			}
		}
	}
}

// passOver counts a file that is not the disk.
func (a *archive) passOver(h *tar.Header) error {
	if a.beside += h.Size; a.beside > maxBeside {
		return refuse("is a tar archive with more than %d MiB that are not a disk, such as %q; "+
			"name the disk itself", maxBeside>>20, shown(h.Name))
	}
	return nil
}

// shown shortens a name for a message.
func shown(name string) string { return fmt.Sprintf("%.100s", path.Base(path.Clean("/"+name))) }

// explain tells errors of the archive from those of the reader below.
func (a *archive) explain(err error) error {
	switch {
	case a.root.err != nil, errors.As(err, new(*Error)):
		return err
	case errors.Is(err, tar.ErrHeader), errors.Is(err, tar.ErrFieldTooLong),
		errors.Is(err, tar.ErrWriteTooLong):
		return &Error{Reason: fmt.Sprintf("is a damaged tar archive: %v; fetch it again", err),
			err: err}
	case errors.Is(err, io.ErrUnexpectedEOF):
		return &Error{Reason: "ends in the middle of its tar archive; fetch it again", err: err}
	}
	return err
}

// padding reads what follows the archive. It returns io.EOF if only padding does.
func (a *archive) padding() error {
	n, err := io.CopyN(io.Discard, a.from, maxPadding+1)
	if n > maxPadding {
		return refuse("continues after the end of its tar archive; fetch it again")
	}
	return err
}

// consider decides whether a file is the disk. If not, it counts the file. It reads the beginning
// of the file for that.
func (a *archive) consider(h *tar.Header, c *Content) error {
	kind, in, err := a.kindOf(h)
	switch {
	case err != nil:
		return err
	case kind == isOther:
		return a.passOver(h)
	case a.found != "":
		return errors.Join(in.close(), refuse("is a tar archive with two disks, %q and %q; unpack "+
			"it, and name one of them", a.found, shown(h.Name)))
	}
	a.found, a.disk = shown(h.Name), in.Reader
	c.Name, c.Size = a.found, h.Size
	a.done = in.close
	for _, f := range in.packed {
		c.Formats = append(c.Formats, f)
		c.Name, c.Size = image.UnwrappedName(c.Name), -1
	}
	return nil
}

type kind int

const (
	isOther kind = iota
	isDisk
)

// member is a file of the archive whose beginning was read.
type member struct {
	io.Reader
	packed []image.Format // how it is compressed, the outermost first
	close  func() error
}

// kindOf looks at the beginning of a file.
func (a *archive) kindOf(h *tar.Header) (kind, *member, error) {
	name := shown(h.Name)
	if h.Size == 0 {
		return isOther, nil, nil
	}
	from := &source{r: a.tar}
	in := bufio.NewReaderSize(from, image.DetectSize)
	head, err := in.Peek(image.DetectSize)
	if err != nil && err != io.EOF {
		return isOther, nil, a.explain(err)
	}
	m := &member{Reader: in, close: func() error { return nil }}
	size := h.Size
	isVMDK := false // a VMDK image's content is the guest's, and is never unwrapped
	for f := Compressed(head); f != "" && !isVMDK; f = Compressed(head) {
		if !Unwraps(f, a.within+len(m.packed)) {
			a.note(tooDeep())
			return isOther, nil, m.close()
		}
		d, outer := Decompress(f, in, a.opt), m.close
		m.close = func() error { return errors.Join(d.Close(), outer()) }
		m.packed, size, isVMDK = append(m.packed, f), -1, f == VMDK
		in = bufio.NewReaderSize(d, image.DetectSize)
		m.Reader = in
		if head, err = in.Peek(image.DetectSize); err != nil && err != io.EOF {
			if own := new(Error); !errors.As(err, &own) {
				return isOther, nil, errors.Join(err, m.close())
			}
			a.note(fmt.Errorf("%q in the tar archive %w", name, err))
			return isOther, nil, m.close()
		}
		name = image.UnwrappedName(name)
	}
	if isVMDK || IsDisk(name, head, size) {
		return isDisk, m, nil
	}
	if image.IsImage(image.FormatOf(head)) {
		_, err := image.Detect(name, head)
		a.note(err)
	}
	return isOther, nil, m.close()
}

// IsDisk reports whether a file in an archive is a disk, and not a file that publishers put beside
// a disk, such as a text or a signature. head is the file's beginning, as for image.Detect. A file
// of no known format is a raw disk by its name, or if its size can be a disk's. size -1 is unknown.
func IsDisk(name string, head []byte, size int64) bool {
	base := path.Base(name)
	f, err := image.Detect(base, head)
	switch {
	case err != nil, image.PassOver(base, size, f == image.FormatQcow2),
		strings.HasPrefix(base, "._"): // macOS keeps attributes of another file in these
		return false
	case f != image.FormatRaw || image.HasRawExtension(base):
		return true
	}
	return size < 0 && len(head) == image.DetectSize || size >= leastRaw && size%512 == 0
}

// note remembers why there is no disk.
func (a *archive) note(err error) {
	if a.other == nil {
		a.other = err
	}
}

// Read reads the disk, and checks what follows the disk at its end. An error found there is
// returned again by later reads: io.ReadFull ignores the error of a read that fills the buffer.
func (a *archive) Read(p []byte) (int, error) {
	if a.disk == nil {
		return 0, a.end
	}
	n, err := a.disk.Read(p)
	switch {
	case err == io.EOF:
		a.disk, a.end = nil, a.rest()
		err = a.end
	case err != nil:
		err = a.explain(err)
	}
	return n, err
}

// rest goes through the rest of the archive. It returns io.EOF if there is no other disk.
func (a *archive) rest() error {
	err := a.done()
	a.done = func() error { return nil }
	for err == nil {
		var h *tar.Header
		if h, err = a.next(); err == nil {
			err = a.consider(h, nil)
		}
	}
	return err
}
