package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/unpack"
	"kubevirt.io/disk/registry/layer"
)

// look finds out how the content of a file is compressed, and returns the same content again. head
// is the beginning of the decompressed content, or nil if it cannot be read. A VMDK image inside
// counts as compressed, too.
func (p *puller) look(ctx context.Context, f *file, content io.Reader) (head []byte, _ io.Reader,
	err error) {
	head, err = detectable(content)
	content = io.MultiReader(bytes.NewReader(head), content)
	for err == nil && len(f.packed) < 2 {
		kind := unpack.Compressed(head)
		if kind == "" || len(f.packed) > 0 && (kind != unpack.VMDK || f.packed[0] == kind) {
			break
		}
		f.packed = append(f.packed, kind)
		var read bytes.Buffer // the bytes that were read to look inside
		d, done := p.unpacked(ctx, f, io.LimitReader(io.TeeReader(content, &read), maxLook))
		var inner error
		if head, inner = detectable(d); inner != nil {
			head = nil
		}
		done()
		content = io.MultiReader(&read, content)
	}
	return head, content, err
}

// detectable reads what image.Detect needs, or less at the end.
func detectable(in io.Reader) ([]byte, error) {
	head := make([]byte, image.DetectSize)
	n, err := io.ReadFull(in, head)
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		err = nil
	}
	return head[:n], err
}

// diskName is the name of the file without the extension of its compression.
func (f *file) diskName() string {
	name := f.name
	for range f.packed {
		name = image.UnwrappedName(name)
	}
	return name
}

// contentSize is the size of a file that is not compressed; -1: unknown.
func (f *file) contentSize() int64 {
	if len(f.packed) == 0 {
		return f.size
	}
	return -1
}

// unpacked is the decompressed content of a file. The caller calls done at the end.
func (p *puller) unpacked(ctx context.Context, f *file, content io.Reader) (_ io.Reader,
	done func()) {
	done = func() {}
	for _, kind := range f.packed {
		d := unpack.Decompress(kind, content, unpack.Options{Memory: p.opt.UnpackMemory})
		outer := done
		content, done = unpack.Within(ctx, d), func() { _ = d.Close(); outer() }
	}
	return content, done
}

// rest reads the rest of compressed content, so that all of it is checked.
func (p *puller) rest(content io.Reader) error {
	limit := p.opt.Image.MaxVirtualSize
	if limit <= 0 {
		limit = image.DefaultMaxVirtualSize
	}
	n, err := io.CopyN(io.Discard, content, limit)
	if n == limit {
		return errors.New("goes on behind its disk")
	}
	if err == io.EOF {
		err = nil
	}
	return err
}

// maxLook is how much of a compressed file is read to see what is inside: more than a block of
// bzip2. Bytes.
const maxLook = 2 << 20

// loneFile handles a file of an archive that was stored as it is, as "oras push" does. Such an
// archive is no layer of a container image, so its disk may be anywhere in it.
func (p *puller) loneFile(ctx context.Context, i int, in *layer.Reader, e *layer.Entry,
	content io.Reader) error {
	f := &file{name: path.Join(p.dir, path.Base(e.Name)), layer: i, ordinal: e.Ordinal,
		size: e.Size}
	head, content, err := p.look(ctx, f, content)
	if err != nil {
		return err
	}
	within := 1 // the archive
	if in.Format != "" {
		within++
	}
	for n, kind := range f.packed {
		if !unpack.Unwraps(kind, within+n) {
			return nil // nested too deep
		}
	}
	if !slices.Contains(f.packed, unpack.VMDK) && (head == nil ||
		!unpack.IsDisk(f.diskName(), head, f.contentSize())) {
		return nil // or unreadable
	}
	if p.lone = append(p.lone, f); len(p.lone) > layer.MaxShown {
		return fmt.Errorf("it has more than %d disks", layer.MaxShown)
	}
	return p.pass(ctx, f, content)
}

// dropLayer drops the files of a layer that is read once more.
func (p *puller) dropLayer(i int) (err error) {
	drop := func(f *file) bool {
		if f.layer == i {
			err = errors.Join(err, p.drop(f))
		}
		return f.layer == i
	}
	p.files, p.lone = slices.DeleteFunc(p.files, drop), slices.DeleteFunc(p.lone, drop)
	return err
}

// takeLone decides about disks in archives that are not layers: they count only if the image has no
// other disk.
func (p *puller) takeLone() (err error) {
	wanted := func(f *file) bool { return p.candidate(f.name) && !f.passed }
	if slices.ContainsFunc(p.files, wanted) {
		for _, f := range p.lone {
			err = errors.Join(err, p.drop(f))
		}
	} else {
		p.files = append(p.files, p.lone...)
	}
	p.lone = nil
	return err
}
