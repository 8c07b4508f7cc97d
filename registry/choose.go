package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/registry/layer"
)

// choose decides what to fetch when all files of the image are known.
func (p *puller) choose() (chosen []*file, err error) {
	below := make(map[string]bool)
	for _, f := range p.files {
		if f.backing != "" && f.backing != f.name {
			below[f.backing] = true
		}
	}
	var names []string
	for _, f := range p.files {
		if f.name == p.dir && f.refused != "" {
			return nil, fmt.Errorf("%s has %s under the name %q", p.image.Ref, f.refused, f.name)
		}
		if !p.candidate(f.name) || p.path == "" && below[f.name] || f.passed {
			continue
		}
		if f.refused != "" {
			return nil, fmt.Errorf("%q of %s is %s; name another file with --path", f.name,
				p.image.Ref, f.refused)
		}
		chosen = append(chosen, f)
		names = append(names, fmt.Sprintf("%q", path.Base(f.name)))
	}
	switch {
	case len(chosen) == 0 && p.path != "":
		return nil, fmt.Errorf("%s has no file %q%s", p.image.Ref, p.path, p.listFiles())
	case len(chosen) == 0:
		return nil, fmt.Errorf("%s has no disk: there is no file in its directory %s/", p.image.Ref,
			p.dir)
	case len(chosen) > 1 && !p.many:
		return nil, fmt.Errorf(
			"%s has %d disks: choose one with --path, or name a directory for all of them: %s",
			p.image.Ref, len(chosen), strings.Join(names[:min(len(names), 20)], ", "))
	}
	for _, f := range p.files { // make room: drop unwanted files that were begun
		if !slices.Contains(chosen, f) {
			if err := p.drop(f); err != nil {
				return nil, err
			}
		}
	}
	return chosen, nil
}

// listFiles lists the files of the image, for the error that the wanted one does not exist.
func (p *puller) listFiles() string {
	var names []string
	for _, f := range p.files {
		if path.Dir(f.name) == p.dir {
			names = append(names, fmt.Sprintf("%q", path.Base(f.name)))
		}
	}
	if len(names) == 0 {
		return fmt.Sprintf(", and none in %s/", p.dir)
	}
	return fmt.Sprintf("; in %s/ are %s", p.dir, strings.Join(names[:min(len(names), 20)], ", "))
}

// complete fetches what a file still lacks.
func (p *puller) complete(ctx context.Context, f *file) error {
	if f.to == nil {
		if err := p.open(f); err != nil {
			return err
		}
	}
	return p.arrive(ctx, f, 0)
}

// maxChain is the most backing files below a disk.
const maxChain = 8

// arrive reads the layer of a file until the whole file is at its destination. Its backing files
// come first.
func (p *puller) arrive(ctx context.Context, f *file, depth int) error {
	for !f.arrival.Done() {
		err := p.rereadLayer(ctx, f,
			func(content io.Reader) error { return f.arrival.Pass(ctx, content) })
		var needs *image.BackingError
		if !errors.As(err, &needs) {
			if err != nil {
				return err
			}
			continue
		}
		if depth == maxChain {
			return fmt.Errorf("has more than %d backing files in a chain", maxChain)
		}
		below, err := p.below(needs)
		if err != nil {
			return err
		}
		opt := image.ArrivalOptions{Options: p.opt.Image}
		base := &file{
			name:    below.name,
			layer:   below.layer,
			ordinal: below.ordinal,
			size:    below.size,
			packed:  below.packed,
			arrival: image.NewArrival(below.diskName(), below.contentSize(), f.to, opt),
			to:      f.to,
		}
		if err := p.arrive(ctx, base, depth+1); err != nil {
			return err
		}
		opt.Below, f.below = base.arrival, base.below+1
		f.arrival = image.NewArrival(f.diskName(), f.contentSize(), f.to, opt)
	}
	return nil
}

func (p *puller) below(needs *image.BackingError) (*file, error) {
	for _, f := range p.files {
		if f.name == needs.File && f.refused == "" {
			return f, nil
		}
	}
	return nil, fmt.Errorf("needs the backing file %q, which the image does not have", needs.File)
}

// rereadLayer reads the layer of a file once more to its end, and passes the file's content to use.
func (p *puller) rereadLayer(ctx context.Context, f *file,
	use func(content io.Reader) error) error {
	take := func(content io.Reader) error {
		content, done := p.unpacked(ctx, f, content)
		defer done()
		if err := use(content); err != nil || len(f.packed) == 0 {
			return err
		}
		return p.rest(content)
	}
	if f.ordinal == layer.WholeLayer {
		in, err := p.reopen(ctx, f.layer)
		if err != nil {
			return err
		}
		defer in.Close()
		if err := p.checked(f.layer, &layer.Entry{Name: f.name}, in, take); err != nil {
			return err
		}
		return in.Finish()
	}
	seen := false
	changed := fmt.Errorf("the layer %s has changed", p.image.Manifest.Layers[f.layer].Digest)
	err := p.read(ctx, f.layer, func(e *layer.Entry, content io.Reader) error {
		if e.Ordinal != f.ordinal {
			return nil
		}
		if seen = true; e.Size != f.size {
			return changed
		}
		return p.checked(f.layer, e, content, take)
	})
	if err == nil && !seen {
		err = changed
	}
	return err
}

// reopen begins a layer once more.
func (p *puller) reopen(ctx context.Context, i int) (*layer.Reader, error) {
	desc := p.image.Manifest.Layers[i]
	p.opt.Progress.total.Add(desc.Size)
	b, err := p.image.Source.Blob(desc)
	if err != nil {
		return nil, err
	}
	return layer.Open(ctx, b, &p.opt.Progress.done, p.opt.UnpackMemory)
}

// read goes through a layer once more.
func (p *puller) read(ctx context.Context, i int,
	visit func(e *layer.Entry, content io.Reader) error) error {
	in, err := p.reopen(ctx, i)
	if err != nil {
		return err
	}
	defer in.Close()
	if _, err = layer.ReadTar(in, p.dir, visit); err == nil {
		err = in.Finish()
	}
	return in.Explain(err)
}

// plain fetches a layer that is a file.
func (p *puller) plain(ctx context.Context, i int, in *layer.Reader) error {
	f := &file{name: layer.PlainName(p.image.Manifest.Layers, i, p.dir), layer: i,
		ordinal: layer.WholeLayer, size: in.Size}
	p.files = append(p.files, f)
	if p.candidate(f.name) {
		e := &layer.Entry{Name: f.name}
		if err := p.checked(i, e, in, func(content io.Reader) error {
			return p.pass(ctx, f, content)
		}); err != nil {
			return in.Doubt(err)
		}
	}
	return in.Finish()
}
