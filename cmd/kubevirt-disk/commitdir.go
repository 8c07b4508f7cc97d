package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/transport"
)

// openDir opens a disk in the persistent directory, or a snapshot of it. Nobody can write to it,
// and nothing is copied from its image.
func (c *committing) openDir(ctx context.Context, client *registry.Client,
	name, snapshot string) (_ *committed, err error) {
	kept, err := c.keptDisk(name)
	if err != nil {
		return nil, err
	}
	below := new(belowKept)
	if !kept.Complete {
		if below, err = c.openBelow(ctx, client, kept); err != nil {
			return nil, err
		}
	}
	inst, err := instance.Open(ctx, below.image, instance.Options{PersistentDir: kept.Dir,
		Mode: instance.CopyOnWrite, ReadOnly: true})
	if err != nil {
		if errors.As(err, new(*durable.LockedError)) {
			err = fmt.Errorf("%w; a disk that a daemon serves is committed without --%s, by its "+
				"name", err, keyPersistentDir)
		}
		return nil, errors.Join(err, below.close(true))
	}
	content := inst.Disk
	end := func() error { return errors.Join(inst.Close(), below.close(false)) }
	whole := end
	if snapshot != "" {
		opened, err := inst.OpenSnapshot(snapshot)
		if err != nil {
			return nil, errors.Join(err, end())
		}
		content = opened.Disk
		whole = func() error { return errors.Join(opened.Close(), end()) }
	}
	return &committed{name: kept.Name, close: whole, content: content, files: inst.Image(),
		snapshots: inst.CommittedBefore(content)}, nil
}

// keptDisk finds a disk on the volume by its name, or the only one for "".
func (c *committing) keptDisk(name string) (one instance.Kept, err error) {
	all, err := instance.KeptIn(c.dir)
	if err != nil {
		return one, fmt.Errorf("--%s: %w", keyPersistentDir, err)
	}
	var names []string
	for _, k := range all {
		if k.Name == name || name == "" && len(all) == 1 {
			return k, nil
		}
		names = append(names, strconv.Quote(k.Name))
	}
	switch {
	case len(all) == 0:
		return one, fmt.Errorf("--%s: there is no %s in %q, and in no directory of it",
			keyPersistentDir, instance.PersistentName, c.dir)
	case name == "":
		return one, fmt.Errorf("--%s: %q has several disks: name one of %s", keyPersistentDir,
			c.dir, strings.Join(names, ", "))
	}
	return one, fmt.Errorf("--%s: %q has no disk %q: use one of %s", keyPersistentDir, c.dir, name,
		strings.Join(names, ", "))
}

// belowKept is the image that a disk still needs. The zero value is none.
type belowKept struct {
	image  *image.Image
	cache  *cache.Cache
	stream *registry.Stream
	dir    string // of the cache
}

// close closes everything but the image, which the disk closes once it is open.
func (b *belowKept) close(withImage bool) (err error) {
	if withImage && b.image != nil {
		err = b.image.Close()
	}
	if b.stream != nil {
		err = errors.Join(err, b.stream.Close())
	}
	if b.cache != nil {
		err = errors.Join(err, b.cache.Close())
	}
	if b.dir != "" {
		err = errors.Join(err, os.RemoveAll(b.dir))
	}
	return err
}

// openBelow opens the image that a disk was made of. Of one in a registry, nothing is fetched yet
// but what it takes to open it.
func (c *committing) openBelow(ctx context.Context, client *registry.Client,
	kept instance.Kept) (_ *belowKept, err error) {
	b := new(belowKept)
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("the disk is not complete, and needs what it was made "+
				"of, %q (--%s): %w", kept.Name, flagImage, err), b.close(true))
		}
	}()
	from := c.image
	if from == "" {
		from = c.onto.Image
	}
	if filepath.IsAbs(from) || strings.HasPrefix(from, ".") {
		b.image, err = image.Open(from, image.Options{Named: true})
		return b, err
	}
	if from == "" {
		return nil, errors.New("name that")
	}
	ref, err := transport.ParseSource(from)
	if err != nil {
		return nil, err
	}
	if b.dir, err = os.MkdirTemp("", "kubevirt-disk-commit-"); err != nil {
		return nil, err
	}
	if b.cache, err = cache.Open(b.dir, cache.Options{}); err != nil {
		return nil, err
	}
	b.stream, err = client.Stream(ctx, ref, registry.StreamOptions{Cache: b.cache,
		CacheDir: b.dir, KeepDir: filepath.Join(b.dir, "image")})
	if err != nil {
		return nil, err
	}
	for _, d := range b.stream.Disks() {
		img, err := b.stream.Open(ctx, d.Name, image.Options{})
		if err != nil {
			return nil, err
		}
		if slices.Equal(image.Contents(img.Unhashed()), kept.Needs) {
			b.image = img
			return b, img.Agree(ctx) // what is read goes into another image
		}
		if err := img.Close(); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("%s is another image", from)
}
