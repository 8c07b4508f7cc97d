package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/unpack"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// parts are the files of an image without an index, in the form in which they are stored.
type parts struct {
	Files []*layer.Part `json:"files"`
	// Walked are the digests of layers of which nothing was verified yet when the files were found.
	// As long as there are any, no file of the image is trusted: these layers may hide files of
	// others.
	Walked []string `json:"walked,omitempty"`
}

// maxParts limits the stored size of parts, in bytes. It is enough for the most chunks of an image,
// and their names.
const maxParts = 64 << 20

// partsName is the file with the known parts of the image, as durable.EncodeRecord makes it.
// Unverified ones have a name of their own for each repository.
func (s *Stream) partsName(walked bool) string {
	of := keptName(s.image.Digest)
	if walked {
		own := transport.DigestOf([]byte(s.ref.RepositoryText()))
		of += "-" + strings.TrimPrefix(own, "sha256:")
	}
	return "parts-" + of + ".json"
}

// readParts returns the stored parts. nil: none.
func (s *Stream) readParts() *parts {
	for _, walked := range []bool{true, false} {
		content, err := s.kept.read(s.partsName(walked), maxParts)
		known := new(parts)
		if err == nil && durable.DecodeRecord(content, known) == nil {
			return known
		}
	}
	return nil
}

// findParts finds out how to read the files of an image without an index by ranges. If that is not
// possible, it returns a *layer.Unsuited.
func (s *Stream) findParts(ctx context.Context) (*parts, error) {
	if known := s.readParts(); known != nil {
		if fits, err := s.suits(known); fits || err != nil {
			return known, err
		}
	}
	layers := s.image.Manifest.Layers
	for _, desc := range layers { // before anything is fetched
		if err := s.hopeless(desc); err != nil {
			return nil, err
		}
	}
	all := new(parts)
	shade, left, names := layer.NewShadow(), layer.MaxTOCChunks, 0
	for i := len(layers) - 1; i >= 0; i-- {
		l, err := s.contents(ctx, i, left)
		var shown []*layer.Part
		if err == nil {
			shown, err = l.Shown(shade)
		}
		for _, p := range shown { // each name of a file may be a disk with its own chunks
			left -= len(p.Table) / layer.TableEntry * len(p.Names())
			names += len(p.Names())
		}
		if left < 0 {
			err = errors.Join(err, layer.TooManyChunks())
		}
		if no, ok := errors.AsType[*layer.Unsuited](err); ok {
			return nil, &layer.Unsuited{Why: fmt.Sprintf("layer %s %s", layers[i].Digest, no.Why)}
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.image.LayerText(i), err)
		}
		if l.Walked {
			all.Walked = append(all.Walked, layers[i].Digest.String())
		}
		if all.Files = append(all.Files, shown...); names > layer.MaxShown {
			return nil, fmt.Errorf("%s has more than %d files under %s/", s.ref, layer.MaxShown,
				layer.DiskDir)
		}
		if err := shade.Add(l.List); err != nil {
			return nil, fmt.Errorf("%s: %w", s.ref, err)
		}
	}
	content, err := durable.EncodeRecord(all)
	if err == nil {
		err = s.kept.write(s.partsName(len(all.Walked) > 0), content)
	}
	return all, err
}

// suits reports whether the known parts may be served with the present setting. If everything is to
// be verified, parts that were found by trusting TLS count only if they were verified since.
func (s *Stream) suits(known *parts) (bool, error) {
	if s.opt.WhenComplete {
		return true, nil
	}
	unsure, err := s.unsureOf(known)
	for _, u := range unsure {
		if u.notes.now() != noteVerified {
			return false, err
		}
	}
	return true, err
}

// unsureOf opens the layers on which parts without a digest depend.
func (s *Stream) unsureOf(known *parts) (all []*unverified, err error) {
	for _, desc := range s.image.Manifest.Layers {
		if slices.Contains(known.Walked, desc.Digest.String()) {
			u, err := s.unverifiedLayer(desc)
			if err != nil {
				return nil, err
			}
			all = append(all, u)
		}
	}
	return all, nil
}

// smallLayer is the size of the largest layer that is fetched only to look for a disk. Bytes.
const smallLayer = 32 << 20

