package layer

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"kubevirt.io/disk/registry/transport"
)

// A table of contents describes the tar archive in its layer. Scanning and unpacking read the
// archive, but a guest reads what the table says. So both are compared.

// Comparison compares a table of contents with its archive while the archive is read. nil: there is
// no table.
type Comparison struct {
	toc   *Contents
	wrong map[string]bool // files whose content differs or was not read to its end
}

// Comparison begins to compare.
func (l *Contents) Comparison() *Comparison {
	return &Comparison{toc: l, wrong: make(map[string]bool)}
}

// Content returns the content of a file of the archive. The caller reads all of it. If a name comes
// several times, the last one counts, as in the table.
func (c *Comparison) Content(e *Entry, content io.Reader) io.Reader {
	if c == nil {
		return content
	}
	delete(c.wrong, e.Name)
	p := c.toc.Files[e.Name]
	if p == nil || p.Size != e.Size || p.Size == 0 { // Differs reports that
		return content
	}
	if c.wrong[e.Name] = true; e.Sparse { // no table describes one, and its holes have no end
		return content
	}
	return &comparedFile{in: content, name: e.Name, table: p.Table, hash: sha256.New(), of: c}
}

// Differs says where the table differs from the archive, whose content was passed to Content. "":
// it does not differ.
func (c *Comparison) Differs(archive *List) string {
	if c == nil {
		return ""
	}
	toc := c.toc.List
	for _, name := range slices.Sorted(maps.Keys(archive.Entries)) {
		a, t := archive.Entries[name], toc.Entries[name]
		switch {
		case t == nil:
			return fmt.Sprintf("it lacks %.100q", name)
		case a.Kind != t.Kind || a.Link != t.Link || a.Kind == EntryFile && a.Size != t.Size:
			return fmt.Sprintf("%.100q is another file in it", name)
		case a.Kind == EntryFile && c.wrong[name]:
			return fmt.Sprintf("%.100q has other content in it", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(toc.Entries)) {
		if archive.Entries[name] == nil {
			return fmt.Sprintf("it has %.100q, which the archive lacks", name)
		}
	}
	if !sameNames(archive.removed, toc.removed) || !sameNames(archive.opaque, toc.opaque) {
		return "it removes other files of the layers below"
	}
	return ""
}

// sameNames compares sets.
func sameNames(a, b []string) bool {
	set := func(names []string) []string {
		names = slices.Sorted(slices.Values(names))
		return slices.Compact(names)
	}
	return slices.Equal(set(a), set(b))
}

// comparedFile is the content of a file, whose chunks are compared with the table.
type comparedFile struct {
	in    io.Reader
	name  string
	table []byte // of the chunks left
	at    int64  // bytes read of the first of them
	hash  hash.Hash
	bad   bool
	of    *Comparison
}

var noBytes [32 << 10]byte

func (f *comparedFile) Read(p []byte) (int, error) {
	n, err := f.in.Read(p)
	for came := p[:n]; len(came) > 0 && len(f.table) > 0; {
		c := ChunkAt(f.table, 0)
		part := came[:min(int64(len(came)), c.Size-f.at)]
		came, f.at = came[len(part):], f.at+int64(len(part))
		if c.Zeros {
			for len(part) > 0 {
				some := part[:min(len(part), len(noBytes))]
				f.bad = f.bad || !bytes.Equal(some, noBytes[:len(some)])
				part = part[len(some):]
			}
		} else {
			f.hash.Write(part)
		}
		if f.at < c.Size {
			break
		}
		f.bad = f.bad || !c.Zeros && [DigestSize]byte(f.hash.Sum(nil)) != c.Sum
		f.hash.Reset()
		f.table, f.at = f.table[TableEntry:], 0
		if len(f.table) == 0 && !f.bad {
			delete(f.of.wrong, f.name)
		}
	}
	return n, err
}

// Compare says where the table of contents of a layer differs from its archive. "": it does not
// differ. Unless whole is set, it leaves out the content of files that lie where the table says:
// the table has digests for it. memory is as for Open.
func (l *Contents) Compare(ctx context.Context, from *transport.Blob, whole bool, memory int64) (
	why string, err error) {
	if !whole {
		why, err := l.compareHeaders(ctx, from)
		if why == "" || err != nil {
			return "", err
		}
		// This was read by ranges, which verifies nothing. It may have been changed on its way.
	}
	return l.compareAll(ctx, from, memory)
}

// compareAll reads all of the layer, and verifies it.
func (l *Contents) compareAll(ctx context.Context, from *transport.Blob, memory int64) (why string,
	err error) {
	in, err := Open(ctx, from, new(atomic.Int64), memory)
	if err != nil {
		return "", err
	}
	defer in.Close()
	c, list, plain := l.Comparison(), (*List)(nil), false
	head, err := in.Peek()
	if err == nil {
		plain, err = IsPlain(from.Desc, head)
	}
	if err == nil && !plain {
		list, err = c.readTar(in, nil)
	}
	if err == nil {
		err = in.Finish()
	}
	var content *contentError
	switch err = in.Explain(err); {
	case ctx.Err() != nil: // the comparison was not completed
		return "", ctx.Err()
	case errors.As(err, &content):
		return content.Error(), nil
	case err != nil:
		return "", err
	case plain:
		return NoArchive, nil
	}
	return c.Differs(list), nil
}

// NoArchive is the difference for a layer with a table that is a disk by itself.
const NoArchive = "the layer is no archive"

// readTar reads the archive with its content, except for files that skip leaves out.
func (c *Comparison) readTar(r io.Reader, skip func(p *Part) (bool, error)) (*List, error) {
	return ReadTar(r, DiskDir, func(e *Entry, content io.Reader) error {
		content = c.Content(e, content)
		if p := c.toc.Files[e.Name]; skip != nil && p != nil && c.wrong[e.Name] && !e.Sparse {
			if skips, err := skip(p); skips || err != nil {
				delete(c.wrong, e.Name)
				return err
			}
		}
		if e.Sparse {
			return nil
		}
		_, err := io.Copy(io.Discard, content)
		return err
	})
}

// compareHeaders leaves out as much content as it can. If it cannot leave out any, it reports that
// and reads nothing.
func (l *Contents) compareHeaders(ctx context.Context, from *transport.Blob) (why string,
	err error) {
	a := &archive{ctx: ctx, of: from}
	for _, p := range l.Files {
		if len(p.Table) > 0 {
			a.codec = p.Codec
			a.cuts = append(a.cuts, ChunkAt(p.Table, 0).Off)
		}
	}
	if len(a.cuts) == 0 {
		return "there is no content in it", nil
	}
	slices.Sort(a.cuts)
	a.cuts = append(a.cuts, from.Desc.Size)
	defer a.close()
	c := l.Comparison()
	list, err := (*List)(nil), a.open(0)
	if err == nil {
		list, err = c.readTar(a, a.skip)
	}
	switch {
	case ctx.Err() != nil:
		return "", ctx.Err()
	case a.failed != nil:
		return "", a.failed
	case err != nil:
		return err.Error(), nil
	}
	return c.Differs(list), nil
}

// archive is the content of a layer that is compressed in chunks. It is read from its beginning, in
// pieces that end where a file's content begins; that content is left out. The compressed data is a
// sequence of members (RFC 1952, section 2.2) or frames (RFC 8878, section 3.1), so it can be cut
// where one begins.
type archive struct {
	ctx      context.Context
	of       *transport.Blob
	codec    string
	cuts     []int64 // where pieces end; ascending, the layer's end last
	off, end int64   // of the present piece
	n        int64   // bytes of its content that were read
	in       io.Reader
	raw      io.ReadCloser
	closeIn  func()
	failed   error // of reading the layer
	next     *Part // the part whose content comes next and is skipped; nil: none
}

// open begins the piece at off.
func (a *archive) open(off int64) (err error) {
	a.close()
	i, _ := slices.BinarySearch(a.cuts, off+1)
	if i == len(a.cuts) {
		return io.ErrUnexpectedEOF
	}
	a.off, a.end, a.n, a.next = off, a.cuts[i], 0, nil
	a.raw = a.of.Stream(a.ctx, off, a.end-off)
	in := bufio.NewReaderSize(&failingRaw{a.raw, &a.failed}, 64<<10)
	if a.codec == codecGzip {
		a.in, err = gzip.NewReader(in)
		return err
	}
	z, err := zstd.NewReader(in, zstd.WithDecoderMaxWindow(maxZstdWindow),
		zstd.WithDecoderLowmem(true), zstd.WithDecoderConcurrency(1))
	if err == nil {
		a.in, a.closeIn = z, z.Close
	}
	return err
}

func (a *archive) close() {
	if a.closeIn != nil {
		a.closeIn()
	}
	if a.raw != nil {
		_ = a.raw.Close() // it was only read
	}
	a.raw, a.closeIn = nil, nil
}

// failingRaw remembers a read error, so that it is not taken for an error of the content.
type failingRaw struct {
	io.Reader
	failed *error
}

func (f *failingRaw) Read(p []byte) (int, error) {
	n, err := f.Reader.Read(p)
	if err != nil && err != io.EOF {
		*f.failed = err
	}
	return n, err
}

func (a *archive) Read(p []byte) (int, error) {
	for len(p) > 0 {
		if err := a.ctx.Err(); err != nil {
			return 0, err
		}
		n, err := a.in.Read(p)
		a.n += int64(n)
		switch {
		case n > 0:
			return n, nil
		case err == io.EOF && a.end < a.of.Desc.Size:
			if err := a.open(a.end); err != nil {
				return 0, err
			}
		case err != nil:
			return 0, err
		}
	}
	return 0, nil
}

// skip reports whether the content of the file begins here. Then it is left out.
func (a *archive) skip(p *Part) (bool, error) {
	a.next = nil
	first := ChunkAt(p.Table, 0)
	here := first.Off == a.off && first.Inner == a.n
	if !here && first.Off == a.end && first.Inner == 0 {
		var one [1]byte
		n, err := io.ReadFull(a.in, one[:])
		switch {
		case err == io.EOF: // Read or Seek goes on in another piece
			here = true
		case err != nil:
			return false, err
		}
		if n > 0 {
			a.in = io.MultiReader(bytes.NewReader(one[:n]), a.in)
		}
	}
	if here && p.Size > 1 { // a tar.Reader does not seek over less
		a.next = p
	}
	return a.next != nil, nil
}

// Seek lets a tar.Reader leave out the content of a file, except for its last byte.
func (a *archive) Seek(off int64, whence int) (int64, error) {
	p := a.next
	switch {
	case p == nil || whence != io.SeekCurrent:
		return 0, errors.New("nothing is left out")
	case off == 0:
		return 0, nil
	case off != p.Size-1:
		return 0, errors.New("the archive has another size for a file")
	}
	i := len(p.Table)/TableEntry - 1
	last := ChunkAt(p.Table, i)
	begin := p.Size - last.Size // offset in the file of the byte at last.Off
	for ; last.Zeros && i > 0; i-- {
		before := ChunkAt(p.Table, i-1)
		if before.Off != last.Off {
			break
		}
		begin -= before.Size
	}
	if last.Off != a.off {
		if err := a.open(last.Off); err != nil {
			return 0, err
		}
	}
	a.next = nil
	skip := last.Inner + p.Size - 1 - begin - a.n
	if skip < 0 {
		return 0, errors.New("the chunks of a file do not follow each other")
	}
	_, err := io.CopyN(io.Discard, struct{ io.Reader }{a}, skip)
	return off, err
}
