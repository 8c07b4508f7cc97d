package daemon

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/target"
	"kubevirt.io/disk/volume"
	"kubevirt.io/disk/volume/api"
)

// Open makes the disk of a volume, or opens the disk of an earlier run.
func (v *volumeDisks) Open(ctx context.Context, want volume.Disk) (volume.Opened, error) {
	d := v.d
	if err := d.disks.begin(); err != nil {
		return nil, api.Errorf(api.CodeUnavailable, "%v", err)
	}
	defer d.disks.changes.Done()
	s, err := v.open(ctx, want)
	if err != nil {
		return nil, refusal(err)
	}
	o := &volumeDisk{d: d, disk: s, inst: d.disks.look(s).instance, claimed: want.LUN == 0}
	if o.inst.Size() < want.Size {
		if err := o.enlarge(want.Size); err != nil {
			return nil, refusal(errors.Join(err, d.abandon(s)))
		}
	}
	return o, nil
}

func (v *volumeDisks) open(ctx context.Context, want volume.Disk) (*servedDisk, error) {
	d := v.d
	what := Disk{Name: want.Name, Dir: want.Dir, volume: true, unserved: want.LUN == 0,
		DiskSettings: DiskSettings{
			LUN: want.LUN, CopyMode: instance.CopyMode(want.CopyMode),
			AccessMode: target.AccessMode(want.AccessMode), UsageType: want.UsageType}}
	there, err := v.find(want)
	if err != nil {
		return nil, err
	}
	imageless := want.File == "" && (want.Source == nil || want.Source.Upload)
	if imageless && !there && want.Source != nil {
		return nil, fmt.Errorf("the data that was uploaded is missing: %q: %w",
			filepath.Join(want.Dir, instance.PersistentName), fs.ErrNotExist)
	}
	if there || imageless {
		if !there {
			what.Size, what.Empty = want.Size, true
		}
		// A complete disk needs no image, which may be gone.
		s, err := d.prepare(ctx, what)
		if imageless || !errors.As(err, new(*instance.PersistentError)) {
			return s, err
		}
	}
	if !there {
		what.Size = want.Size
	}
	if what.Image, what.after, err = v.image(ctx, want); err != nil {
		return nil, err
	}
	return d.prepare(ctx, what)
}

// find reports whether the disk is there. For a disk that was made, it is an error if it is not.
func (v *volumeDisks) find(want volume.Disk) (there bool, err error) {
	path := filepath.Join(want.Dir, instance.PersistentName)
	_, err = os.Lstat(path)
	if err == nil && want.Made {
		_, err = os.Lstat(instance.PersistentState(want.Dir))
	}
	switch {
	case err == nil:
		return true, nil
	case !errors.Is(err, fs.ErrNotExist):
		return false, err
	case want.Made:
		return false, fmt.Errorf("the disk was made, and is missing: mount its storage, or put "+
			"back %q; the volume comes back then by itself: %w", err.(*fs.PathError).Path, err)
	}
	return false, nil
}

// image opens the source of a disk.
func (v *volumeDisks) image(ctx context.Context, want volume.Disk) (
	img *image.Image, after func() error, err error) {
	switch {
	case want.File != "":
		img, err := v.uploaded(filepath.Join(want.Dir, want.File))
		return img, nil, err
	case want.Source.Image != "":
		img, err := v.local(want.Source.Image)
		return img, nil, err
	}
	return v.streamed(ctx, want)
}

// uploaded opens an image that somebody has uploaded. It must not refer to another file, because
// that would be a file of this machine.
func (v *volumeDisks) uploaded(path string) (*image.Image, error) {
	img, err := image.Open(path, image.Options{})
	if err != nil {
		return nil, err
	}
	if chain := img.Info().BackingChain; len(chain) > 0 {
		return nil, errors.Join(api.Errorf(api.CodeInvalid, "the image has the backing file %q, "+
			"and nothing but itself was uploaded: upload one that stands alone, as \"qemu-img "+
			"convert\" makes", chain[0].Name), img.Close())
	}
	return img, nil
}

