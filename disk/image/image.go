package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/words"
)

// DefaultMaxVirtualSize is the limit on an image's virtual size if none is set. Bytes.
const DefaultMaxVirtualSize = 64 << 40

// Options limits what is accepted as an image. The zero value has the documented defaults.
type Options struct {
	MaxVirtualSize int64 // bytes; 0: DefaultMaxVirtualSize
	// Formats sets the formats of files by their names relative to the directory: FormatQcow2, or
	// FormatRaw, whatever the file contains. For any other file the content decides, unless the
	// file was served raw before.
	Formats map[string]Format
	// AtHand says that opening must not fetch the image's metadata from a far source in advance. It
	// is then read as needed.
	AtHand bool
	// Digest returns the digest of a local file whose name is its digest and that nobody changes
	// (Identity.Digest). For any other file it returns "". nil: there are no such files.
	Digest func(name string) string
	// Alike reports whether a file with one digest can replace a file with the other below a disk,
	// because they differ only in parts that no disk shows. nil: none can.
	Alike func(now, before string) bool
	// Named says that a person has named the path for this machine: it may be a link, which is
	// followed, or a block device, which is a raw disk unless Formats says otherwise.
	Named bool
	// Hold locks the image's local files while the image is open, with a shared flock(2). It keeps
	// out programs that write to them in place or replace them. A file that is being written is
	// refused. A file system without such locks is no error.
	Hold bool
	// Foreign also accepts images of other programs' formats, such as VHDX. They can be read and
	// converted. They are not served.
	Foreign bool
	// PassedOver is called for each file that ScanDir does not take for an image. May be nil.
	PassedOver func(why *Error)
}

func (o Options) maxVirtualSize() int64 {
	if o.MaxVirtualSize <= 0 {
		return DefaultMaxVirtualSize
	}
	return o.MaxVirtualSize
}

// Image is a validated, read-only disk image with its backing files. Any number of goroutines may
// call its methods, except Close.
type Image struct {
	name     string
	path     string // "" if the image is no file of this machine
	dir      string
	top      *layer
	flat     *flat // nil: there is one file only, or a file is far away, or there are too many runs
	info     Info
	use      usage
	parallel int
	alike    func(now, before string) bool // Options.Alike, or one that is always false

	close func() error // works once
}

// usage is the most bytes that an image takes when it is expanded. Stored zeros take nothing.
type usage struct{ plain, compressed int64 }

func (u usage) total() int64 { return u.plain + u.compressed }

// Open opens and validates one image. It looks for backing files only in the directory of the
// image's file. If path is a link (Options.Named), that is the directory of the file that it leads
// to. A file that is refused is an *Error.
func Open(path string, opt Options) (*Image, error) {
	o, file, err := openerOf(path, opt)
	if err != nil {
		return nil, err
	}
	defer o.dir.close()
	if err := CheckWhole(filepath.Join(o.dir.path, file)); err != nil {
		err.Name = filepath.Base(path)
		return nil, err
	}
	img, err := o.openFile(file)
	if err == nil {
		img.name = filepath.Base(path)
	}
	return img, err
}

// LayersSuffix ends the name of the record of a disk's layers, which is next to the disk's file.
const LayersSuffix = ".layers"

// StateSuffix ends the name of the state of a persistent disk, which is also next to the disk's
// file.
const StateSuffix = ".state"

// MapSuffixes end the names of the maps of a disk that needs its image: of the live one, and of the
// durable one. They are also next to the disk's file.
var MapSuffixes = []string{".live", ".map"}

// UnitInfix is a part of a directory's name: the name of a disk's file, UnitInfix, the identifier
// of its content. The logical unit keeps there what belongs to that content.
const UnitInfix = ".unit-"

