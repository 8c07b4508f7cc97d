package registry

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"

	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// wholeIndex reads the index of an image with its digests and tables. nil: it has none.
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

// readIndex reads the index of the image, if it has one. What is pulled must be what it says: who
// serves the image shows that to guests.
func (p *puller) readIndex(ctx context.Context) (err error) {
	if p.dir != layer.DiskDir {
		return nil // it is about no other files
	}
	p.index, err = wholeIndex(ctx, p.image)
	if p.index == nil || err != nil {
		return err
	}
	if p.index.Tables, err = p.index.UnpackTables(nameless); err != nil {
		return fmt.Errorf("index of %s: %w", p.image.Ref, err)
	}
	if p.path == "" {
		return nil // the layers are read anyway: see agreed
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

// indexFile is a file of a layer in the index; nil: it is not there.
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

// checked returns the content of a file of a layer, which fails where it contradicts the index.
func (p *puller) checked(i int, name string, content io.Reader) io.Reader {
	f := p.indexFile(i, name)
	if f == nil {
		return content
	}
	return &checkedChunks{in: content, name: f.Name, size: f.Size, hash: sha256.New(),
		digests: io.NewSectionReader(p.index.Digests, f.FirstChunk*layer.DigestSize,
			f.Chunks(p.index.ChunkSize)*layer.DigestSize), chunk: p.index.ChunkSize,
		tables: p.index.TablesOf(f)}
}

// checkedChunks is the content of a file that is compared with the digests of its chunks.
type checkedChunks struct {
	in          io.Reader
	name        string
	size, chunk int64 // bytes
	digests     io.ReaderAt
	tables      *layer.Tables
	hash        hash.Hash // of the chunk so far
	at          int64
}

func (c *checkedChunks) Read(p []byte) (int, error) {
	end := min((c.at/c.chunk+1)*c.chunk, c.size)
	n, err := c.in.Read(p[:min(int64(len(p)), max(end-c.at, 1))])
	if err := sameTables(c.name, c.tables, p[:n], c.at); err != nil {
		return 0, err
	}
	c.hash.Write(p[:n])
	if c.at += int64(n); n == 0 || c.at < end {
		return n, err
	}
	var want [layer.DigestSize]byte
	if _, err := c.digests.ReadAt(want[:], (end-1)/c.chunk*layer.DigestSize); err != nil {
		return 0, transport.UnexpectedEnd(err)
	}
	if got := c.hash.Sum(nil); string(got) != string(want[:]) {
		return 0, disagrees("%s at %d is not what the index of the image says, or what that of "+
			"the image said that this one was pushed onto", c.name, (end-1)/c.chunk*c.chunk)
	}
	c.hash.Reset()
	return n, err
}

// drain reads what is left of such content, so that all of it is checked.
func drain(content io.Reader) error {
	_, err := io.Copy(io.Discard, content)
	return err
}

// comparison begins to compare a layer with its table of contents. nil: it has none by which it
// could be served. As in an index, only the files in the directory of the disks matter.
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