// local opens an image of this machine, by its name.
func (v *volumeDisks) local(name string) (*image.Image, error) {
	opt := v.d.opt.Images
	path := ""
	for _, named := range opt.Paths {
		if filepath.Base(named) == name {
			path = named
		}
	}
	if len(opt.Paths) == 0 && opt.Dir != "" && filepath.IsLocal(name) &&
		filepath.Base(name) == name && !strings.HasPrefix(name, ".") {
		path = filepath.Join(opt.Dir, name)
	}
	unknown := api.Errorf(api.CodeInvalid, "from.image: there is no image %q here", name)
	if path == "" {
		return nil, unknown
	}
	img, err := image.Open(path, image.Options{Formats: v.d.opt.Settings.formats()})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, unknown
	}
	return img, err
}

// streamed opens a disk of an image in a registry. Everything that is found out about the image is
// kept with the disk.
func (v *volumeDisks) streamed(ctx context.Context, want volume.Disk) (
	*image.Image, func() error, error) {
	ref, err := registry.ParseReference(want.Source.Reference)
	if err == nil && !ref.Remote() && !v.named(ref) {
		err = errors.New("it is not an image in a registry")
	}
	if err != nil {
		return nil, nil, api.Errorf(api.CodeInvalid, "from.reference: %v", err)
	}
	if err := v.d.openCache(); err != nil {
		return nil, nil, err
	}
	stream, err := v.d.streams.client.Stream(ctx, ref, registry.StreamOptions{
		Cache: v.d.streams.cache, CacheDir: v.d.opt.Streams.CacheDir,
		KeepDir:      filepath.Join(want.Dir, instance.PersistentName+".source"),
		WhenComplete: v.d.opt.Streams.WhenComplete})
	if err != nil {
		return nil, nil, err
	}
	name, err := chooseDisk(stream, want.Source.Disk)
	if err != nil {
		return nil, nil, errors.Join(err, stream.Close())
	}
	img, err := stream.Open(ctx, name, image.Options{})
	if err != nil {
		return nil, nil, errors.Join(err, stream.Close())
	}
	return img, stream.Close, nil
}

// named reports whether the daemon's own settings name the reference. Only then may it be a file.
func (v *volumeDisks) named(ref registry.Reference) bool {
	return slices.ContainsFunc(v.d.opt.Streams.References, func(o registry.Reference) bool {
		return o.String() == ref.String()
	})
}

// chooseDisk finds the disk that is meant in an image.
func chooseDisk(stream *registry.Stream, name string) (string, error) {
	var names []string
	for _, one := range stream.Disks() {
		if name == one.Name {
			return name, nil
		}
		names = append(names, one.Name)
	}
	if name == "" && len(names) == 1 {
		return names[0], nil
	}
	return "", api.Errorf(api.CodeInvalid, "from.disk: the image has no disk %q: use one of %s",
		name, strings.Join(names, ", "))
}

// refusal sorts errors by whether the client can correct them.
func refusal(err error) error {
	var refused *api.Error
	switch {
	case err == nil, errors.As(err, &refused):
		return err
	case errors.Is(err, errStopping):
		return api.Errorf(api.CodeUnavailable, "%v", errStopping)
	case errors.Is(err, disk.ErrNoSpace):
		return api.Errorf(api.CodeLimit, "%v", err)
	case errors.Is(err, disk.ErrReadOnly):
		return api.Errorf(api.CodeInvalid, "a disk that nobody may write, as with access-mode %s, "+
			"keeps its size", api.ReadShared)
	case errors.As(err, new(*instance.SizeError)),
		errors.As(err, new(*instance.UnsupportedModeError)):
		return api.Errorf(api.CodeInvalid, "%v", err)
	}
	return err
}

// volumeDisk is the open disk of a volume.
type volumeDisk struct {
	d       *Daemon
	disk    *servedDisk
	inst    *instance.Instance
	claimed bool // its disk is for a claim, and never becomes a LUN

	// released is not nil once the disk was withdrawn. It is closed when nothing uses the disk any
	// more.
	released <-chan struct{}

	completed struct {
		sync.Once
		done chan struct{}
	}
	closing struct {
		sync.Once
		done chan struct{}
		err  error // set before done is closed
	}
}

