package registry

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	"kubevirt.io/disk/disk/image"
)

// part is a file of an image without an index that can still be read by ranges.
type part struct {
	Name  string `json:"name"`  // in the image, as disk/fedora.qcow2
	Size  int64  `json:"size"`  // bytes
	Layer string `json:"layer"` // its digest
	// Offset is where the file begins in a layer that is not compressed.
	Offset int64 `json:"offset,omitempty"`
	// Chunks are the digests of its chunks of indexChunk bytes. nil: nothing vouches for the file
	// before the layer is complete, unless it has a Table.
	Chunks []byte `json:"chunks,omitempty"`
	// Table has the chunks of a file that is compressed in chunks, each with a digest. Codec is the
	// compression.
	Table []byte `json:"table,omitempty"`
	Codec string `json:"codec,omitempty"`
}

// parts are the files of an image without an index, as they are kept.
type parts struct {
	Files []*part `json:"files"`
	// Walked are the digests of layers of which nothing was verified yet when the files were found.
	// While there are any, no file of the image is trusted, because these layers may hide others.
	Walked []string `json:"walked,omitempty"`
}

// contents are the files of a layer under the directory of the disks, and how to read them.
type contents struct {
	list  *layerList
	files map[string]*part // regular files, by name
	// walked: the layer was read by ranges, and nobody has verified it yet
	walked bool
}

// unsuited says why an image must be fetched before it is served.
type unsuited struct{ why string }

func (u *unsuited) Error() string { return u.why }

// maxParts limits the size of the kept parts, in bytes: for maxTOCChunks, and the names.
const maxParts = 64 << 20

// partsName is the file with the known parts of the image. Those that nobody has verified are the
// repository's own.
func (s *Stream) partsName(walked bool) string {
	of := keptName(s.image.digest)
	if walked {
		of += "-" + strings.TrimPrefix(digestOf([]byte(s.ref.repositoryText())), "sha256:")
	}
	return "parts-" + of + ".json"
}

// readPartsLocked returns the parts that are known. nil: none.
func (s *Stream) readPartsLocked() *parts {
	for _, walked := range []bool{true, false} {
		content, err := s.kept.read(s.partsName(walked), maxParts)
		known := new(parts)
		if err != nil || json.Unmarshal(content, known) != nil {
			continue
		}
		// Repositories have had one file together before, also for parts that nobody has verified.
		if walked || len(known.Walked) == 0 || s.record.Unverified {
			return known
		}
	}
	return nil
}

// findParts finds out how to read the files of an image without an index by ranges. If that is not
// possible, it returns an *unsuited.
func (s *Stream) findParts(ctx context.Context) (*parts, error) {
	if known := s.readPartsLocked(); known != nil {
		if fits, err := s.suits(known); fits || err != nil {
			return known, err
		}
	}
	layers := s.image.manifest.Layers
	for _, desc := range layers { // before anything is fetched
		if err := s.hopeless(desc); err != nil {
			return nil, err
		}
	}
	all := new(parts)
	shade, left := newShadow(), maxTOCChunks
	for i := len(layers) - 1; i >= 0; i-- {
		l, err := s.contents(ctx, layers[i], left)
		var shown []*part
		if err == nil {
			shown, err = l.shown(shade)
		}
		for _, p := range shown { // each link to a file is kept and opened with its own chunks
			left -= len(p.Table) / tableEntry
		}
		if left < 0 {
			err = errors.Join(err, tooManyChunks())
		}
		var no *unsuited
		if errors.As(err, &no) {
			return nil, &unsuited{fmt.Sprintf("layer %s %s", layers[i].Digest, no.why)}
		}
		if err != nil {
			return nil, fmt.Errorf("layer %s of %s: %w", layers[i].Digest, s.ref, err)
		}
		if l.walked {
			all.Walked = append(all.Walked, layers[i].Digest.String())
		}
		if all.Files = append(all.Files, shown...); len(all.Files) > maxShown {
			return nil, fmt.Errorf("%s has more than %d files under %s/", s.ref, maxShown, diskDir)
		}
		if err := shade.add(l.list); err != nil {
			return nil, fmt.Errorf("%s: %w", s.ref, err)
		}
	}
	content, err := json.Marshal(all)
	if err == nil {
		err = s.kept.write(s.partsName(len(all.Walked) > 0), content)
	}
	return all, err
}

// suits reports whether the known parts may be served with the current setting. If everything is to
// be verified, parts that were found by trusting TLS do not count, unless they have been verified
// since.
func (s *Stream) suits(known *parts) (bool, error) {
	if s.opt.WhenComplete {
		return true, nil
	}
	unsure, err := s.unsureOfLocked(known)
	for _, u := range unsure {
		if u.notes.now() != noteVerified {
			return false, err
		}
	}
	return true, err
}

// unsureOfLocked opens the layers on which parts without a digest depend.
func (s *Stream) unsureOfLocked(known *parts) (all []*unverified, err error) {
	for _, desc := range s.image.manifest.Layers {
		if slices.Contains(known.Walked, desc.Digest.String()) {
			u, err := s.unverifiedLocked(desc)
			if err != nil {
				return nil, err
			}
			all = append(all, u)
		}
	}
	return all, nil
}

