package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"path/filepath"
	"sync/atomic"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/disk/unpack"
	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// Inside describes the content of an image, as far as a small part of it shows.
type Inside struct {
	// Disks are in the order of their LUNs.
	Disks []image.Info
	// Whole says why serve fetches all of the image before it serves a disk. Then Disks has only
	// the first disk that was found, described by its first bytes, and nothing was verified. "":
	// the disks are streamed, and those that are Servable were opened.
	Whole string
}

// glanceBytes is how much of a layer is read, uncompressed, to find a disk in it. Bytes.
const glanceBytes = 64 << 20

// Inside finds out which disks an image has. It reads as little of it as possible, and stores that
// in dir, which the caller removes.
func (c *Client) Inside(ctx context.Context, ref transport.Reference, dir string) (_ *Inside,
	err error) {
	kept, err := cache.Open(filepath.Join(dir, "cache"), cache.Options{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, kept.Close()) }()
	s, err := c.Stream(ctx, ref, StreamOptions{Cache: kept, CacheDir: filepath.Join(dir, "cache"),
		KeepDir: filepath.Join(dir, "keep"), glance: true})
	if no, ok := errors.AsType[*layer.Unsuited](err); ok {
		disks, err := c.glance(ctx, ref)
		return &Inside{Disks: disks, Whole: no.Why}, err
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	found := new(Inside)
	for _, d := range s.Disks() {
		img, err := s.Open(ctx, d.Name, image.Options{})
		if err != nil {
			if ctx.Err() != nil {
				return nil, err
			}
			found.Disks = append(found.Disks, image.Info{Name: d.Name, Reason: err.Error(),
				BackingChain: []image.BackingInfo{}})
			continue
		}
		found.Disks = append(found.Disks, img.Info())
		if err := img.Close(); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// errGlanced ends the reading of a layer.
var errGlanced = errors.New("enough was read")

// glance finds the first disk of an image by the beginnings of its layers, from the top.
func (c *Client) glance(ctx context.Context, ref transport.Reference) ([]image.Info, error) {
	r, err := c.Resolve(ctx, ref)
	if err != nil {
		return nil, err
	}
	defer r.Source.Close()
	p := newPuller(r, "-", PullOptions{})
	for i := len(r.Manifest.Layers) - 1; i >= 0; i-- {
		found, err := p.glance(ctx, i)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", r.LayerText(i), err)
		}
		if found != nil {
			return []image.Info{*found}, nil
		}
	}
	return nil, nil
}

// glance finds the first disk at the beginning of a layer. nil: there is none.
func (p *puller) glance(ctx context.Context, i int) (found *image.Info, err error) {
	desc := p.image.Manifest.Layers[i]
	if desc.MediaType == layer.MediaEmpty {
		return nil, nil
	}
	b, err := p.image.Source.Blob(desc)
	if err != nil {
		return nil, err
	}
	in, err := layer.Open(ctx, b, new(atomic.Int64), 0)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	head, err := in.Peek()
	if err != nil {
		return nil, err
	}
	if plain, err := layer.IsPlain(desc, head); err != nil || plain {
		if err != nil {
			return nil, err
		}
		name := layer.PlainName(p.image.Manifest.Layers, i, p.dir)
		return p.describe(ctx, &file{name: name, layer: i, size: in.Size}, in, false)
	}
	limited := &io.LimitedReader{R: in, N: glanceBytes}
	_, err = layer.ReadTar(limited, p.dir, func(e *layer.Entry, content io.Reader) error {
		f := &file{name: e.Name, layer: i, size: e.Size}
		if layer.IsFile(desc) { // see takeLone
			f.name = path.Join(p.dir, path.Base(e.Name))
		}
		if !p.candidate(f.name) {
			return nil
		}
		found, err = p.describe(ctx, f, content, layer.IsFile(desc))
		if err != nil || found == nil {
			return err
		}
		return errGlanced
	})
	if errors.Is(err, errGlanced) || limited.N == 0 {
		err = nil
	}
	return found, err
}

// describe describes a file by its first bytes. nil: it need not be a disk. lone: see loneFile.
func (p *puller) describe(ctx context.Context, f *file, content io.Reader, lone bool) (
	*image.Info, error) {
	_, content, err := p.look(ctx, f, content)
	if err != nil {
		return nil, err
	}
	content, done := p.unpacked(ctx, f, content)
	defer done()
	head, err := detectable(content)
	if err != nil || image.PassOver(f.name, f.size, qcow2.IsQcow2(head)) ||
		lone && !unpack.IsDisk(f.diskName(), head, f.contentSize()) {
		return nil, err
	}
	info := &image.Info{Name: path.Base(f.diskName()), Format: image.FormatOf(head),
		FileSize: max(f.size, 0), BackingChain: []image.BackingInfo{}}
	switch {
	case info.Format == image.FormatQcow2:
		info.VirtualSize = qcow2.SizeOf(head)
	case info.Format == "" || info.Format == image.FormatRaw:
		info.Format, info.VirtualSize = image.FormatRaw, max(f.contentSize(), 0)
	}
	return info, nil
}
