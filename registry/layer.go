package registry

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/klauspost/compress/zstd"

	"kubevirt.io/disk/internal/inflate"
)

const (
	// maxEntries bounds the files of a layer. Large distributions have some 300,000.
	maxEntries = 4 << 20
	// maxName bounds the names that are remembered, in bytes: PATH_MAX.
	maxName = 4096
	// maxNames bounds all names that are remembered of a layer. Bytes.
	maxNames = 4 << 20
	// maxZstdWindow is how far back a zstd layer may refer, in bytes: as far as "zstd --long" does
	// at most.
	maxZstdWindow = 32 << 20
)

// layerReader reads the content of a layer, uncompressed. Finish says whether its digest was right.
type layerReader struct {
	io.Reader
	size  int64         // of what comes, in bytes; -1: not known
	raw   io.ReadCloser // what is hashed
	close func()
}

// openLayer begins a layer. Its first bytes say how it is compressed, because media types may be
// wrong. Unless rec is nil, it makes the notes by which a gzip layer can later be read by ranges.
func openLayer(ctx context.Context, b *blob, p *Progress, rec *recorder) (*layerReader, error) {
	if b.desc.Size == 0 {
		return nil, errors.New("it is empty")
	}
	ctx, cancel := context.WithCancel(ctx)
	raw := &cancelled{newReadAhead(&counted{b.verified(ctx), &p.done}), cancel}
	in := bufio.NewReaderSize(raw, 64<<10)
	r := &layerReader{size: -1, raw: raw, close: func() {}}
	head, err := in.Peek(6)
	if err != nil && err != io.EOF {
		return nil, errors.Join(err, raw.Close())
	}
	switch compression(head) {
	case "gzip":
		z := inflate.NewGzip(in)
		r.Reader = marking{z}
		if rec != nil {
			r.Reader = rec.follow(z)
		}
	case "zstd":
		z, err := zstd.NewReader(
			in,
			zstd.WithDecoderMaxWindow(maxZstdWindow),
			zstd.WithDecoderLowmem(true),
			zstd.WithDecoderConcurrency(2),
		)
		if err != nil {
			return nil, errors.Join(err, raw.Close())
		}
		r.Reader, r.close = marking{z}, z.Close
	case "bzip2 or xz":
		return nil, errors.Join(
			errors.New("it is compressed by bzip2 or xz: gzip, zstd and none are supported"),
			raw.Close(),
		)
	default:
		r.Reader, r.size = in, b.desc.Size
	}
	return r, nil
}

// compression recognises compressed content by its beginning; "": it is not compressed.
func compression(head []byte) string {
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		return "gzip"
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}),
		len(head) >= 4 && head[0]&0xf0 == 0x50 && bytes.Equal(head[1:4], []byte{0x2a, 0x4d, 0x18}):
		return "zstd"
	case bytes.HasPrefix(head, []byte("BZh")), bytes.HasPrefix(head, []byte("\xfd7zXZ\x00")):
		return "bzip2 or xz"
	}
	return ""
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
func (r *layerReader) Finish() error {
	if _, err := io.Copy(io.Discard, r.Reader); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, r.raw)
	return err
}

// explain finds the cause of an error while reading the layer. Content that makes no sense was
// perhaps changed on its way: then its digest is wrong.
func (r *layerReader) explain(err error) error {
	var content *contentError
	var digest *DigestError
	if errors.As(err, &content) {
		if _, rest := io.Copy(io.Discard, r.raw); errors.As(rest, &digest) {
			return digest
		}
	}
	return err
}

// contentError is content that cannot be read in its apparent format.
type contentError struct{ err error }

func (e *contentError) Error() string { return e.err.Error() }
func (e *contentError) Unwrap() error { return e.err }

// marking marks the errors that come from a decompressor.
type marking struct{ io.Reader }

func (m marking) Read(p []byte) (int, error) {
	n, err := m.Reader.Read(p)
	if err != nil && err != io.EOF {
		err = &contentError{err}
	}
	return n, err
}

