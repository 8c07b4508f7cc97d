package volumes

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/internal/daemon/served"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/transport"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/volume"
	"kubevirt.io/disk/volume/api"
)

// Open makes the disk of a volume, or opens the disk of an earlier run.
func (v *Volumes) Open(ctx context.Context, want volume.Disk) (volume.Opened, error) {
	s, err := v.open(ctx, want)
	if err != nil {
		return nil, refusal(err)
	}
	return &volumeDisk{disks: v.disks, disk: s, inst: s.Instance(), loading: &v.loading}, nil
}

func (v *Volumes) open(ctx context.Context, want volume.Disk) (*served.Disk, error) {
	what := plan.Disk{Name: want.Name, Dir: want.Dir, Volume: true,
		KeptBy: v.manager.ID(), Unserved: want.LUN == 0,
		AtLeast: want.Size,
		DiskSettings: options.DiskSettings{
			LUN: want.LUN, BlockSize: want.BlockSize, CopyMode: instance.CopyMode(want.CopyMode),
			AccessMode: serving.AccessMode(want.AccessMode), UsageType: want.UsageType}}
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
		s, err := v.disks.Open(ctx, what)
		if imageless || !errors.As(err, new(*instance.PersistentError)) {
			return s, err
		}
	}
	if !there {
		what.Size = want.Size
	}
	if disk, snapshot := want.Source.Cloned(); disk != "" && want.File == "" {
		what.BlockSizeKnown = there // an earlier version may have made it with others
		s, err := v.disks.Clone(ctx, what, disk, snapshot)
		missing := errors.Is(err, fs.ErrNotExist) || errors.Is(err, instance.ErrSnapshotMissing)
		if missing && !there {
			err = api.Errorf(api.CodeInvalid, "from.snapshot: %v", err)
		}
		return s, err
	}
	if err := v.image(ctx, want, &what); err != nil {
		return nil, err
	}
	return v.disks.Open(ctx, what)
}

