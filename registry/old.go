package registry

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// oldDisk is the disk that a new version of it is pushed onto.
type oldDisk struct {
	ref   string
	index *layer.Index // nil: the image has no usable index, and was fetched
	names []string     // of all files, in the directory of the disks
	disks []string     // the files that are disks
	top   string       // the disk
	image *image.Image
	chain []*oldFile    // its file, and the backing files; empty: the image was fetched
	dir   *flock.OwnDir // directory of the fetched image; nil: none
	here  *localCopy

	below map[string]string // the backing files of files that have some; nil: there is one file
	left  []string          // files of the index that the new image leaves out
	// the file directly below the new one
	backing       string
	backingFormat image.Format

	boot map[string][][2]int64 // a boot recorded with the new image, by names of files; nil: none
}

func (o *oldDisk) close() (err error) {
	if o == nil {
		return nil
	}
	if o.image != nil {
		err = o.image.Close()
	}
	return errors.Join(err, o.here.close(), o.index.Close(), o.dir.Remove())
}

// unusable says why an index does not describe what a container of the image would see.
type unusable struct{ why string }

func (e *unusable) Error() string { return e.why }

// findOld opens the disk of the base that the file is a new version of, with the content that a
// container of the image would see. The old disk closes here.
func (p *pusher) findOld(ctx context.Context, f planned, here *localCopy) (_ *oldDisk, err error) {
	o := &oldDisk{ref: p.base.ref.String(), here: here}
	defer func() {
		if err != nil {
			err = errors.Join(err, o.close())
		}
	}()
	err = o.readIndex(ctx, p.base)
	var no *unusable
	switch {
	case errors.As(err, &no):
		p.client.Warn(fmt.Sprintf("%s %s: the old disk is fetched as a whole to compare it, and "+
			"the new image gets no index either", o.ref, no.why))
		for i := range p.base.platforms {
			p.base.platforms[i].disks = true
		}
		return o, o.fetch(ctx, p, f)
	case err != nil:
		return nil, err
	}
	o.disks, o.below, err = disksOf(ctx, p.base.platforms[0].manifest.Layers, o.names,
		func(name string) (image.Source, error) { return o.open(p.base, name) })
	if err != nil {
		return nil, err
	}
	if err := o.choose(f.name); err != nil {
		return nil, err
	}
	o.image, err = image.OpenSource(ctx, o.top,
		func(ctx context.Context, name string) (image.Source, error) {
			file, err := o.open(p.base, name)
			if err != nil {
				return nil, err
			}
			if err := file.learn(ctx); err != nil {
				return nil, err
			}
			o.chain = append(o.chain, file)
			return file, nil
		}, p.opt.Image)
	if err != nil {
		return nil, err
	}
	o.backing, o.backingFormat = o.top, o.image.Format()
	return o, nil
}

// readIndex reads the index of the base, and checks that a container of the image has the files
// where the index says.
func (o *oldDisk) readIndex(ctx context.Context, b *baseImage) error {
	r := &transport.Image{Source: b.source, Ref: b.ref, Manifest: b.platforms[0].manifest}
	x, err := wholeIndex(ctx, r)
	switch {
	case err != nil:
		return err
	case x == nil:
		return &unusable{"has no index of its disks"}
	}
	o.index = x
	if x.ChunkSize != layer.IndexChunk {
		return o.unusable("has an index with chunks of %d bytes", x.ChunkSize)
	}
	if x.Tables, err = x.UnpackTables(nameless); err != nil {
		return err
	}
	return o.checkLayers(ctx, b)
}

func (o *oldDisk) unusable(format string, args ...any) error {
	err := o.index.Close()
	o.index = nil
	return errors.Join(&unusable{fmt.Sprintf(format, args...)}, err)
}