// contents finds out which files a layer has, and reads as little as possible. left is how many
// chunks of tables of contents the image may still have.
func (s *Stream) contents(ctx context.Context, i, left int) (l *layer.Contents, err error) {
	desc := s.image.Manifest.Layers[i]
	switch {
	case desc.MediaType == layer.MediaEmpty:
		return &layer.Contents{List: new(layer.List)}, nil
	case layer.HasTOC(desc):
		var from *transport.Blob
		if from, err = s.image.Source.Blob(desc); err == nil {
			l, err = layer.ReadContents(ctx, from, left, s.wrongTable)
		}
	case desc.Size <= smallLayer:
		l, err = s.smallLayout(ctx, i)
	default:
		l, err = s.walk(ctx, i)
	}
	if err == nil && len(l.List.Entries) == 0 && layer.IsFile(desc) { // see takeLone
		err = &layer.Unsuited{Why: "is an archive with a disk"}
	}
	return l, err
}

// hopeless reports a layer that must be fetched before it is served, whatever its content.
func (s *Stream) hopeless(desc descriptor) error {
	why := ""
	switch {
	case strings.HasPrefix(string(desc.MediaType), layer.MediaDisk) &&
		strings.Contains(string(desc.MediaType), "+"):
		why = "is a compressed disk"
	case !layer.HasTOC(desc) && desc.Size > smallLayer && !s.opt.WhenComplete:
		why = "has no digests of its chunks"
	default:
		return nil
	}
	return &layer.Unsuited{Why: fmt.Sprintf("layer %s %s", desc.Digest, why)}
}

// smallLayout fetches and verifies the layer.
func (s *Stream) smallLayout(ctx context.Context, i int) (*layer.Contents, error) {
	desc := s.image.Manifest.Layers[i]
	content, err := s.image.Small(ctx, desc, smallLayer)
	if err != nil {
		return nil, err
	}
	if unpack.Compressed(content) == "" {
		r := &layer.Counter{Reader: bytes.NewReader(content)}
		l, err := contentsOf(r, content[:min(len(content), layer.TarBlock)],
			s.image.Manifest.Layers, i, func() int64 { return r.N })
		if err != nil {
			return nil, err
		}
		for _, p := range l.Files {
			p.Chunks = layer.ChunkDigests(content[p.Offset : p.Offset+p.Size])
		}
		return l, nil
	}
	in, err := layer.Open(ctx, memoryBlob(desc, content), new(atomic.Int64), s.opt.UnpackMemory)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	head, err := in.Peek()
	if err != nil {
		return nil, in.Explain(err)
	}
	if plain, err := layer.IsPlain(desc, head); err != nil {
		return nil, in.Explain(err)
	} else if plain {
		return nil, &layer.Unsuited{Why: "is a compressed disk"}
	}
	// A file in it cannot be read by ranges. But another layer may hide it.
	list, err := layer.ReadTar(in, layer.DiskDir, nil)
	if err == nil {
		err = in.Finish()
	}
	return &layer.Contents{List: list}, in.Explain(err)
}

// unpackable reports a disk of the parts that is compressed.
func (s *Stream) unpackable(ctx context.Context) error {
	for _, p := range s.parts.Files {
		if path.Dir(p.Name) != layer.DiskDir || p.Size == 0 {
			continue
		}
		file, err := s.openPart(ctx, path.Base(p.Name))
		if err != nil {
			return err
		}
		head := make([]byte, min(image.DetectSize, p.Size))
		_, err = file.ReadAt(ctx, head, 0)
		if err = errors.Join(orEnd(err), file.Close()); err != nil {
			return fmt.Errorf("%s of %s: %w", p.Name, s.ref, err)
		}
		if f := unpack.Compressed(head); f != "" {
			return &layer.Unsuited{Why: fmt.Sprintf("%s is compressed by %s", p.Name, f)}
		}
	}
	return nil
}

// orEnd ignores the end of a file.
func orEnd(err error) error {
	if err == io.EOF {
		return nil
	}
	return err
}

func memoryBlob(desc descriptor, content []byte) *transport.Blob {
	return transport.NewBlob(desc, func(_ context.Context, off, n int64) io.ReadCloser {
		return io.NopCloser(bytes.NewReader(content[off : off+n]))
	})
}

// walk reads the headers of an unverified layer by ranges.
func (s *Stream) walk(ctx context.Context, i int) (*layer.Contents, error) {
	desc := s.image.Manifest.Layers[i]
	from, err := s.image.Source.Blob(desc)
	if err != nil {
		return nil, err
	}
	head := make([]byte, layer.TarBlock)
	if _, err := from.ReadAt(ctx, head, 0); err != nil {
		return nil, err
	}
	if what := unpack.Compressed(head); what != "" {
		return nil, &layer.Unsuited{Why: "is compressed by " + string(what) +
			", which has to be read from its beginning"}
	}
	u, err := s.unverifiedLayer(desc)
	if err != nil {
		return nil, err
	}
	// Read it again by u: only chunks that u has noted are verified later.
	if _, err := u.ReadAt(ctx, head, 0); err != nil {
		return nil, err
	}
	r := &rangeReader{ctx: ctx, of: u}
	l, err := contentsOf(r, head, s.image.Manifest.Layers, i, func() int64 { return r.off })
	if err != nil {
		return nil, err
	}
	l.Walked = true
	return l, nil
}