func (r *layerReader) Close() error {
	r.close()
	return r.raw.Close()
}

// entryKind is the kind of a tar entry, as far as it matters.
type entryKind uint8

const (
	entryFile entryKind = iota
	entryLink           // a hard link
	entryDirectory
	entryRefused // a symbolic link, a device, ...
)

// entry is a file of a layer. Its name is clean and relative to the root.
type entry struct {
	name    string
	kind    entryKind
	what    string // of entryRefused: what it is, in words
	link    string // of entryLink: the name that it stands for
	size    int64
	ordinal int  // of the tar entry in its layer
	sparse  bool // its bytes do not lie as they are in the archive
}

// The names with which a layer removes files of the layers below it (image-spec, layer.md,
// "Whiteouts").
const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh."
	whiteoutOpaque = ".wh..wh..opq"
)

// diskDir is the directory of the disks in an image.
const diskDir = "disk"

// under reports whether a clean name is the directory or below it.
func under(dir, name string) bool { return name == dir || strings.HasPrefix(name, dir+"/") }

// layerList is the content of one layer below the directory of the disks.
type layerList struct {
	dir     string            // the directory of the disks
	entries map[string]*entry // by name; if a name comes several times, the last counts
	removed []string          // whiteouts
	opaque  []string          // directories that hide everything below them
	bytes   int               // of all these names, and of those in links
}

// readTar reads the tar archive of a layer. If visit is not nil, it is called for each regular
// file, with its name in the image, whether or not it lies in the directory of the disks. It may
// read the content.
func readTar(
	r io.Reader,
	dir string,
	visit func(e *entry, content io.Reader) error,
) (*layerList, error) {
	list := &layerList{dir: dir, entries: make(map[string]*entry)}
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
			return nil, fmt.Errorf("it has more than %d files", maxEntries)
		}
		name, err := cleanName(h.Name, dir)
		if err != nil {
			return nil, err
		}
		e := entryOf(h, name, n)
		if h.Size < 0 || h.Size > 1<<60 {
			return nil, fmt.Errorf("%.100q has a size of %d bytes", name, h.Size)
		}
		if err := list.note(e); err != nil {
			return nil, err
		}
		if visit != nil && e.kind == entryFile &&
			!strings.HasPrefix(path.Base(name), whiteoutPrefix) {
			if err := visit(e, tr); err != nil {
				return nil, err
			}
		}
	}
}

// maxShown bounds how many files of a layer are remembered under the directory of the disks.
const maxShown = 4096

// cleanName is the name as runtimes unpack it. It is an error if the name only seems to lie in the
// directory of the disks, or lies there and does not seem to.
func cleanName(name, dir string) (string, error) {
	clean := strings.TrimPrefix(path.Clean("/"+name), "/")
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." && (under(dir, clean) || under(dir, strings.TrimLeft(name, "./"))) {
			return "", fmt.Errorf("it has a file of the name %.100q", name)
		}
	}
	if under(dir, clean) && (len(clean) > maxName || strings.IndexByte(clean, 0) >= 0) {
		return "", errors.New("it has a file whose name is too long or has a zero byte")
	}
	return clean, nil
}

func entryOf(h *tar.Header, name string, ordinal int) *entry {
	e := &entry{name: name, size: h.Size, ordinal: ordinal}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
		// The library returns the holes of a sparse file as zeros.
		e.kind, e.sparse = entryFile, h.Typeflag == tar.TypeGNUSparse
		for key := range h.PAXRecords {
			e.sparse = e.sparse || strings.HasPrefix(key, "GNU.sparse.")
		}
	case tar.TypeLink:
		e.linkTo(h.Linkname)
	case tar.TypeDir:
		e.kind = entryDirectory
	case tar.TypeSymlink:
		e.kind, e.what = entryRefused, "a symbolic link"
	case tar.TypeBlock, tar.TypeChar:
		e.kind, e.what = entryRefused, "a device"
	default:
		e.kind, e.what = entryRefused, "not a regular file"
	}
	return e
}