// checkLayers compares the index with the layers of each platform. Each file has to be the only one
// of its layer, as push makes them.
func (o *oldDisk) checkLayers(ctx context.Context, b *baseImage) error {
	sizes, seen := make(map[string]int64), make(map[string]bool) // by the digests of layers
	for _, desc := range b.platforms[0].manifest.Layers {
		sizes[desc.Digest.String()] = desc.Size
	}
	for _, f := range o.index.Files {
		want, err := layer.DiskOf(f.Name, f.Size)
		if err != nil {
			return err
		}
		if seen[f.Layer] || f.Offset != int64(len(want.Header)) || sizes[f.Layer] != want.Size() {
			return o.unusable("has the file %q in a layer that push has not made", f.Name)
		}
		seen[f.Layer] = true
		o.names = append(o.names, strings.TrimPrefix(f.Name, layer.DiskDir+"/"))
	}
	for i, platform := range b.platforms {
		err := agree(ctx, b.source, platform.manifest.Layers, o.index)
		if i > 0 && errors.Is(err, disk.ErrWrongContent) {
			return o.unusable("has other disks for another platform")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// open opens a file of the index by its name in the directory of the disks.
func (o *oldDisk) open(b *baseImage, name string) (*oldFile, error) {
	for i := range o.index.Files {
		f := &o.index.Files[i]
		if f.Name != path.Join(layer.DiskDir, name) {
			continue
		}
		layers := b.platforms[0].manifest.Layers
		at := slices.IndexFunc(layers, func(d descriptor) bool {
			return d.Digest.String() == f.Layer
		})
		blob, err := b.source.Blob(layers[at])
		if err != nil {
			return nil, err
		}
		return o.here.open(blob, o.index, f)
	}
	return nil, fmt.Errorf("%s: %w", name, os.ErrNotExist)
}

// choose chooses the disk that a file is a new version of: the only one, or the one with its name.
func (o *oldDisk) choose(name string) error {
	if len(o.disks) == 1 {
		o.top = o.disks[0]
		return nil
	}
	stem := func(name string) string { return strings.TrimSuffix(name, filepath.Ext(name)) }
	for _, same := range []func(have string) bool{
		func(have string) bool { return stem(have) == stem(name) },
		func(have string) bool { return version(have) == stem(name) },
		func(have string) bool { return version(have) == version(name) },
	} {
		for _, have := range o.disks {
			if same(have) && o.top != "" {
				return fmt.Errorf("%q may be a new version of its disk %q or %q: rename the file",
					name, o.top, have)
			} else if same(have) {
				o.top = have
			}
		}
		if o.top != "" {
			return nil
		}
	}
	return fmt.Errorf("%q is a new version of none of its disks: name the file as one of %q", name,
		o.disks)
}

// fetch fetches the disks of an image that has no index.
func (o *oldDisk) fetch(ctx context.Context, p *pusher, f planned) (err error) {
	if err := p.base.sameDisks(ctx); err != nil {
		return err
	}
	if o.dir, err = flock.TemporaryDir(); err != nil {
		return err
	}
	// By its digest: the tag may name another image by now.
	u := newPuller(&transport.Image{Source: p.base.source, Ref: p.base.ref, Named: p.base.digest,
		Digest: p.base.digest, Manifest: p.base.platforms[0].manifest}, o.dir.Path,
		PullOptions{Image: p.opt.Image, Progress: p.opt.Progress})
	if err := u.prepare(); err != nil {
		return err
	}
	all, err := u.run(ctx)
	if err != nil {
		return err
	}
	o.names, o.disks = nil, nil
	for _, one := range all {
		o.disks = append(o.disks, path.Base(one.Name))
	}
	if err := o.choose(f.name); err != nil {
		return err
	}
	for _, one := range u.files { // also those below the disks
		o.names = append(o.names, strings.TrimPrefix(one.name, layer.DiskDir+"/"))
		if one.below == maxChain && path.Base(one.name) == o.top {
			return fmt.Errorf("its disk has %d backing files, and with one more it could not be "+
				"pulled any more: push the new version as a whole, without --onto", maxChain)
		}
	}
	for _, one := range all {
		if path.Base(one.Name) == o.top {
			o.backing, o.backingFormat = o.top, one.Format
			file := filepath.Base(one.To)
			o.image, err = image.Open(one.To, image.Options{
				MaxVirtualSize: p.opt.Image.MaxVirtualSize,
				Formats:        map[string]image.Format{file: image.FormatRaw}})
		}
	}
	return err
}

// sameDisks refuses an image whose platforms have their disks in different layers: the differences
// from the disk of one platform would lie above that of another.
func (b *baseImage) sameDisks(ctx context.Context) error {
	if len(b.platforms) == 1 {
		return nil
	}
	has := make(map[string]bool) // by the digest of a layer
	var first []string
	for i, platform := range b.platforms {
		var disks []string
		for n, l := range platform.manifest.Layers {
			digest := l.Digest.String()
			if _, known := has[digest]; !known {
				shade := layer.NewShadow()
				list, err := listLayer(ctx, b.source, platform.manifest.Layers, n, shade)
				if err == nil {
					err = shade.Add(list)
				}
				if err != nil && !errors.Is(err, errDisk) {
					return fmt.Errorf("layer %s: %w", digest, err)
				}
				has[digest] = err != nil || len(shade.Trees) > 0
			}
			if has[digest] {
				disks = append(disks, digest)
			}
		}
		if i == 0 {
			first = disks
		} else if !slices.Equal(first, disks) {
			return errors.New("its platforms have different disks: name the image of one " +
				"platform, by its digest")
		}
	}
	return nil
}

// chainFile returns a file of the chain, by its name in the directory of the disks.
func (o *oldDisk) chainFile(name string) (image.Source, error) {
	for _, f := range o.chain {
		if f.entry.Name == path.Join(layer.DiskDir, name) {
			return f, nil
		}
	}
	return nil, fmt.Errorf("%s: %w", name, os.ErrNotExist)
}

// bootOf returns the blocks that a guest reads first of the old disk and that the new one changes.
func (o *oldDisk) bootOf(ctx context.Context, different clusters, size int64) (boot []BootRun,
	err error) {
	for _, f := range o.chain {
		blocks, err := f.booted(ctx)
		if err != nil {
			return nil, err
		}
		for _, b := range blocks {
			if b*BootBlock < size && different.Has(b*BootBlock/qcow2.DeltaUnit) {
				boot = append(boot, BootRun{First: b, Count: 1})
			}
		}
	}
	return boot, nil
}

// indexed are the files of the old index, for the new one. The index's copies of parts of them are
// compared with them first, before the index is trusted.
func (o *oldDisk) indexed(ctx context.Context, b *baseImage) (all []indexedFile, err error) {
	if o == nil || o.index == nil {
		return nil, nil
	}
	for i := range o.index.Files {
		f := &o.index.Files[i]
		if slices.Contains(o.left, f.Name) {
			continue
		}
		one := indexedFile{entry: *f, digests: o.index.DigestsOf(f)}
		if tables := o.index.TablesOf(f); tables != nil {
			if err := o.compareTables(ctx, b, f, tables); err != nil {
				return nil, fmt.Errorf("%s: %w", o.ref, err)
			}
			one.from = tables
		}
		if o.boot != nil && o.boot[f.Name] != nil {
			one.entry.Boot = o.boot[f.Name]
		}
		all = append(all, one)
	}
	return all, nil
}

// compareTables compares the index's copies of parts of a file with the file.
func (o *oldDisk) compareTables(ctx context.Context, b *baseImage, f *layer.IndexFile,
	tables *layer.Tables) error {
	i := slices.IndexFunc(o.chain, func(c *oldFile) bool { return c.entry == f })
	if i >= 0 {
		return compareTables(ctx, f.Name, tables, o.chain[i].ReadAt)
	}
	file, err := o.open(b, strings.TrimPrefix(f.Name, layer.DiskDir+"/"))
	if err != nil {
		return err
	}
	return compareTables(ctx, f.Name, tables, file.ReadAt)
}

// checkChain refuses a chain that is too long to be pulled.
func (o *oldDisk) checkChain(squash bool) error {
	if len(o.chain) > maxChain && !squash {
		return fmt.Errorf("its disk has %d backing files, and with one more it could not be "+
			"pulled any more: say --squash, or push the new version as a whole, without --onto",
			len(o.chain)-1)
	}
	return nil
}
