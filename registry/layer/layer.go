package layer

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"sync/atomic"
	"syscall"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/unpack"
	"kubevirt.io/disk/registry/transport"
)

const (
	// maxEntries bounds the files of a layer. Large distributions have some 300,000.
	maxEntries = 4 << 20
	// MaxName bounds the names that are remembered, in bytes: PATH_MAX.
	MaxName = 4096
	// maxNames bounds all names that are remembered of a layer. Bytes.
	maxNames = 4 << 20
	// maxZstdWindow is how far back a zstd layer may refer, in bytes: the most of "zstd --long".
	maxZstdWindow = 32 << 20
)

// Reader reads the content of a layer, uncompressed. Finish says whether its digest was right.
type Reader struct {
	io.Reader
	Size   int64         // of the decompressed content, in bytes; -1: not known
	Format image.Format  // how the layer is compressed; "": it is not
	raw    io.ReadCloser // the hashed bytes
	close  func()

	elsewhere bool // another endpoint has the layer, too
}

// Open begins a layer. Its first bytes say how it is compressed, because media types may be wrong.
// came counts the bytes of the blob. memory is how far back compressed data may refer: see
// unpack.Options. 0: its default.
func Open(ctx context.Context, b *transport.Blob, came *atomic.Int64, memory int64) (*Reader,
	error) {
	if b.Desc.Size == 0 {
		return nil, errors.New("it is empty")
	}
	ctx, cancel := context.WithCancel(ctx)
	raw := &cancelled{NewReadAhead(&counted{b.Verified(ctx), came}), cancel}
	in := bufio.NewReaderSize(raw, 64<<10)
	r := &Reader{Size: -1, raw: raw, close: func() {},
		elsewhere: b.Again(new(transport.DigestError), 1)}
	// The end of a small layer, and a wrong digest, are for the caller's reads.
	head, err := in.Peek(image.DetectSize)
	if err != nil && err != io.EOF && len(head) == 0 {
		return nil, errors.Join(err, raw.Close())
	}
	if f := unpack.Compressed(head); f == "" {
		r.Reader, r.Size = in, b.Desc.Size
	} else {
		z := unpack.Decompress(f, in, unpack.Options{Memory: memory, Window: maxZstdWindow,
			Beside: true})
		r.Reader, r.Format = decompressed{unpack.Within(ctx, z)}, f
		r.close = func() { _ = z.Close() }
	}
	return r, nil
}

// cancelled cancels the current work when it is closed.
type cancelled struct {
	io.ReadCloser
	cancel context.CancelFunc
}

func (c *cancelled) Close() error {
	c.cancel()
	return c.ReadCloser.Close()
}

// Finish reads the rest, so that the whole layer is hashed.
func (r *Reader) Finish() error {
	if _, err := io.Copy(io.Discard, r.Reader); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, r.raw)
	return err
}

// Explain finds the cause of an error while reading the layer. Content that cannot be parsed may
// have been changed on its way, or cut short: then the cause is a wrong digest, or the connection.
func (r *Reader) Explain(err error) error {
	if errors.As(err, new(*contentError)) {
		if _, rest := io.Copy(io.Discard, r.raw); rest != nil {
			return rest
		}
	}
	return err
}

// Doubt is Explain for an error of the caller who used the content, such as a disk image that is
// not valid. It reads the rest of the layer, and so its digest, only if another endpoint has the
// layer, too, or if the content contradicts the index.
func (r *Reader) Doubt(err error) error {
	err = r.Explain(err)
	switch {
	case err == nil:
	case errors.As(err, new(*DestinationError)), disk.IsNoSpace(err),
		errors.As(err, new(syscall.Errno)):
	case r.elsewhere, errors.Is(err, disk.ErrWrongContent):
		r.close() // nothing reads ahead any more
		_, rest := io.Copy(io.Discard, r.raw)
		if errors.As(rest, new(*transport.DigestError)) {
			return rest
		}
	}
	return err
}

// DestinationError is an error that no other content of the layer would avoid.
type DestinationError struct{ Err error }

func (e *DestinationError) Error() string { return e.Err.Error() }
func (e *DestinationError) Unwrap() error { return e.Err }

// contentError is content that cannot be read in its apparent format.
type contentError struct{ err error }

func (e *contentError) Error() string { return e.err.Error() }
func (e *contentError) Unwrap() error { return e.err }

// decompressed marks the errors of a decompressor.
type decompressed struct{ io.Reader }

func (m decompressed) Read(p []byte) (int, error) {
	n, err := m.Reader.Read(p)
	if errors.As(err, new(*unpack.Error)) {
		err = &contentError{fmt.Errorf("it %w", err)}
	} else if err != nil && err != io.EOF {
		err = &contentError{err}
	}
	return n, err
}

func (r *Reader) Close() error {
	r.close()
	return r.raw.Close()
}

// entryKind is the kind of a tar entry, as far as needed.
type entryKind uint8