// linkTo makes the entry a hard link. No file has a longer name than a path may have.
func (e *entry) linkTo(name string) {
	if len(name) > maxName {
		e.kind, e.what = entryRefused, "a hard link to a name that is too long"
		return
	}
	e.kind, e.link = entryLink, strings.TrimPrefix(path.Clean("/"+name), "/")
}

// note remembers the entry if it matters for the directory of the disks.
func (l *layerList) note(e *entry) error {
	before, old := l.count(), l.entries[e.name]
	l.keep(e)
	switch n := l.count(); {
	case old != nil && l.entries[e.name] == e:
		l.bytes += len(e.link) - len(old.link)
	case n > before:
		l.bytes += len(e.name) + len(e.link)
	}
	if l.count() > maxShown {
		return fmt.Errorf("it has more than %d files under %s/", maxShown, l.dir)
	}
	if l.bytes > maxNames {
		return fmt.Errorf("the names of its files under %s/ have more than %d bytes", l.dir,
			maxNames)
	}
	return nil
}

func (l *layerList) count() int { return len(l.entries) + len(l.removed) + len(l.opaque) }

func (l *layerList) keep(e *entry) {
	dir, base := path.Split(e.name)
	dir = strings.TrimSuffix(dir, "/")
	switch {
	case base == whiteoutOpaque:
		if dir == "" || under(l.dir, dir) || under(dir, l.dir) {
			l.opaque = append(l.opaque, dir)
		}
	case strings.HasPrefix(base, whiteoutMeta):
	case strings.HasPrefix(base, whiteoutPrefix):
		if gone := path.Join(dir, strings.TrimPrefix(base, whiteoutPrefix)); under(l.dir, gone) ||
			under(gone, l.dir) {
			l.removed = append(l.removed, gone)
		}
	case under(l.dir, e.name) || e.kind != entryDirectory && under(e.name, l.dir):
		l.entries[e.name] = e
	}
}

// shadow is everything that the layers read so far, from the top, hide in those below.
type shadow struct {
	names map[string]bool // other files have these names, or a whiteout removes them
	trees map[string]bool // everything below these directories is hidden
	bytes int             // of all these names
}

func newShadow() *shadow { return &shadow{names: map[string]bool{}, trees: map[string]bool{}} }

// shows reports whether a file of this name in a lower layer is visible.
func (s *shadow) shows(name string) bool {
	if s.names[name] {
		return false
	}
	for dir := name; dir != ""; {
		dir = strings.TrimSuffix(dir[:strings.LastIndexByte(dir, '/')+1], "/")
		if s.trees[dir] {
			return false
		}
	}
	return true
}

// add lays the shadow of a layer over those below it.
func (s *shadow) add(l *layerList) error {
	hide := func(names map[string]bool, name string) {
		if !names[name] {
			names[name] = true
			s.bytes += len(name)
		}
	}
	for name, e := range l.entries {
		hide(s.names, name)
		if e.kind != entryDirectory {
			hide(s.trees, name)
		}
	}
	for _, name := range l.removed {
		hide(s.names, name)
		hide(s.trees, name)
	}
	for _, dir := range l.opaque {
		hide(s.trees, dir)
	}
	if len(s.names)+len(s.trees) > 16*maxShown || s.bytes > 4*maxNames {
		return fmt.Errorf("its layers have too many files under %s/, or too long names", l.dir)
	}
	return nil
}

// readAhead reads some blocks ahead, so that fetching and hashing run beside the work on the
// content.
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

func newReadAhead(inner io.ReadCloser) *readAhead {
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

// Close waits until nothing is read any more. To make that soon, end the context of the blob.
func (r *readAhead) Close() error {
	if r.closed {
		return nil
	}
	r.closed = true
	close(r.stop)
	<-r.done
	return r.inner.Close()
}