// shown are the files of the layer that the layers above it do not hide.
func (l *contents) shown(shade *shadow) (all []*part, err error) {
	for _, name := range slices.Sorted(maps.Keys(l.list.entries)) {
		e := l.list.entries[name]
		if e.kind == entryDirectory || !shade.shows(name) {
			continue
		}
		if e.kind == entryFile && e.size == 0 && image.PassOver(name, 0, false) {
			continue // nobody reads it, so it need not be readable
		}
		from := e
		if e.kind == entryLink {
			from = l.list.target(e)
		}
		if from == nil || from.kind != entryFile || name == diskDir || l.files[from.name] == nil {
			// The file may be a link that leads elsewhere, a device or a sparse file. Fetching the
			// image shows what it is, and whether that matters.
			return nil, &unsuited{fmt.Sprintf("has %q, which cannot be read by ranges", name)}
		}
		p := *l.files[from.name]
		p.Name = name
		all = append(all, &p)
	}
	return all, nil
}

const (
	// smallLayer is the largest layer that is fetched only to see whether it has a disk. Bytes.
	smallLayer = 32 << 20
	// maxSmall is how many bytes of such layers are kept until it is known whether the whole image
	// has to be fetched. Those beyond are fetched again then.
	maxSmall = 64 << 20
	// maxWalked is the most files that a layer may have if their headers are fetched one by one.
	maxWalked = 16 << 10
)

// contents finds out which files a layer has, by reading as little as possible. left is how many
// chunks of tables of contents the image may still have.
func (s *Stream) contents(ctx context.Context, desc descriptor, left int) (*contents, error) {
	switch {
	case desc.MediaType == mediaEmpty:
		return &contents{list: new(layerList)}, nil
	case hasTOC(desc):
		return s.tocLayout(ctx, desc, left)
	case desc.Size <= smallLayer:
		return s.smallLayout(ctx, desc)
	}
	return s.walk(ctx, desc)
}

// hopeless reports a layer that must be fetched before it is served, whatever is in it.
func (s *Stream) hopeless(desc descriptor) error {
	why := ""
	switch {
	case strings.HasPrefix(string(desc.MediaType), mediaDisk) &&
		strings.Contains(string(desc.MediaType), "+"):
		why = "is a compressed disk"
	case !hasTOC(desc) && desc.Size > smallLayer && !s.opt.WhenComplete:
		why = "has no digests of its chunks"
	default:
		return nil
	}
	return &unsuited{fmt.Sprintf("layer %s %s", desc.Digest, why)}
}

// smallLayout fetches and verifies the layer.
func (s *Stream) smallLayout(ctx context.Context, desc descriptor) (*contents, error) {
	content, err := s.image.small(ctx, desc, smallLayer)
	if err != nil {
		return nil, err
	}
	if s.smallSize += len(content); s.smallSize <= maxSmall {
		s.small[desc.Digest.String()] = content
	}
	if compression(content) == "" {
		plain, err := isPlain(desc, content[:min(len(content), tarBlock)])
		if err != nil {
			return nil, err
		} else if plain {
			return plainContents(desc, chunkDigests(content)), nil
		}
		in := bytes.NewReader(content)
		l, err := layTar(in, desc, func() int64 { return int64(len(content) - in.Len()) })
		if err != nil {
			return nil, err
		}
		for _, p := range l.files {
			p.Chunks = chunkDigests(content[p.Offset : p.Offset+p.Size])
		}
		return l, nil
	}
	in, err := openLayer(ctx, memoryBlob(desc, content), new(Progress), nil)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	head, err := in.peek()
	if err != nil {
		return nil, in.explain(err)
	}
	if plain, err := isPlain(desc, head); err != nil {
		return nil, in.explain(err)
	} else if plain {
		return nil, &unsuited{"is a compressed disk"}
	}
	// A file in it cannot be read by ranges. Perhaps another layer hides it.
	list, err := readTar(in, diskDir, nil)
	if err == nil {
		err = in.Finish()
	}
	return &contents{list: list}, in.explain(err)
}

func memoryBlob(desc descriptor, content []byte) *blob {
	return &blob{desc: desc, stream: func(_ context.Context, off, n int64) io.ReadCloser {
		return io.NopCloser(bytes.NewReader(content[off : off+n]))
	}}
}

// having is a source some of whose blobs were fetched before.
type having struct {
	source
	blobs map[string][]byte // by digest; verified
}

func (h having) blob(desc descriptor) (*blob, error) {
	if content, ok := h.blobs[desc.Digest.String()]; ok {
		return memoryBlob(desc, content), nil
	}
	return h.source.blob(desc)
}

// chunkDigests are the digests of the chunks of a file.
func chunkDigests(p []byte) []byte {
	sums := []byte{}
	for len(p) > 0 {
		n := min(len(p), indexChunk)
		sum := sha256.Sum256(p[:n])
		sums = append(sums, sum[:]...)
		p = p[n:]
	}
	return sums
}

