// Package committed opens disks that become images in a registry: disks of a running daemon, of a
// volume and of an export. The command commit calls it; errors do not name its flags.
package committed

import (
	"context"
	"path"
	"strings"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/registry"
)

// Disk is an open disk that is stored as an image.
type Disk struct {
	Name string
	// Reference names the image in a registry that the disk was made from. "": unknown.
	Reference string

	// content does not change. It may have the optional interfaces of a disk.
	content disk.Disk
	// files are the image.Contents of the image that the content reads from. snapshots are the IDs
	// of the snapshots that it was made from, by images with the same content. nil: unknown.
	files     []string
	snapshots map[string]string
	// stored is called when an image has the content. May be nil.
	stored func(ctx context.Context, image string) error
	close  func() error
}

// Close closes the disk, and everything that was opened for it.
func (d *Disk) Close() error { return d.close() }

// Prepare makes a push store the disk, and returns the name of its file.
func (d *Disk) Prepare(ctx context.Context, opt *registry.PushOptions) (file string) {
	opt.Onto.Origins = d.origins(ctx)
	opt.Open = func(name string) (*image.Image, error) {
		return image.OpenSource(ctx, name,
			func(context.Context, string) (image.Source, error) {
				return notClosed{&instance.Source{Disk: d.content}}, nil
			}, image.Options{Formats: map[string]image.Format{name: image.FormatRaw}})
	}
	return fileOf(d.Name)
}

// Stored notes that the image with a digest has the disk, for the next commit.
func (d *Disk) Stored(ctx context.Context, digest string) error {
	if d.stored == nil {
		return nil
	}
	return d.stored(ctx, storedAs(digest, fileOf(d.Name)))
}

// origins are the origins of the content.
func (d *Disk) origins(ctx context.Context) (all []registry.Origin) {
	add := func(o registry.Origin, since string) {
		o.Changed = func(off, length int64) (bool, int64, error) {
			return disk.Changed(ctx, d.content, since, off, length)
		}
		all = append(all, o)
	}
	for stored, snapshot := range d.snapshots {
		if digest, file, _ := strings.Cut(stored, "/"); file == fileOf(d.Name) {
			add(registry.Origin{Digest: digest}, snapshot)
		}
	}
	if len(d.files) > 0 {
		add(registry.Origin{Files: d.files}, "")
	}
	return all
}

// notClosed is a source that is opened more than once.
type notClosed struct{ image.Source }

func (notClosed) Close() error { return nil }

// storedAs is the note about a stored snapshot. It has the disk's name, too: an image with that
// digest has the content in the disk of that name only.
func storedAs(digest, file string) string { return digest + "/" + file }

// fileOf is the name of a disk in the image, made from the disk's name, which may be a reference
// with a tag, or name a snapshot.
func fileOf(name string) string {
	name, _, _ = strings.Cut(path.Base(name), "@")
	name, _, _ = strings.Cut(name, ":")
	if name == "" || name == "." || name == "/" {
		name = "disk"
	}
	return strings.TrimSuffix(name, path.Ext(name)) + ".raw"
}
