package registry

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"sync/atomic"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/unpack"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// The index of an image describes its layers: which files they have, where these lie, and some of
// their content. Scanning and pulling read the layers, but a guest reads what the index says. So
// both are compared before the index is trusted for good.

// disagrees is the error of an index that differs from the layers of its image.
func disagrees(format string, args ...any) error {
	return fmt.Errorf("%w: the index of the image contradicts its layers: %s: push the image again",
		disk.ErrWrongContent, fmt.Sprintf(format, args...))
}

// tocDiffers is the error of a table of contents that differs from its layer; nil if why is "".
func tocDiffers(desc descriptor, why string) error {
	if why == "" {
		return nil
	}
	return fmt.Errorf("%w: the table of contents of the layer %s contradicts its tar archive: %s: "+
		"push the image again", disk.ErrWrongContent, desc.Digest, why)
}

// agree compares an index with the layers of its image: a container of the image has the files of
// the index, where the index says, and no others in the directory of the disks. For layers with
// files of the index, it first reads only the headers, which verifies nothing. So before a bad
// verdict all layers are read and verified: the content may have been changed on its way. The error
// is disk.ErrWrongContent if the index is wrong.
func agree(ctx context.Context, src transport.Source, layers []descriptor, x *layer.Index) error {
	err := agreeBy(ctx, src, layers, x, headersOf)
	if errors.Is(err, disk.ErrWrongContent) {
		err = agreeBy(ctx, src, layers, x, verifiedOf)
	}
	return err
}

// reading returns which files a layer has.
type reading func(ctx context.Context, from *transport.Blob, layers []descriptor, i int) (
	*layer.Contents, error)

// agreeBy is agree; read reads the layers that have files of the index. Other layers are read and
// verified.
func agreeBy(ctx context.Context, src transport.Source, layers []descriptor, x *layer.Index,
	read reading) error {
	files := make(map[string]*layer.IndexFile)
	has := make(map[string]bool) // layers with files of the index
	for i := range x.Files {
		files[x.Files[i].Name], has[x.Files[i].Layer] = &x.Files[i], true
	}
	shade := layer.NewShadow()
	for i := len(layers) - 1; i >= 0; i-- {
		digest := layers[i].Digest.String()
		var list *layer.List
		var err error
		if has[digest] {
			list, err = described(ctx, src, layers, i, files, shade, read)
		} else {
			list, err = listLayer(ctx, src, layers, i, shade)
			if errors.Is(err, errDisk) {
				return disagrees("the layer %s has files that it lacks", digest)
			}
		}
		if err == nil {
			err = shade.Add(list)
		}
		if err != nil {
			return fmt.Errorf("layer %s: %w", digest, err)
		}
	}
	for name := range files {
		return disagrees("no layer shows %q where it says that it lies", name)
	}
	return nil
}

// described compares a layer with those files of the index that lie in it, and removes from files
// those that are visible there.
func described(ctx context.Context, src transport.Source, layers []descriptor, i int,
	files map[string]*layer.IndexFile, shade *layer.Shadow, read reading) (*layer.List, error) {
	desc := layers[i]
	from, err := src.Blob(desc)
	if err != nil {
		return nil, err
	}
	var shown []*layer.Part
	l, err := read(ctx, from, layers, i)
	for try := 1; from.Again(err, try); try++ {
		l, err = read(ctx, from, layers, i)
	}
	if err == nil {
		shown, err = l.Shown(shade)
	}
	if no, ok := errors.AsType[*layer.Unsuited](err); ok {
		return nil, disagrees("the layer %s %s", desc.Digest, no.Why)
	}
	if err != nil {
		return nil, err
	}
	for _, p := range shown {
		for _, name := range p.Names() {
			if f := files[name]; f == nil || f.Layer != p.Layer || f.Offset != p.Offset ||
				f.Size != p.Size {
				return nil, disagrees("the layer %s has %q, %d bytes at %d, which it says "+
					"otherwise", desc.Digest, name, p.Size, p.Offset)
			}
		}
	}
	for _, p := range shown {
		for _, name := range p.Names() {
			delete(files, name)
		}
	}
	return l.List, nil
}