// CheckWhole refuses the file of a disk whose content, as the guest sees it, is not all in the
// file. It also refuses a file of which the system does not let us tell that.
func CheckWhole(path string) *Error {
	part := func(reason, action string) *Error {
		return &Error{Name: filepath.Base(path), Format: FormatRaw, Reason: reason,
			Action: action}
	}
	// A file with such a name may be there unless the system says that it is not.
	untold := func(err error) *Error {
		if err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) ||
			errors.Is(err, unix.ENAMETOOLONG) || errors.As(err, new(*osfile.NotRegularError)) {
			return nil
		}
		return part(fmt.Sprintf("may be only a part of a disk: %v", err),
			"let that file be read, or remove it if it does not belong to a disk")
	}
	if real, err := osfile.ResolvedFile(path); err == nil {
		path = real // records are not read through links
	}
	if _, err := os.Lstat(path + LayersSuffix); err == nil {
		return part("is only a part of a disk that has snapshots, and not what its guest has now",
			"delete the snapshots first, or read the disk from the daemon that serves it")
	} else if e := untold(err); e != nil {
		return e
	}
	var kept struct {
		Complete bool
		Map      string // identifies the content
	}
	err := durable.LoadRecord(path+StateSuffix, &kept)
	if e := untold(err); e != nil && durable.IsUnread(err) {
		return e
	}
	if err == nil && kept.Complete {
		_, err := os.Lstat(filepath.Join(path+UnitInfix+kept.Map, disk.StoredAtomic))
		if err == nil {
			return part("may have half of an atomic write of its guest, in which the daemon ended",
				"serve the disk once, which takes that back")
		}
		return untold(err) // the daemon was killed, and left the disk's maps
	}
	for _, suffix := range MapSuffixes {
		f, err := osfile.OpenRegular(path + suffix)
		head := make([]byte, len(rawfile.MapMagic))
		if err == nil {
			err = osfile.ReadFull(f, head, 0)
			f.Close()
		}
		if string(head) == rawfile.MapMagic {
			return part("is only a part of a disk: it lacks what is still in the image that the "+
				"disk was made of", "read the disk from a daemon that serves it with its image, "+
				"or serve it in copy mode clone until it is complete")
		}
		if errors.Is(err, io.ErrUnexpectedEOF) {
			continue // a shorter file is no map
		}
		if e := untold(err); e != nil {
			return e
		}
	}
	return nil
}

// OpenSource opens and validates an image that is not in a directory of this machine. open opens
// its files: the image by the given name, and backing files by the names in the images' headers.
// These are relative to the place of the image, such as "base.qcow2" or "bases/x.raw", and never
// lead out of it. If a file is missing, open returns fs.ErrNotExist. The image closes the sources.
//
// A file that is refused is an *Error. The error is disk.ErrNotNow if ctx ended before everything
// was read.
func OpenSource(ctx context.Context, name string,
	open func(ctx context.Context, name string) (Source, error), opt Options) (*Image, error) {
	find := func(name string) (Source, *os.File, error) {
		s, err := open(ctx, name)
		return s, nil, err
	}
	o := &opener{find: find, findBelow: find, opt: opt}
	return o.openImage(ctx, name)
}

// openerOf opens the directory of an image that a person named, and returns the name of its file
// there. It follows links to that directory. The caller closes the directory.
func openerOf(path string, opt Options) (o *opener, file string, err error) {
	name, named := filepath.Base(path), path
	if real, err := filepath.EvalSymlinks(path); err == nil && opt.Named {
		path = real
	}
	file = filepath.Base(path)
	if told, ok := opt.Formats[name]; ok && file != name {
		opt.Formats = maps.Clone(opt.Formats)
		opt.Formats[file] = told
	}
	dir, err := openDirectory(filepath.Dir(path))
	if err != nil {
		return nil, "", fmt.Errorf("%s cannot be opened: %w", words.Name(named), errors.Unwrap(err))
	}
	dir.devices = opt.Named
	return openerIn(dir, opt, useNamed), file, nil
}

// openerIn returns an opener for images of a directory. The caller keeps the directory and closes
// it.
func openerIn(dir *directory, opt Options, use fileUse) *opener {
	return &opener{dir: dir, find: dir.open, findBelow: dir.openBeneath, opt: opt, use: use}
}

// openFile makes an Image of a file of the directory.
func (o *opener) openFile(name string) (*Image, error) {
	img, err := o.openImage(context.Background(), name)
	if err == nil {
		img.path, img.dir = filepath.Join(o.dir.path, name), o.dir.path
	}
	return img, err
}

// openImage opens and validates an image.
func (o *opener) openImage(ctx context.Context, name string) (*Image, error) {
	top, err := o.image(ctx, name)
	if err != nil {
		return nil, err
	}
	img := &Image{name: name, top: top, close: sync.OnceValue(top.close), alike: o.opt.Alike}
	if img.alike == nil {
		img.alike = func(string, string) bool { return false }
	}
	top.chain(func(l *layer) { img.parallel = max(img.parallel, l.bytes.Parallel()) })
	if img.use, img.flat, err = top.measure(ctx, img.parallel <= 1); err != nil {
		return nil, errors.Join(refuseUnread(name, top.format, err), top.close())
	}
	img.info = top.describe(img.use)
	img.info.Servable = true
	for _, e := range o.edges {
		e.forget()
	}
	return img, nil
}

// measure returns the space that the layer takes, with the content that shows through from the
// layers below. If index is set and there is a chain, it also returns where everything is. A far
// chain has no use for that: its reads are announced file by file.
func (l *layer) measure(ctx context.Context, index bool) (u usage, chain *flat, err error) {
	if l.content != nil && l.below == nil {
		return l.content.usage(), nil, nil
	}
	if index && l.below != nil {
		if chain, err = l.flatten(ctx); err != nil || chain != nil {
			return chain.usage(), chain, err
		}
	}
	err = l.walk(ctx, 0, l.size, func(_, n int64, kind extentKind) error {
		switch kind {
		case extentPlain:
			u.plain += n
		case extentCompressed:
			u.compressed += n
		}
		return nil
	})
	return u, nil, err
}