const (
	EntryFile entryKind = iota
	EntryLink           // a hard link
	EntryDirectory
	EntryRefused // a symbolic link, a device, ...
)

// Entry is a file of a layer. Its name is clean and relative to the root.
type Entry struct {
	Name    string
	Kind    entryKind
	What    string // of entryRefused: what it is, in words
	Link    string // of entryLink: the name that it stands for
	Size    int64
	Ordinal int  // of the tar entry in its layer
	Sparse  bool // its bytes in the archive are not its content
}

// The names with which a layer removes files of the layers below it (image-spec, layer.md,
// "Whiteouts").
const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh."
	whiteoutOpaque = ".wh..wh..opq"
)

// DiskDir is the directory of the disks in an image.
const DiskDir = "disk"

// Under reports whether a clean name is the directory or below it.
func Under(dir, name string) bool { return name == dir || strings.HasPrefix(name, dir+"/") }

// List is the content of one layer below the directory of the disks.
type List struct {
	dir     string            // the directory of the disks
	Entries map[string]*Entry // by name; if a name comes several times, the last counts
	removed []string          // whiteouts
	opaque  []string          // directories that hide everything below them
	bytes   int               // of all these names, and of those in links
}

// ReadTar reads the tar archive of a layer. If visit is not nil, it is called for each regular
// file, with its name in the image, also outside of the directory of the disks. It may read the
// content.
func ReadTar(r io.Reader, dir string,
	visit func(e *Entry, content io.Reader) error) (*List, error) {
	list := &List{dir: dir, Entries: make(map[string]*Entry)}
	tr := tar.NewReader(r)
	for n := 0; ; n++ {
		h, err := tr.Next()
		if err == io.EOF {
			return list, nil
		}
		if err != nil {
			return nil, &contentError{fmt.Errorf("its tar archive cannot be read: %w", err)}
		}
		if n == maxEntries {
			return nil, &contentError{fmt.Errorf("it has more than %d files", maxEntries)}
		}
		name, err := cleanName(h.Name, dir)
		if err != nil {
			return nil, &contentError{err}
		}
		e := entryOf(h, name, n)
		if h.Size < 0 || h.Size > 1<<60 {
			return nil, &contentError{fmt.Errorf("%.100q has a size of %d bytes", name, h.Size)}
		}
		if err := list.note(e); err != nil {
			return nil, &contentError{err}
		}
		if visit != nil && e.Kind == EntryFile &&
			!strings.HasPrefix(path.Base(name), whiteoutPrefix) {
			if err := visit(e, tr); err != nil {
				return nil, err
			}
		}
	}
}

// MaxShown bounds how many files of a layer are remembered under the directory of the disks.
const MaxShown = 4096

// cleanName is the name under which runtimes unpack the entry. It is an error if the name only
// seems to lie in the directory of the disks, or lies there and does not seem to.
func cleanName(name, dir string) (string, error) {
	clean := strings.TrimPrefix(path.Clean("/"+name), "/")
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." && (Under(dir, clean) || Under(dir, strings.TrimLeft(name, "./"))) {
			return "", fmt.Errorf("it has a file of the name %.100q", name)
		}
	}
	if Under(dir, clean) && (len(clean) > MaxName || strings.IndexByte(clean, 0) >= 0) {
		return "", errors.New("it has a file whose name is too long or has a zero byte")
	}
	return clean, nil
}

func entryOf(h *tar.Header, name string, ordinal int) *Entry {
	e := &Entry{Name: name, Size: h.Size, Ordinal: ordinal}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
		// The library returns the holes of a sparse file as zeros.
		e.Kind, e.Sparse = EntryFile, h.Typeflag == tar.TypeGNUSparse
		for key := range h.PAXRecords {
			e.Sparse = e.Sparse || strings.HasPrefix(key, "GNU.sparse.")
		}
	case tar.TypeLink:
		e.linkTo(h.Linkname)
	case tar.TypeDir:
		e.Kind = EntryDirectory
	case tar.TypeSymlink:
		e.Kind, e.What = EntryRefused, "a symbolic link"
	case tar.TypeBlock, tar.TypeChar:
		e.Kind, e.What = EntryRefused, "a device"
	default:
		e.Kind, e.What = EntryRefused, "not a regular file"
	}
	return e
}

// linkTo makes the entry a hard link. No file has a longer name than a path may have.
func (e *Entry) linkTo(name string) {
	if len(name) > MaxName {
		e.Kind, e.What = EntryRefused, "a hard link to a name that is too long"
		return
	}
	e.Kind, e.Link = EntryLink, strings.TrimPrefix(path.Clean("/"+name), "/")
}

// note remembers the entry if it is relevant for the directory of the disks.
func (l *List) note(e *Entry) error {
	before, old := l.count(), l.Entries[e.Name]
	l.keep(e)
	switch n := l.count(); {
	case old != nil && l.Entries[e.Name] == e:
		l.bytes += len(e.Link) - len(old.Link)
	case n > before:
		l.bytes += len(e.Name) + len(e.Link)
	}
	if l.count() > MaxShown {
		return fmt.Errorf("it has more than %d files under %s/", MaxShown, l.dir)
	}
	if l.bytes > maxNames {
		return fmt.Errorf("the names of its files under %s/ have more than %d bytes", l.dir,
			maxNames)
	}
	return nil
}