// layTar reads the headers of an archive that is not compressed. at returns the position of r.
func layTar(r io.Reader, desc descriptor, at func() int64) (*contents, error) {
	l := &contents{files: make(map[string]*part)}
	n := 0
	list, err := readTar(r, diskDir, func(e *entry, _ io.Reader) error {
		if n++; n > maxWalked {
			return &unsuited{fmt.Sprintf("has more than %d files", maxWalked)}
		}
		off := at()
		delete(l.files, e.name) // a later entry of the same name replaces it
		if under(diskDir, e.name) && !e.sparse && e.size <= desc.Size-off {
			l.files[e.name] = &part{Name: e.name, Size: e.size, Layer: desc.Digest.String(),
				Offset: off}
		}
		return nil
	})
	l.list = list
	return l, err
}

// walk reads the headers of an unverified layer by ranges.
func (s *Stream) walk(ctx context.Context, desc descriptor) (*contents, error) {
	layer, err := s.image.source.blob(desc)
	if err != nil {
		return nil, err
	}
	head := make([]byte, tarBlock)
	if _, err := layer.ReadAt(ctx, head, 0); err != nil {
		return nil, err
	}
	if what := compression(head); what != "" {
		return nil, &unsuited{"is compressed by " + what +
			", which has to be read from its beginning"}
	}
	plain, err := isPlain(desc, head)
	if err != nil {
		return nil, err
	}
	u, err := s.unverifiedLocked(desc)
	if err != nil {
		return nil, err
	}
	if plain {
		l := plainContents(desc, nil)
		l.walked = true
		return l, nil
	}
	r := &rangeReader{ctx: ctx, of: section{u, 0, desc.Size}}
	l, err := layTar(r, desc, func() int64 { return r.off })
	l.walked = true
	return l, err
}

// rangeReader reads bytes in order, and skips others without fetching them.
type rangeReader struct {
	ctx context.Context
	of  section
	off int64
}

func (r *rangeReader) Read(p []byte) (int, error) {
	if r.off >= r.of.size {
		return 0, io.EOF
	}
	n, err := r.of.ReadAt(r.ctx, p[:min(int64(len(p)), r.of.size-r.off)], r.off)
	r.off += int64(n)
	return n, err
}

// Seek is how a tar.Reader skips files.
func (r *rangeReader) Seek(off int64, whence int) (int64, error) {
	if whence != io.SeekCurrent || off < 0 || off > r.of.size-r.off {
		return 0, errors.New("the layer ends within a file")
	}
	r.off += off
	return r.off, nil
}

// openPart opens a part by its name in the directory of the disks.
func (s *Stream) openPart(_ context.Context, name string) (image.Source, error) {
	i := slices.IndexFunc(s.parts.Files, func(p *part) bool {
		return p.Name == path.Join(diskDir, name)
	})
	if i < 0 {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	p := s.parts.Files[i]
	f, err := s.farPartLocked(p)
	if err != nil {
		return nil, fmt.Errorf("%s of %s: %w", p.Name, s.ref, err)
	}
	unsure, err := s.unsureOfLocked(s.parts)
	if err != nil || len(unsure) == 0 {
		return f, err
	}
	return &unsureFile{farFile: f, layers: unsure}, nil
}

// farPartLocked opens a part, whatever the compression of its layer.
func (s *Stream) farPartLocked(p *part) (*farFile, error) {
	layers := s.image.manifest.Layers
	i := slices.IndexFunc(layers, func(d descriptor) bool { return d.Digest.String() == p.Layer })
	if i < 0 || p.Size < 0 || p.Offset < 0 || p.Offset > layers[i].Size ||
		p.Codec == "" && p.Size > layers[i].Size-p.Offset {
		return nil, errors.New("does not lie in its layer")
	}
	layer, err := s.image.source.blob(layers[i])
	switch {
	case err != nil:
		return nil, err
	case p.Codec != "":
		f, name, err := newPacked(s.opt.Cache, layer, p)
		if err != nil {
			return nil, err
		}
		warn := s.warnOf(p.Name)
		return &farFile{blob: f, name: name, chunk: f.unit, zeros: zeroChunks{size: p.Size},
			warn: warn, proof: newProof(warn, f.prove)}, nil
	case p.Chunks != nil:
		x := &index{ChunkSize: indexChunk, chunks: p.Chunks}
		file := &indexFile{Name: p.Name, Size: p.Size, Offset: p.Offset}
		if int64(len(p.Chunks)) != file.chunks(indexChunk)*digestSize {
			return nil, errors.New("does not have as many digests as chunks")
		}
		return newFarFile(s.opt.Cache, layer, x, file, s.warnOf(p.Name))
	}
	u, err := s.unverifiedLocked(layers[i])
	if err != nil {
		return nil, err
	}
	return u.open(p.Offset, p.Size), nil
}

// warnOf logs what is wrong with a part of the image.
func (s *Stream) warnOf(what string) func(text string) {
	return func(text string) {
		s.client.opt.Warn(strings.Join([]string{s.ref.String(), what, text}, ": "))
	}
}