// Name is the file's name in the image directory.
func (m *Image) Name() string { return m.name }

// Path is the path of the image's file, or "" if it is no file of this machine.
func (m *Image) Path() string { return m.path }

// Size is the virtual size, a positive multiple of SectorSize.
func (m *Image) Size() int64 { return m.top.size }

// DataSize is how many bytes the image stores. Stored zeros take nothing when it is expanded.
func (m *Image) DataSize() int64 { return m.use.total() }

func (m *Image) Format() Format { return m.top.format }

// Parallel is how many reads of the image are worth having under way at once. It is 1 for a near
// image: only reads of a far image may wait for more than local storage.
func (m *Image) Parallel() int { return max(1, m.parallel) }

// ReadAt reads the image as a disk, with its backing files. At the end it returns the bytes that
// are left, and io.EOF. If content cannot be read or decoded, the error is a *disk.MediumError. If
// ctx ended first, it is disk.ErrNotNow.
func (m *Image) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, &disk.MediumError{Op: "read", Off: off, Length: int64(len(p)),
			Err: syscall.EINVAL}
	}
	if off >= m.top.size {
		return 0, io.EOF
	}
	atEnd := false
	if rest := m.top.size - off; int64(len(p)) > rest {
		p, atEnd = p[:rest], true
	}
	n, err := m.read(ctx, p, off)
	if n < len(p) {
		if err == nil || err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if changed := m.CheckUntouched(); changed != nil {
			err = changed // the file has become shorter
		}
		err = fmt.Errorf("image %q: %w", m.name, err)
		return n, unread(ctx, off+int64(n), int64(len(p)-n), err)
	}
	if atEnd {
		return n, io.EOF
	}
	return n, nil
}

// Extent describes the run at off, at most length bytes and not past the end. No file of the chain
// stores a hole. The next run may be of the same kind. Extent waits as ReadAt does.
func (m *Image) Extent(ctx context.Context, off, length int64) (disk.Extent, error) {
	if off < 0 || length <= 0 || off >= m.top.size {
		return disk.Extent{}, fmt.Errorf("image %q: extent of %d bytes at %d is outside of its "+
			"%d bytes", m.name, length, off, m.top.size)
	}
	n, kind, err := m.extent(ctx, off, length)
	if err != nil {
		return disk.Extent{}, unread(ctx, off, length, fmt.Errorf("image %q: %w", m.name, err))
	}
	return disk.Extent{Length: n, Data: kind != extentHole}, nil
}

// Unverified reports whether data that was read from the image may turn out to be wrong. See
// Unsure.
func (m *Image) Unverified() (unverified bool) {
	m.top.chain(func(l *layer) {
		unverified = unverified || l.unsure != nil && l.unsure.Unverified()
	})
	return unverified
}

// Verify checks the content of the image's files against their digests, unless their reads did so.
// See Unsure.
func (m *Image) Verify(ctx context.Context) error {
	return m.unsure(func(u Unsure) error { return u.Verify(ctx) })
}

// Agree compares the two descriptions of the content, where a file of the image has two. See
// Unsure.
func (m *Image) Agree(ctx context.Context) error {
	return m.unsure(func(u Unsure) error { return u.Agree(ctx) })
}

// unsure calls f for the image's files that have something left to check. It stops at an error.
func (m *Image) unsure(f func(u Unsure) error) error {
	var all []Unsure
	m.top.chain(func(l *layer) {
		if l.unsure != nil {
			all = append(all, l.unsure)
		}
	})
	for _, u := range all {
		if err := f(u); err != nil {
			return fmt.Errorf("image %q: %w", m.name, err)
		}
	}
	return nil
}

// Slow reports whether a read at off has to decompress, in any file of the chain. See Estimator.
func (m *Image) Slow(off int64) bool {
	if m.flat != nil && off < m.top.size {
		return m.flat.slow(off)
	}
	slow, below := false, true
	for l := m.top; below && l != nil && l.content != nil && off < l.size; l = l.below {
		slow, below = l.content.slow(off)
	}
	return slow
}

// Close closes every file of the image. Further calls do nothing.
func (m *Image) Close() error {
	return m.close()
}

// stored tells where the bytes at off are in the image's own file, and how many of length bytes are
// there unchanged and in one run. ok is false if they are not there.
func (m *Image) stored(ctx context.Context, off, length int64) (at, n int64, ok bool) {
	switch l := m.top; {
	case off < 0 || off >= l.size:
		return 0, 0, false
	case l.content == nil:
		return off, min(length, l.size-off), true
	default:
		return l.content.stored(ctx, off, length)
	}
}
