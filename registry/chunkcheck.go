package registry

import (
	"context"
	"errors"
	"fmt"
	"io"

	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// wholeIndex reads the index of an image with its digests and tables. nil: there is none.
func wholeIndex(ctx context.Context, r *transport.Image) (*layer.Index, error) {
	return layer.IndexBy(r, func(desc descriptor) (x *layer.Index, err error) {
		keep, err := nameless()
		if err != nil {
			return nil, err
		}
		err = r.Read(ctx, desc, layer.MaxIndexLayer, func(in io.Reader) error {
			x, err = layer.ParseIndex(in, r.Manifest.Layers, keep)
			return err
		})
		if err != nil {
			return nil, errors.Join(err, keep.Close())
		}
		return x, nil
	})
}

// readIndex reads the index of the image, if there is one. Pulled files must agree with it, because
// a guest of the served image gets what the index says.
func (p *puller) readIndex(ctx context.Context) (err error) {
	if p.dir != layer.DiskDir {
		return nil // it describes no other files
	}
	p.index, err = wholeIndex(ctx, p.image)
	if p.index == nil || err != nil {
		return err
	}
	if p.index.Tables, err = p.index.UnpackTables(nameless); err != nil {
		return fmt.Errorf("index of %s: %w", p.image.Ref, err)
	}
	if p.path == "" {
		return nil // agreed compares them later, when the layers are read
	}
	return agree(ctx, p.image.Source, p.image.Manifest.Layers, p.index)
}

// agreed compares the files of all layers with those of the index.
func (p *puller) agreed() error {
	if p.index == nil || p.path != "" {
		return nil
	}
	seen := 0
	for _, f := range p.files {
		if f.passed {
			continue
		}
		x := p.indexFile(f.layer, f.name)
		if x == nil || x.Size != f.size {
			return disagrees("the layer %s has %q, which it says otherwise",
				p.image.Manifest.Layers[f.layer].Digest, f.name)
		}
		seen++
	}
	if seen != len(p.index.Files) {
		return disagrees("it has %d files, and the layers %d", len(p.index.Files), seen)
	}
	return nil
}

// indexFile returns a file of a layer in the index; nil: it is not there.
func (p *puller) indexFile(i int, name string) *layer.IndexFile {
	if p.index == nil {
		return nil
	}
	for n := range p.index.Files {
		if f := &p.index.Files[n]; f.Name == name &&
			f.Layer == p.image.Manifest.Layers[i].Digest.String() {
			return f
		}
	}
	return nil
}

// checked passes the content of a file of a layer to use, and then reads the file to its end.
// Reading fails if the content contradicts the index. A sparse file is read only as far as it is
// used: it has no second description, and a few bytes of an archive can claim any length of zeros.
func (p *puller) checked(i int, e *layer.Entry, content io.Reader,
	use func(content io.Reader) error) error {
	f := p.indexFile(i, e.Name)
	switch {
	case f != nil && e.Sparse:
		return disagrees("%s is a sparse file in its layer", e.Name)
	case f != nil:
		chunks, err := p.index.ChunksOf(f)
		if err != nil {
			return err
		}
		content = &checkedChunks{in: content, file: f, chunks: chunks, tables: p.index.TablesOf(f),
			chunk: make([]byte, min(p.index.ChunkSize, f.Size))}
	}
	if err := use(content); err != nil || e.Sparse {
		return err
	}
	_, err := io.Copy(io.Discard, content)
	return err
}

// checkedChunks is the content of a file that is compared with the digests of its chunks.
type checkedChunks struct {
	in     io.Reader
	file   *layer.IndexFile
	chunks *layer.Chunks
	tables *layer.Tables
	chunk  []byte
	rest   []byte // of chunk, not read yet
	at     int64  // offset behind chunk
}

func (c *checkedChunks) Read(p []byte) (int, error) {
	if len(c.rest) == 0 {
		if err := c.next(); err != nil {
			return 0, err
		}
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

// next reads and compares the next chunk. If the file is shorter, that is noticed elsewhere.
func (c *checkedChunks) next() error {
	chunk := c.chunk[:min(int64(len(c.chunk)), c.file.Size-c.at)]
	if len(chunk) == 0 {
		n, err := c.in.Read(make([]byte, 1))
		if n > 0 {
			err = disagrees("%s has more than %d bytes", c.file.Name, c.file.Size)
		}
		return err
	}
	n, err := io.ReadFull(c.in, chunk)
	if n < len(chunk) && (n == 0 || err != io.ErrUnexpectedEOF) {
		return err
	}
	if err := sameTables(c.file.Name, c.tables, chunk[:n], c.at); err != nil {
		return err
	}
	if n == len(chunk) {
		err = c.chunks.Check(chunk, c.at)
		if errors.As(err, new(*transport.DigestError)) {
			return disagrees("%s at %d is not what the index of the image says, or what that of "+
				"the image said that this one was pushed onto", c.file.Name, c.at)
		} else if err != nil {
			return err
		}
	}
	c.rest = chunk[:n]
	c.at += int64(n)
	return nil
}

// comparison begins to compare a layer with its table of contents. nil: there is no table by which
// the layer could be served. As in an index, only the files in the directory of the disks matter.
func (p *puller) comparison(ctx context.Context, from *transport.Blob) (*layer.Comparison, error) {
	if p.dir != layer.DiskDir || !layer.HasTOC(from.Desc) {
		return nil, nil
	}
	l, err := layer.ReadContents(ctx, from, layer.MaxTOCChunks, func(error) {})
	switch no := new(layer.Unsuited); {
	case errors.As(err, &no):
		return nil, nil
	case err != nil:
		return nil, err
	}
	return l.Comparison(), nil
}