// rangeReader reads bytes in order, and skips others without fetching them.
type rangeReader struct {
	ctx context.Context
	of  interface {
		ReadAt(ctx context.Context, p []byte, off int64) (int, error)
		Size() int64
	}
	off int64
}

func (r *rangeReader) Read(p []byte) (int, error) {
	if r.off >= r.of.Size() {
		return 0, io.EOF
	}
	n, err := r.of.ReadAt(r.ctx, p[:min(int64(len(p)), r.of.Size()-r.off)], r.off)
	r.off += int64(n)
	return n, err
}

// Seek lets a tar.Reader skip files.
func (r *rangeReader) Seek(off int64, whence int) (int64, error) {
	if whence != io.SeekCurrent || off < 0 || off > r.of.Size()-r.off {
		return 0, errors.New("the layer ends within a file")
	}
	r.off += off
	return r.off, nil
}

// openPart opens a part by its name in the directory of the disks.
func (s *Stream) openPart(_ context.Context, name string) (image.Source, error) {
	i := slices.IndexFunc(s.parts.Files, func(p *layer.Part) bool {
		return slices.Contains(p.Names(), path.Join(layer.DiskDir, name))
	})
	if i < 0 {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	p := *s.parts.Files[i]
	p.Name = path.Join(layer.DiskDir, name)
	f, err := s.farPart(&p)
	if err != nil {
		return nil, fmt.Errorf("%s of %s: %w", p.Name, s.ref, err)
	}
	unsure, err := s.unsureOf(s.parts)
	toc := slices.ContainsFunc(s.image.Manifest.Layers, layer.HasTOC)
	if err != nil || len(unsure) == 0 && !toc {
		return f, err
	}
	return &unsureFile{farFile: f, stream: s, layers: unsure}, nil
}

// farPart opens a part, with any compression of its layer.
func (s *Stream) farPart(p *layer.Part) (*farFile, error) {
	layers := s.image.Manifest.Layers
	i := slices.IndexFunc(layers, func(d descriptor) bool { return d.Digest.String() == p.Layer })
	if i < 0 || p.Size < 0 || p.Offset < 0 || p.Offset > layers[i].Size ||
		p.Codec == "" && p.Size > layers[i].Size-p.Offset {
		return nil, errors.New("does not lie in its layer")
	}
	from, err := s.image.Source.Blob(layers[i])
	switch {
	case err != nil:
		return nil, err
	case p.Codec != "":
		f, name, err := newPacked(s.opt.Cache, from, p)
		if err != nil {
			return nil, err
		}
		return &farFile{farOptions: s.farOptions(p.Name), blob: f, name: name, chunk: f.unit}, nil
	case p.Chunks != nil:
		x := &layer.Index{ChunkSize: layer.IndexChunk, Digests: layer.SectionOf(p.Chunks)}
		file := &layer.IndexFile{Name: p.Name, Size: p.Size, Offset: p.Offset}
		if int64(len(p.Chunks)) != file.Chunks(layer.IndexChunk)*layer.DigestSize {
			return nil, errors.New("does not have as many digests as chunks")
		}
		return newFarFile(s.opt.Cache, from, x, file, s.farOptions(p.Name))
	}
	u, err := s.unverifiedLayer(layers[i])
	if err != nil {
		return nil, err
	}
	return u.open(p.Offset, p.Size), nil
}

// farOptions are the options for a file of the image.
func (s *Stream) farOptions(name string) farOptions {
	return farOptions{report: s.retryOf(name), verdict: s.verdict, timeout: s.opt.timeout}
}

// reportRetry logs that something has failed, and when it is tried again; see Client.TryAgain.
type reportRetry func(err error, meanwhile string, pause time.Duration)

// retryOf returns the reportRetry of a part of the image.
func (s *Stream) retryOf(what string) reportRetry {
	return func(err error, meanwhile string, pause time.Duration) {
		s.client.TryAgain(s.ref.String(), fmt.Errorf("%s: %w", what, err), meanwhile, pause)
	}
}

// warnOf returns a function that logs what is wrong with a part of the image.
func (s *Stream) warnOf(what string) func(text string) {
	return func(text string) {
		s.client.Warn(strings.Join([]string{s.ref.String(), what, text}, ": "))
	}
}