func (l *List) count() int { return len(l.Entries) + len(l.removed) + len(l.opaque) }

func (l *List) keep(e *Entry) {
	dir, base := path.Split(e.Name)
	dir = strings.TrimSuffix(dir, "/")
	switch {
	case base == whiteoutOpaque:
		if dir == "" || Under(l.dir, dir) || Under(dir, l.dir) {
			l.opaque = append(l.opaque, dir)
		}
	case strings.HasPrefix(base, whiteoutMeta):
	case strings.HasPrefix(base, whiteoutPrefix):
		if gone := path.Join(dir, strings.TrimPrefix(base, whiteoutPrefix)); Under(l.dir, gone) ||
			Under(gone, l.dir) {
			l.removed = append(l.removed, gone)
		}
	case Under(l.dir, e.Name) || e.Kind != EntryDirectory && Under(e.Name, l.dir):
		l.Entries[e.Name] = e
	}
}

// Shadow is everything in lower layers that the layers read so far, from the top, hide.
type Shadow struct {
	Names map[string]bool // other files have these names, or a whiteout removes them
	Trees map[string]bool // everything below these directories is hidden
	bytes int             // of all these names
}

func NewShadow() *Shadow { return &Shadow{Names: map[string]bool{}, Trees: map[string]bool{}} }

// Shows reports whether a file of this name in a lower layer is visible.
func (s *Shadow) Shows(name string) bool {
	if s.Names[name] {
		return false
	}
	for dir := name; dir != ""; {
		dir = strings.TrimSuffix(dir[:strings.LastIndexByte(dir, '/')+1], "/")
		if s.Trees[dir] {
			return false
		}
	}
	return true
}

// Add adds the names that a layer hides in those below it.
func (s *Shadow) Add(l *List) error {
	hide := func(names map[string]bool, name string) {
		if !names[name] {
			names[name] = true
			s.bytes += len(name)
		}
	}
	for name, e := range l.Entries {
		hide(s.Names, name)
		if e.Kind != EntryDirectory {
			hide(s.Trees, name)
		}
	}
	for _, name := range l.removed {
		hide(s.Names, name)
		hide(s.Trees, name)
	}
	for _, dir := range l.opaque {
		hide(s.Trees, dir)
	}
	if len(s.Names)+len(s.Trees) > 16*MaxShown || s.bytes > 4*maxNames {
		return fmt.Errorf("its layers have too many files under %s/, or too long names", l.dir)
	}
	return nil
}

// readAhead reads some blocks ahead, so that fetching and hashing go on while the content is
// processed.
type readAhead struct {
	inner  io.ReadCloser
	full   chan block
	empty  chan []byte
	stop   chan struct{}
	done   chan struct{}
	now    block
	rest   []byte
	closed bool
}

type block struct {
	data []byte
	n    int
	err  error
}

const (
	aheadBlock  = 256 << 10
	aheadBlocks = 8
)

func NewReadAhead(inner io.ReadCloser) *readAhead {
	r := &readAhead{
		inner: inner,
		full:  make(chan block, aheadBlocks),
		empty: make(chan []byte, aheadBlocks),
		stop:  make(chan struct{}),
		done:  make(chan struct{}),
	}
	for range aheadBlocks {
		r.empty <- make([]byte, aheadBlock)
	}
	go r.run()
	return r
}

func (r *readAhead) run() {
	defer close(r.done)
	for {
		select {
		case data := <-r.empty:
			b := block{data: data}
			for b.n < len(data) && b.err == nil {
				var n int
				n, b.err = r.inner.Read(data[b.n:])
				b.n += n
			}
			r.full <- b // has room: there are no more blocks than that
			if b.err != nil {
				return
			}
		case <-r.stop:
			return
		}
	}
}

func (r *readAhead) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		if r.now.err != nil {
			return 0, r.now.err
		}
		if r.now.data != nil {
			r.empty <- r.now.data
		}
		r.now = <-r.full
		r.rest = r.now.data[:r.now.n]
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// Close waits until nothing is read any more. To make it quick, end the context of the blob.
func (r *readAhead) Close() error {
	if r.closed {
		return nil
	}
	r.closed = true
	close(r.stop)
	<-r.done
	return r.inner.Close()
}

// Target follows hard links within the layer.
func (l *List) Target(e *Entry) *Entry {
	for range 8 {
		if e = l.Entries[e.Link]; e == nil || e.Kind == EntryFile {
			return e
		}
	}
	return nil
}

// counted counts the bytes that are read.
type counted struct {
	io.ReadCloser
	n *atomic.Int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	c.n.Add(int64(n))
	return n, err
}
