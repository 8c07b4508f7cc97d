package registry

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/unpack"
	"kubevirt.io/disk/internal/osfile"
)

// unwrapped is the disk in a wrapped file.
type unwrapped struct {
	name string
	file *os.File // without a name
}

// unwrap takes the disk out of a wrapped file. A push reads files more than once, and not in their
// order: it validates and hashes each before anything is sent, and may compress it. So the disk is
// in a temporary file until then. why says why the file is no image as it is.
func (p *pusher) unwrap(ctx context.Context, path string, why error) (*image.Image, error) {
	f, err := unpack.Find(path, why, unpack.Options{Memory: p.opt.UnpackMemory})
	if err != nil {
		return nil, err
	}
	defer f.Close()
	p.opt.Progress.total.Add(f.Packed)
	file, err := f.Scratch(ctx, p.opt.Image, func(n int) {
		p.opt.Progress.done.Add(int64(n))
	})
	if err != nil {
		return nil, fmt.Errorf("unpacking %q into %q: %w", path, os.TempDir(), err)
	}
	if p.wrapped == nil {
		p.wrapped = make(map[string]unwrapped)
	}
	if old, ok := p.wrapped[path]; ok {
		err = old.file.Close()
	}
	p.wrapped[path] = unwrapped{f.Name, file}
	if err != nil {
		return nil, err
	}
	return p.open(path)
}

// nameOf is the name of a file, or of the disk that it wraps.
func (p *pusher) nameOf(path string) string {
	if u, ok := p.wrapped[path]; ok {
		return u.name
	}
	return filepath.Base(path)
}

// addUnwrapped lays out the layer of a file that stays as it is in its wrapping.
func (p *pusher) addUnwrapped(ctx context.Context, f planned, u unwrapped,
	add func(name string, f *os.File, n needs) error) error {
	again := func(string) (image.Source, error) { return sourceOf(osfile.Reopen(u.file)) }
	all, err := needsOf(ctx, f.name, p.opt.Image, f.boot, again)
	if err != nil {
		return err
	}
	file, err := osfile.Reopen(u.file)
	if err != nil {
		return err
	}
	return add(f.name, file, all[f.name])
}