func verifiedOf(ctx context.Context, from *transport.Blob, layers []descriptor, i int) (
	l *layer.Contents, err error) {
	err = from.Read(ctx, func(in io.Reader) error {
		b := bufio.NewReaderSize(in, 64<<10)
		head, err := b.Peek(layer.TarBlock)
		if err != nil && err != io.EOF {
			return err
		}
		r := &layer.Counter{Reader: b}
		l, err = contentsOf(r, head, layers, i, func() int64 { return r.N })
		return unreadable(err)
	})
	return l, err
}

// headersOf reads the headers of a layer by ranges, which verifies nothing.
func headersOf(ctx context.Context, from *transport.Blob, layers []descriptor, i int) (
	*layer.Contents, error) {
	of := &blocks{of: from}
	head := make([]byte, min(layer.TarBlock, of.Size()))
	if _, err := of.ReadAt(ctx, head, 0); err != nil {
		return nil, err
	}
	r := &rangeReader{ctx: ctx, of: of}
	l, err := contentsOf(r, head, layers, i, func() int64 { return r.off })
	if of.failed != nil {
		return nil, of.failed
	}
	return l, unreadable(err)
}

// unreadable turns the error of content that cannot be parsed into one of disagrees.
func unreadable(err error) error {
	if err == nil || errors.As(err, new(*layer.Unsuited)) {
		return err
	}
	return &layer.Unsuited{Why: "cannot be read: " + err.Error()}
}

// contentsOf returns the files of a layer that is not compressed. head is its first block, and at
// returns the offset of r.
func contentsOf(r io.Reader, head []byte, layers []descriptor, i int, at func() int64) (
	*layer.Contents, error) {
	if what := unpack.Compressed(head); what != "" {
		return nil, &layer.Unsuited{Why: "is compressed by " + string(what)}
	}
	if plain, err := layer.IsPlain(layers[i], head); err != nil {
		return nil, err
	} else if plain {
		return layer.PlainContents(layers, i), nil
	}
	return layer.LayTar(r, layers[i], at)
}

// blocks reads a blob in blocks. Each read of the blob is a request.
type blocks struct {
	of     *transport.Blob
	off    int64 // offset of have
	have   []byte
	failed error // of the last request; nil: it has succeeded, or there was none
}

// headerBlock is enough for the headers of most files. Bytes.
const headerBlock = 4 << 10

func (b *blocks) Size() int64 { return b.of.Desc.Size }

func (b *blocks) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if off < b.off || off >= b.off+int64(len(b.have)) {
		next := make([]byte, min(headerBlock, b.Size()-off))
		if b.failed = b.of.Fill(ctx, next, off); b.failed != nil {
			return 0, b.failed
		}
		b.off, b.have = off, next
	}
	return copy(p, b.have[off-b.off:]), nil
}

// verdict says whether the content of an image was found wrong. Then every read of the image fails.
type verdict struct {
	bad  atomic.Pointer[error]
	keep func(why error) error // stores the verdict for later starts
}

// err is why the image must not be read, or nil.
func (v *verdict) err() error {
	if v == nil {
		return nil
	}
	if bad := v.bad.Load(); bad != nil {
		return *bad
	}
	return nil
}

// condemn ends the use of the image if the error is disk.ErrWrongContent. It returns the error.
func (v *verdict) condemn(err error) error {
	if v == nil || !errors.Is(err, disk.ErrWrongContent) ||
		!v.bad.CompareAndSwap(nil, &err) || v.keep == nil {
		return err
	}
	return errors.Join(err, v.keep(err))
}

// wrongName is the file that says why an image must not be served.
func wrongName(digest string) string { return "wrong-" + keptName(digest) + ".txt" }

// comparedName is the file that says that an index agrees with the layers, by the digest of the
// image, or that a table of contents agrees with the headers in its layer, by the digest of its
// descriptor. wholeName is the file that says that the table agrees with all of the layer.
func comparedName(digest string) string { return "compared-" + keptName(digest) }
func wholeName(digest string) string    { return "compared-whole-" + keptName(digest) }

// condemned is the error of an image that an earlier start has found wrong, or nil.
func (k *keptSource) condemned(digest string) error {
	if digest == "" {
		return nil
	}
	why, err := k.read(wrongName(digest), maxRecord)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("whether the image %s was found wrong when it was served: %w", digest,
			err)
	}
	return fmt.Errorf("the image %s was found wrong when it was served: %s; its disks are wrong: "+
		"remove them, and the directory %q with them, before you serve an image that was pushed "+
		"again", digest, why, filepath.Clean(k.dir.Name()))
}

