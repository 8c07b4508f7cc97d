package committed

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/transport"
)

// Kept is a persistent disk that no daemon serves meanwhile.
type Kept struct {
	Dir      string // the persistent directory
	Name     string // of the disk; "": the only one
	Snapshot string // of it; "": the disk as it is
	// Below is the image that the disk was made from, if it still needs one: a reference, or the
	// path of a file. "": it was not given.
	Below string
}

// BelowError says that the image that a disk was made from cannot be read, and is needed.
type BelowError struct {
	Name string // of the image
	Err  error
}

func (e *BelowError) Error() string {
	return fmt.Sprintf("the disk is not complete, and needs what it was made of, %q: %v", e.Name,
		e.Err)
}

func (e *BelowError) Unwrap() error { return e.Err }

// NoDiskError says that a directory does not have the requested disk.
type NoDiskError struct{ why string }

func (e *NoDiskError) Error() string { return e.why }

// OpenKept opens a persistent disk, read-only. Nothing is copied from its image. The error may be a
// *NoDiskError, a *BelowError, or a *durable.LockedError.
func OpenKept(ctx context.Context, client *registry.Client, k Kept) (*Disk, error) {
	kept, err := k.find()
	if err != nil {
		return nil, err
	}
	below := new(below)
	if !kept.Complete {
		if below, err = openBelow(ctx, client, k.Below, kept); err != nil {
			return nil, &BelowError{kept.Name, err}
		}
	}
	inst, err := instance.Open(ctx, below.image, instance.Options{PersistentDir: kept.Dir,
		Mode: instance.CopyOnWrite, ReadOnly: true})
	if err != nil {
		return nil, errors.Join(err, below.close(true))
	}
	d := &Disk{Name: kept.Name, content: inst.Disk, files: inst.Image(),
		close: func() error { return errors.Join(inst.Close(), below.close(false)) }}
	if k.Snapshot == "" {
		if err := whole(inst); err != nil {
			return nil, errors.Join(fmt.Errorf("%q: %w", kept.Name, err), d.close())
		}
	} else {
		opened, err := inst.OpenSnapshot(k.Snapshot)
		if err != nil {
			return nil, errors.Join(err, d.close())
		}
		end := d.close
		d.content = opened.Disk
		d.close = func() error { return errors.Join(opened.Close(), end()) }
	}
	d.snapshots = inst.CommittedBefore(d.content)
	return d, nil
}

// whole refuses a disk that may have half of an atomic write, which its next start would undo.
func whole(inst *instance.Instance) error {
	record, err := inst.Store().Load(disk.StoredAtomic)
	if err == nil && len(record) > 0 {
		err = errors.New("the daemon ended within an atomic write of the guest, and may have " +
			"left half of it: serve the disk once, which takes that back, or name a snapshot")
	}
	return err
}

// find finds the disk in the directory.
func (k Kept) find() (one instance.Kept, err error) {
	all, err := instance.KeptIn(k.Dir)
	if err != nil {
		return one, &NoDiskError{err.Error()}
	}
	var names []string
	for _, one := range all {
		if one.Name == k.Name || k.Name == "" && len(all) == 1 {
			return one, nil
		}
		names = append(names, strconv.Quote(one.Name))
	}
	why := fmt.Sprintf("%q has no disk %q: use one of %s", k.Dir, k.Name, strings.Join(names, ", "))
	if len(all) == 0 {
		why = fmt.Sprintf("there is no %s in %q, and in no directory of it",
			instance.PersistentName, k.Dir)
	} else if k.Name == "" {
		why = fmt.Sprintf("%q has several disks: name one of %s", k.Dir, strings.Join(names, ", "))
	}
	return one, &NoDiskError{why}
}

// below is the image that a disk still needs. The zero value is none.
type below struct {
	image  *image.Image
	cache  *cache.Cache
	stream *registry.Stream
	dir    *flock.OwnDir // of the cache
}

// close closes everything but the image, which the disk closes once it is open.
func (b *below) close(withImage bool) (err error) {
	if withImage && b.image != nil {
		err = b.image.Close()
	}
	if b.stream != nil {
		err = errors.Join(err, b.stream.Close())
	}
	if b.cache != nil {
		err = errors.Join(err, b.cache.Close())
	}
	return errors.Join(err, b.dir.Remove())
}

// openBelow opens the image that a disk was made from. Of an image in a registry, it fetches only
// what opening needs.
func openBelow(ctx context.Context, client *registry.Client, from string,
	kept instance.Kept) (_ *below, err error) {
	b := new(below)
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close(true))
		}
	}()
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
	if b.dir, err = flock.TemporaryDir(); err != nil {
		return nil, err
	}
	if b.cache, err = cache.Open(b.dir.Path, cache.Options{}); err != nil {
		return nil, err
	}
	b.stream, err = client.Stream(ctx, ref, registry.StreamOptions{Cache: b.cache,
		CacheDir: b.dir.Path, KeepDir: filepath.Join(b.dir.Path, "image")})
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
			return b, img.Agree(ctx) // the content goes into another image
		}
		if err := img.Close(); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("%s is another image", from)
}
