package registry

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"

	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// wholeIndex reads the index of an image with its digests and tables. nil: it has none.
func wholeIndex(ctx context.Context, r *transport.Image) (*layer.Index, error) {
	return layer.IndexBy(r, func(desc descriptor) (x *layer.Index, err error) {
		keep, err := unnamedTemp()
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

// readDigests reads the index of an image that was pushed onto another one. Its top layer has what
// differs from chunks with the digests there, so what is below must have these, and not only the
// digest of its layer: the other image's index may have been wrong.
func (p *puller) readDigests(ctx context.Context) (err error) {
	if !slices.ContainsFunc(p.image.Manifest.Layers, func(l descriptor) bool {
		return l.Annotations[annotationRetired] != ""
	}) {
		return nil
	}
	p.index, err = wholeIndex(ctx, p.image)
	return err
}

// checked returns the content of a file of a layer, which fails where it contradicts the index.
func (p *puller) checked(i int, e *layer.Entry, content io.Reader) io.Reader {
	if p.index == nil {
		return content
	}
	for _, f := range p.index.Files {
		if f.Name == e.Name && f.Layer == p.image.Manifest.Layers[i].Digest.String() {
			return &checkedChunks{in: content, name: f.Name, size: f.Size, hash: sha256.New(),
				digests: io.NewSectionReader(p.index.Digests, f.FirstChunk*layer.DigestSize,
					f.Chunks(p.index.ChunkSize)*layer.DigestSize), chunk: p.index.ChunkSize}
		}
	}
	return content
}

// checkedChunks is the content of a file that is compared with the digests of its chunks.
type checkedChunks struct {
	in          io.Reader
	name        string
	size, chunk int64 // bytes
	digests     io.ReaderAt
	hash        hash.Hash // of the chunk so far
	at          int64
}

func (c *checkedChunks) Read(p []byte) (int, error) {
	end := min((c.at/c.chunk+1)*c.chunk, c.size)
	n, err := c.in.Read(p[:min(int64(len(p)), max(end-c.at, 1))])
	c.hash.Write(p[:n])
	if c.at += int64(n); n == 0 || c.at < end {
		return n, err
	}
	var want [layer.DigestSize]byte
	if _, err := c.digests.ReadAt(want[:], (end-1)/c.chunk*layer.DigestSize); err != nil {
		return 0, transport.UnexpectedEnd(err)
	}
	if got := c.hash.Sum(nil); string(got) != string(want[:]) {
		return 0, fmt.Errorf("%s at %d is not what the index of the image says, so the layers "+
			"above do not belong to it: the image that this one was pushed onto was wrong", c.name,
			end-c.chunk)
	}
	c.hash.Reset()
	return n, err
}

// drain reads what is left of such content, so that all of it is checked.
func drain(content io.Reader) error {
	if c, ok := content.(*checkedChunks); ok {
		_, err := io.Copy(io.Discard, c)
		return err
	}
	return nil
}