// compare compares the index of the image with its layers, once. It waits for content that cannot
// be fetched now.
func (s *Stream) compare(ctx context.Context) error {
	return s.compareOnce(ctx, "index", []string{comparedName(s.image.Digest)}, func() error {
		return agree(ctx, s.image.Source, s.image.Manifest.Layers, s.index)
	})
}

// streamedFile is a file of the index. Each of its chunks has a digest, so nothing is left to
// verify.
type streamedFile struct {
	*farFile
	stream *Stream
	entry  *layer.IndexFile
}

var _ image.Unsure = (*streamedFile)(nil)

func (f *streamedFile) Unverified() bool { return false }

// Agree compares the index with the layers of the image, and the index's copies of parts of this
// file with the file.
func (f *streamedFile) Agree(ctx context.Context) error {
	if err := f.stream.compare(ctx); err != nil {
		return err
	}
	if f.tables != nil {
		for _, r := range f.tables.Ranges {
			f.WillRead(r[0], r[1])
		}
	}
	return f.verdict.condemn(compareTables(ctx, f.entry.Name, f.tables, f.stored))
}

func (f *streamedFile) Verify(context.Context) error { return nil }

// compareTOCs compares each table of contents with its layer, once, and waits as compare does.
// Unless whole is set, only the headers of the files in the table are read.
func (s *Stream) compareTOCs(ctx context.Context, whole bool) error {
	for _, desc := range s.image.Manifest.Layers {
		if !layer.HasTOC(desc) {
			continue
		}
		// A layer's digest does not say which of the tables in it is meant.
		of, err := json.Marshal(desc)
		if err != nil {
			return err
		}
		digest := transport.DigestOf(of)
		names := []string{wholeName(digest), comparedName(digest)}
		if whole {
			names = names[:1]
		}
		if err := s.compareOnce(ctx, "table of contents", names, func() error {
			return s.compareTOC(ctx, desc, whole)
		}); err != nil {
			return err
		}
	}
	return nil
}

// compareTOC compares a table of contents with its layer.
func (s *Stream) compareTOC(ctx context.Context, desc descriptor, whole bool) error {
	from, err := s.image.Source.Blob(desc)
	if err != nil {
		return err
	}
	l, err := layer.ReadContents(ctx, from, layer.MaxTOCChunks, s.wrongTable)
	if no := new(layer.Unsuited); errors.As(err, &no) { // an earlier version has accepted it
		return tocDiffers(desc, no.Why)
	}
	if err != nil {
		return err
	}
	why, err := l.Compare(ctx, from, whole, s.opt.UnpackMemory)
	if err != nil {
		return err
	}
	return tocDiffers(desc, why)
}

// wrongTable logs that a table of contents is not the one in the manifest.
func (s *Stream) wrongTable(err error) { s.warnOf("table of contents")(err.Error()) }

// compareOnce makes a comparison, unless one of the files names says that it was made before. Then
// it makes the last of these files.
func (s *Stream) compareOnce(ctx context.Context, what string, names []string,
	f func() error) error {
	select {
	case <-s.comparing:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { s.comparing <- struct{}{} }()
	for _, name := range names {
		if _, err := s.kept.dir.Stat(name); err == nil {
			return nil
		}
	}
	for pause := transport.FirstPause; ; pause = min(2*pause, transport.LongPause) {
		err := f()
		switch {
		case err == nil:
			// The disk is right even without that note. Full storage may have room later.
			if err := s.kept.write(names[len(names)-1], nil); err != nil {
				s.warnOf(what)(fmt.Sprintf("%v; it agrees with the layers, and is compared "+
					"with them again when the image is opened next", err))
			}
			return nil
		case errors.Is(err, disk.ErrWrongContent):
			return s.verdict.condemn(err)
		case ctx.Err() != nil:
			return ctx.Err()
		}
		s.retryOf(what)(err, "it cannot be compared with the layers yet", pause)
		if err := transport.PauseFor(ctx, pause); err != nil {
			return err
		}
	}
}