func (o *volumeDisk) Size() int64 { return o.inst.Size() }

func (o *volumeDisk) Identity() (serial, naa string) {
	return o.inst.Identity.Serial, hex.EncodeToString(o.inst.Identity.NAA[:])
}

func (o *volumeDisk) Failure() error { return o.d.disks.failure(o.disk) }

// Serve makes the disk a LUN.
func (o *volumeDisk) Serve() error {
	srv, err := o.d.serving()
	if err == nil {
		err = o.d.disks.begin()
	}
	if err != nil {
		return api.Errorf(api.CodeUnavailable, "%v", err)
	}
	defer o.d.disks.changes.Done()
	if err := o.d.expose(srv, o.disk); err != nil {
		return refusal(o.d.orStopping(err))
	}
	if !o.d.volumes.loading.Load() { // while loading, one event announces all of them
		o.d.measure()
		o.d.announceLUN(o.d.disks.statusOf(o.disk))
	}
	return nil
}

// Grow enlarges the disk and tells initiators.
func (o *volumeDisk) Grow(size int64) error {
	if err := o.d.disks.begin(); err != nil {
		return api.Errorf(api.CodeUnavailable, "%v", err)
	}
	defer o.d.disks.changes.Done()
	if err := o.enlarge(size); err != nil {
		return refusal(err)
	}
	if o.claimed {
		return nil
	}
	srv, err := o.d.serving()
	if err != nil {
		return err
	}
	o.d.measure()
	return srv.ResizeLUN(o.disk.lun)
}

func (o *volumeDisk) enlarge(size int64) error {
	if err := o.inst.Grow(size); err != nil {
		return err
	}
	o.d.disks.resized(o.disk, size)
	return nil
}

// completePoll is how often to look whether a disk has become complete.
const completePoll = 200 * time.Millisecond

// Completed is closed when the disk has copied all of its image.
func (o *volumeDisk) Completed() <-chan struct{} {
	o.completed.Do(func() {
		o.completed.done = make(chan struct{})
		if o.disk.progress.Finished() {
			close(o.completed.done)
			return
		}
		go o.watch()
	})
	return o.completed.done
}

func (o *volumeDisk) watch() {
	tick := time.NewTicker(completePoll)
	defer tick.Stop()
	for {
		select {
		case <-o.d.stopping.Done():
			return
		case <-tick.C:
		}
		if o.disk.progress.Finished() {
			close(o.completed.done)
			return
		}
		if o.d.disks.look(o.disk).instance == nil {
			return // it was closed
		}
	}
}

// Withdraw ends serving, unless initiators use the disk.
func (o *volumeDisk) Withdraw() (users []string, err error) {
	if !o.d.disks.look(o.disk).serving {
		return nil, nil
	}
	released, err := o.d.withdraw(o.disk)
	var used *target.InUseError
	switch {
	case errors.As(err, &used):
		return used.Initiators, nil
	case err != nil:
		return nil, api.Errorf(api.CodeUnavailable, "%v", err)
	}
	o.released = released
	return nil, nil
}

// Close ends serving and closes the disk.
func (o *volumeDisk) Close(ctx context.Context) error {
	o.closing.Do(func() {
		o.closing.done = make(chan struct{})
		go func() {
			defer close(o.closing.done)
			o.closing.err = o.end()
		}()
	})
	select {
	case <-o.closing.done:
		return o.closing.err
	case <-ctx.Done():
		return fmt.Errorf("%v is not served any more, and commands still hang in its disk: %w",
			o.disk, ctx.Err())
	}
}

func (o *volumeDisk) end() error {
	// The disk is closed to be deleted, so nothing needs to reach storage.
	if o.released != nil {
		<-o.released
		return o.d.abandon(o.disk)
	}
	if !o.d.disks.look(o.disk).serving {
		return errors.Join(o.d.flush(o.disk), o.d.abandon(o.disk))
	}
	err := o.d.remove(context.Background(), o.disk.lun, func(*servedDisk) error { return nil })
	if errors.Is(err, errStopping) {
		return api.Errorf(api.CodeUnavailable, "%v", err)
	}
	return err
}