// find reports whether the disk is there. For a disk that was made, it is an error if it is not.
func (v *Volumes) find(want volume.Disk) (there bool, err error) {
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
func (v *Volumes) image(ctx context.Context, want volume.Disk, to *plan.Disk) (err error) {
	switch {
	case want.File != "":
		to.Image, err = v.uploaded(filepath.Join(want.Dir, want.File))
		return err
	case want.Source.Image != "":
		to.Image, err = v.sources.Local(want.Source.Image)
		if to.Image == nil && err == nil {
			err = api.Errorf(api.CodeInvalid, "from.image: there is no image %q here",
				want.Source.Image)
		}
		return err
	}
	return v.streamed(ctx, want, to)
}

// uploaded opens an image that somebody has uploaded. It must not refer to another file, because
// that would be a file of this machine.
func (v *Volumes) uploaded(path string) (*image.Image, error) {
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

// streamed opens a disk of an image in a registry, or at an address. Everything that is found out
// about the image is kept with the disk.
func (v *Volumes) streamed(ctx context.Context, want volume.Disk, to *plan.Disk) error {
	ref, err := v.far(want.Source)
	if err != nil {
		return err
	}
	stream, err := v.sources.Stream(ctx, ref,
		filepath.Join(want.Dir, instance.PersistentName+".source"))
	if err != nil {
		return err
	}
	name, err := chooseDisk(stream, want.Source.Disk)
	if err != nil {
		return errors.Join(err, stream.Close())
	}
	img, err := stream.Open(ctx, name, image.Options{})
	if err != nil {
		return errors.Join(err, stream.Close())
	}
	to.Image, to.After = img, stream.Close
	to.SignedBy, to.From = stream.SignedBy(), stream.Reference()
	return nil
}

// far is the image that a client means. Only if the daemon's own settings name it, it may be a file
// of this machine, or at an address outside of those that clients may name: others would reach
// servers that only this machine can.
func (v *Volumes) far(from *api.Source) (transport.Reference, error) {
	ref, err := transport.ParseReference(from.Reference)
	field, text := "from.reference", from.Reference
	if from.URL != "" {
		ref, err = transport.ParseSource(from.URL + "@" + from.Digest)
		field, text = "from.url", ref.String()
	}
	for _, own := range v.opt.Streams.References {
		if own.String() == text {
			return own, nil
		}
	}
	switch {
	case err != nil:
	case from.URL == "" && !ref.Remote():
		err = errors.New("it is not an image in a registry")
	case from.URL == "":
	case !ref.IsAddress():
		err = errors.New("it is not an address of the form https://HOST/PATH")
	case len(v.opt.Volumes.URLs) == 0:
		err = fmt.Errorf("no addresses are allowed here: the server names them with %v",
			v.opt.Setting(&v.opt.Volumes.URLs))
	default:
		ref, err = ref.Within(v.opt.Volumes.URLs)
	}
	if err != nil {
		return ref, api.Errorf(api.CodeInvalid, "%s: %v", field, err)
	}
	return ref, nil
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
	var used *serving.InUseError
	switch {
	case err == nil, errors.As(err, &refused):
		return err
	case errors.As(err, &used):
		return &api.Error{Code: api.CodeInUse, Message: err.Error(), Users: used.Initiators}
	case errors.Is(err, instance.ErrSnapshotMissing):
		return api.Errorf(api.CodeNotFound, "%v", err)
	case errors.Is(err, instance.ErrSnapshotExists), errors.Is(err, instance.ErrSnapshotInUse):
		return api.Errorf(api.CodeInUse, "%v", err)
	case errors.As(err, new(*instance.SnapshotError)):
		return api.Errorf(api.CodeInvalid, "%v", err)
	case errors.Is(err, served.ErrStopping):
		return api.Errorf(api.CodeUnavailable, "%v", served.ErrStopping)
	case errors.Is(err, disk.ErrNoSpace):
		return api.Errorf(api.CodeLimit, "%v", err)
	case errors.Is(err, disk.ErrReadOnly):
		return api.Errorf(api.CodeInvalid, "a disk that nobody may write, as with access-mode %s, "+
			"keeps its size", api.ReadShared)
	case errors.As(err, new(*instance.SizeError)), errors.As(err, new(*instance.BlockSizeError)),
		errors.As(err, new(*instance.UnsupportedModeError)):
		return api.Errorf(api.CodeInvalid, "%v", err)
	}
	return err
}

// volumeDisk is the open disk of a volume.
type volumeDisk struct {
	disks   *served.Disks
	disk    *served.Disk
	inst    *instance.Instance
	loading *atomic.Bool // see Volumes

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

func (o *volumeDisk) BlockSize() int { return o.inst.BlockSize }

func (o *volumeDisk) Identity() (serial, naa string) {
	return o.inst.Identity.Serial, hex.EncodeToString(o.inst.Identity.NAA[:])
}

func (o *volumeDisk) Failure() error { return o.disk.Failure() }

// Serve makes the disk a LUN.
func (o *volumeDisk) Serve() error {
	return refusal(o.disks.Serve(o.disk, o.loading.Load()))
}

// Grow enlarges the disk and tells initiators.
func (o *volumeDisk) Grow(size int64) error { return refusal(o.disks.Grow(o.disk, size)) }

// Snapshots lists what was kept of the disk.
func (o *volumeDisk) Snapshots() (all []api.Snapshot) {
	for _, s := range o.inst.Snapshots() {
		all = append(all, api.Snapshot{Name: s.Name, ID: s.ID, Created: s.Created,
			Size: api.Size(s.Size),
			Used: api.Size(s.Used)})
	}
	return all
}

// TakeSnapshot keeps what the disk holds now.
func (o *volumeDisk) TakeSnapshot(ctx context.Context, name string) error {
	return refusal(o.disks.TakeSnapshot(ctx, name, o.disk))
}

// DeleteSnapshot forgets a snapshot.
func (o *volumeDisk) DeleteSnapshot(ctx context.Context, name string) error {
	return refusal(o.disks.DeleteSnapshot(ctx, o.disk, name))
}

// Revert gives the disk the content of a snapshot.
func (o *volumeDisk) Revert(ctx context.Context, name string) error {
	return refusal(o.disks.Revert(ctx, o.disk, name))
}

// maxRanges is how many ranges a page of changes has at most.
const maxRanges = 4096

// Changes lists what may have changed since a snapshot.
func (o *volumeDisk) Changes(ctx context.Context, since string, page api.Page) (c api.Changes,
	err error) {
	from, err := o.inst.OpenSnapshot(since)
	if err != nil {
		return c, refusal(err)
	}
	defer from.Close() // it only forgets that the snapshot is in use
	d, of := o.inst.Disk, from.Snapshot.ID
	if page.Until != "" {
		snapshot, err := o.inst.OpenSnapshot(page.Until)
		if err != nil {
			return c, refusal(err)
		}
		defer snapshot.Close()
		d, of = snapshot.Disk, of+"-"+snapshot.Snapshot.ID
	}
	sum := sha256.Sum256([]byte(of))
	switch of = hex.EncodeToString(sum[:16]); {
	case page.Of == "" && page.Offset > 0:
		return c, api.Errorf(api.CodeInvalid, "of: give it as the page before has it, next to the "+
			"offset: a snapshot may have been made again under its name since")
	case page.Of != "" && page.Of != of:
		return c, api.Errorf(api.CodeNotFound, "a snapshot was made again under its name since "+
			"the page before: begin with the first page again")
	}
	history, ok := d.(disk.Historian)
	if !ok {
		return c, api.Errorf(api.CodeInvalid, "the volume cannot tell what has changed")
	}
	c = api.Changes{Since: since, Until: page.Until, Of: of, Size: d.Size(), Next: page.Offset,
		Ranges: []api.Range{}}
	for c.Next < c.Size && len(c.Ranges) < maxRanges && ctx.Err() == nil {
		changed, n, err := history.Changed(ctx, from.Snapshot.ID, c.Next, c.Size-c.Next)
		if err != nil {
			return c, refusal(err)
		}
		if last := len(c.Ranges) - 1; changed && last >= 0 &&
			c.Ranges[last].Offset+c.Ranges[last].Length == c.Next {
			c.Ranges[last].Length += n
		} else if changed {
			c.Ranges = append(c.Ranges, api.Range{Offset: c.Next, Length: n})
		}
		c.Next += n
	}
	c.Next = min(c.Next, c.Size)
	return c, ctx.Err()
}

// Copied reports whether the disk has copied all of its image.
func (o *volumeDisk) Copied() bool { return o.disk.Progress.Finished() }

// completePoll is how often to look whether a disk has become complete.
const completePoll = 200 * time.Millisecond

// Completed is closed when the disk has copied all of its image.
func (o *volumeDisk) Completed() <-chan struct{} {
	o.completed.Do(func() {
		o.completed.done = make(chan struct{})
		if o.disk.Progress.Finished() {
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
		case <-o.disks.Stopping.Done():
			return
		case <-tick.C:
		}
		if o.disk.Progress.Finished() {
			close(o.completed.done)
			return
		}
		if o.disk.Instance() == nil {
			return // it was closed
		}
	}
}

// Withdraw ends serving, unless initiators use the disk.
func (o *volumeDisk) Withdraw() (users []string, err error) {
	released, err := o.disks.Withdraw(o.disk)
	var used *serving.InUseError
	switch {
	case errors.As(err, &used):
		return used.Initiators, nil
	case err != nil:
		if errors.Is(err, instance.ErrSnapshotInUse) {
			return nil, refusal(err)
		}
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
		return o.disks.Abandon(o.disk)
	}
	err := o.disks.End(context.Background(), o.disk, false)
	if errors.Is(err, served.ErrStopping) {
		return api.Errorf(api.CodeUnavailable, "%v", err)
	}
	return err
}
