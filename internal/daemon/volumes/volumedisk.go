package volumes

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/internal/daemon/served"
	"kubevirt.io/disk/internal/daemon/sources"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/transport"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/volume"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
	"kubevirt.io/disk/volume/upload"
)

// opener opens the disks of volumes among those that are served.
type opener struct {
	opt     *options.Options
	disks   *served.Disks
	sources *sources.Sources
	uploads *upload.Handler // set by New, before the first volume is deleted

	found   []plan.Disk // the daemon's own disks; set by Volumes.Serve
	loading atomic.Bool // volumes are being served at the start
}

// Enter says that there is a volume.
func (v *opener) Enter(r store.Record, earlier bool) error {
	one := served.Volume{Name: r.Name, LUN: r.LUN, Unknown: r.State == ""}
	one.Disk, one.Snapshot = r.Spec.From.Cloned()
	return refusal(v.disks.AddVolume(one, earlier))
}

// TakeNumber gives a volume a number, unless it is taken.
func (v *opener) TakeNumber(name string, lun uint16) bool { return v.disks.TakeNumber(name, lun) }

// Leave says whether a volume will be deleted, unless others need it.
func (v *opener) Leave(name string, leaving bool) (needed []string) {
	return v.disks.LeaveVolume(name, leaving)
}

// Forget says that a volume was deleted.
func (v *opener) Forget(name string) {
	v.disks.DropVolume(name)
	v.uploads.Forget(name)
}

// Open makes the disk of a volume, or opens the disk of an earlier run.
func (v *opener) Open(ctx context.Context, want volume.Disk) (volume.Opened, error) {
	s, err := v.open(ctx, want)
	if err != nil {
		return nil, refusal(err)
	}
	return &volumeDisk{disks: v.disks, disk: s, inst: s.Instance(), loading: &v.loading}, nil
}

func (v *opener) open(ctx context.Context, want volume.Disk) (*served.Disk, error) {
	what := plan.Disk{Name: want.Name, Dir: want.Dir, Volume: true, Unserved: want.LUN == 0,
		AtLeast: want.Size,
		DiskSettings: options.DiskSettings{
			LUN: want.LUN, BlockSize: want.BlockSize, CopyMode: instance.CopyMode(want.CopyMode),
			AccessMode: serving.AccessMode(want.AccessMode), UsageType: want.UsageType}}
	imageless := want.File == "" && (want.Source == nil || want.Source.Upload)
	if want.There || imageless {
		if !want.There {
			what.Size, what.Empty = want.Size, true
		}
		// A complete disk needs no image, which may be gone.
		s, err := v.disks.Open(ctx, what)
		if imageless || !errors.As(err, new(*instance.PersistentError)) {
			return s, err
		}
	}
	if !want.There {
		what.Size = want.Size
	}
	if disk, snapshot := want.Source.Cloned(); disk != "" && want.File == "" {
		what.BlockSizeKnown = want.There // an earlier version may have made it with another size
		s, err := v.disks.Clone(ctx, what, disk, snapshot)
		missing := errors.Is(err, fs.ErrNotExist) || errors.Is(err, instance.ErrSnapshotMissing)
		if missing && !want.There {
			err = api.Errorf(api.CodeInvalid, "from.snapshot: %v", err)
		}
		return s, err
	}
	if err := v.image(ctx, want, &what); err != nil {
		return nil, err
	}
	return v.disks.Open(ctx, what)
}

// Waits says what the image of a disk waits for, and why it does not come.
func (v *opener) Waits(from *api.Source, since time.Time) string {
	ref, err := v.far(from)
	if err != nil {
		return "" // Open reports that, too
	}
	source := v.sources.Source(ref)
	return source.Name + served.Why(source, since)
}

// Default is a volume from the only image, or an empty one of the size in the settings.
func (v *opener) Default() (api.Spec, error) {
	size := api.Size(v.opt.Settings.Disk.Size)
	switch found := v.found; {
	case len(found) == 1 && found[0].Far != nil:
		ref := v.opt.Streams.References[0].String()
		return api.Spec{Size: size, From: &api.Source{Reference: ref}}, nil
	case len(found) == 1 && found[0].Image != nil:
		return api.Spec{Size: size, From: &api.Source{Image: found[0].Name}}, nil
	case len(found) > 1:
		names := make([]string, len(found))
		for i, f := range found {
			names[i] = f.Name
		}
		return api.Spec{}, api.Errorf(api.CodeInvalid, "from: name the source of the volume: "+
			"there are several images, %s", strings.Join(names, ", "))
	case size == 0:
		return api.Spec{}, api.Errorf(api.CodeInvalid, "size: give a size such as 20Gi: there is "+
			"no image")
	}
	return api.Spec{Size: size}, nil
}

// Place returns a directory for disks.
func (v *opener) Place(p store.Place) (string, error) {
	switch p.Kind {
	case store.PlaceRoot:
		if dir := v.opt.PersistentDir; dir != "" {
			return dir, nil
		}
		return "", fmt.Errorf("the disk lies in the persistent directory, but none is set: name "+
			"it with %v", v.opt.Setting(&v.opt.PersistentDir))
	case store.PlaceClaim:
		return v.claim(p.Name)
	case store.PlaceUsageType:
		dir, err := v.opt.UsageTypes.Dir(p.Name)
		if err != nil {
			return "", api.Errorf(api.CodeInvalid, "copy.usage-type: %v", err)
		}
		return dir, nil
	}
	return "", fmt.Errorf("there is no place %q", p.Kind)
}

// claim returns the directory of a claim.
func (v *opener) claim(name string) (string, error) {
	claims := v.opt.Volumes.Claims
	if dir, ok := claims[name]; ok {
		return dir, nil
	}
	known := "there are none"
	if len(claims) > 0 {
		known = "use one of " + strings.Join(slices.Sorted(maps.Keys(claims)), ", ")
	}
	return "", api.Errorf(api.CodeInvalid, "pvc.claimname: no claim %q is mounted here: %s (%v)",
		name, known, v.opt.Setting(&v.opt.Volumes.Claims))
}

// Single reports whether the persistent directory is for one disk, and has none.
func (v *opener) Single() bool {
	dir := v.opt.PersistentDir
	return dir != "" && len(v.found) == 0 && !instance.HasPersistent(dir)
}

// image opens the source of a disk.
func (v *opener) image(ctx context.Context, want volume.Disk, to *plan.Disk) (err error) {
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

// uploaded opens an uploaded image. It must not refer to another file, because that would be a file
// of this machine.
func (v *opener) uploaded(path string) (*image.Image, error) {
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

// streamed opens a disk of an image in a registry, or at an address. Records about the image are
// kept with the disk.
func (v *opener) streamed(ctx context.Context, want volume.Disk, to *plan.Disk) error {
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
	to.Image, to.After, to.Source = img, stream.Close, v.sources.Source(ref)
	to.SignedBy, to.From, to.Digests = stream.SignedBy(), stream.Reference(), stream.Digests
	return nil
}

// far is the image that a client names. Only if the daemon's own settings name it, too, it may be a
// file of this machine, or at an address outside of those that clients may name: otherwise clients
// could reach servers that only this machine can reach.
func (v *opener) far(from *api.Source) (transport.Reference, error) {
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

// chooseDisk finds the requested disk in an image.
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

// refusal classifies errors by whether the client can correct them.
func refusal(err error) error {
	var used *serving.InUseError
	var snapshot *instance.SnapshotError
	switch {
	case err == nil, errors.As(err, new(*api.Error)), disk.IsNoSpace(err): // the server knows these
		return err
	case errors.As(err, &used):
		return &api.Error{Code: api.CodeInUse, Message: err.Error(), Users: used.Initiators}
	case errors.Is(err, instance.ErrSnapshotMissing):
		return api.Errorf(api.CodeNotFound, "%v", err)
	case errors.Is(err, instance.ErrSnapshotExists), errors.Is(err, instance.ErrSnapshotInUse):
		return api.Errorf(api.CodeInUse, "%v", err)
	case errors.As(err, &snapshot) && snapshot.Err == nil: // otherwise its storage has failed
		return api.Errorf(api.CodeInvalid, "%v", err)
	case errors.Is(err, served.ErrStopping):
		return api.Errorf(api.CodeUnavailable, "%v", served.ErrStopping)
	case errors.As(err, new(*served.NameTakenError)):
		return api.Errorf(api.CodeInUse, "%v", err)
	case errors.As(err, new(*served.LeavingError)):
		return api.Errorf(api.CodeInvalid, "from.snapshot: %v", err)
	case errors.Is(err, disk.ErrReadOnly):
		return api.Errorf(api.CodeInvalid, "a disk that nobody may write, as with access-mode %s, "+
			"keeps its size", api.ReadShared)
	case errors.As(err, new(*instance.SizeError)), errors.As(err, new(*instance.BlockSizeError)),
		errors.As(err, new(*instance.UnsupportedModeError)):
		return api.Errorf(api.CodeInvalid, "%v", err)
	}
	return err
}

type volumeDisk struct {
	disks   *served.Disks
	disk    *served.Disk
	inst    *instance.Instance
	loading *atomic.Bool // see opener
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

// Snapshots lists the snapshots of the disk.
func (o *volumeDisk) Snapshots() (all []api.Snapshot) {
	for _, s := range o.inst.Snapshots() {
		all = append(all, api.Snapshot{Name: s.Name, ID: s.ID, Created: s.Created,
			Size: api.Size(s.Size),
			Used: api.Size(s.Used)})
	}
	return all
}

// TakeSnapshot takes a snapshot of the disk.
func (o *volumeDisk) TakeSnapshot(ctx context.Context, name string) error {
	return refusal(o.disks.TakeSnapshot(ctx, name, o.disk))
}

// DeleteSnapshot deletes a snapshot.
func (o *volumeDisk) DeleteSnapshot(ctx context.Context, name string) error {
	return refusal(o.disks.DeleteSnapshot(ctx, o.disk, name))
}

// Revert gives the disk the content of a snapshot.
func (o *volumeDisk) Revert(ctx context.Context, name string) error {
	return refusal(o.disks.Revert(ctx, o.disk, name))
}

// maxRanges is the most ranges in a page of changes.
const maxRanges = 4096

// Changes lists ranges that may have changed since a snapshot.
func (o *volumeDisk) Changes(ctx context.Context, since string, page api.Page) (c api.Changes,
	err error) {
	from, err := o.inst.OpenSnapshot(since)
	if err != nil {
		return c, refusal(err)
	}
	defer from.Close() // it only ends the use of the snapshot
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

// Ended is closed when the disk has copied all of its image, or is closed.
func (o *volumeDisk) Ended() <-chan struct{} { return o.disk.Progress.Ended() }

// Withdraw ends serving, unless initiators use the disk.
func (o *volumeDisk) Withdraw() (users []string, err error) {
	var used *serving.InUseError
	switch err := o.disks.Withdraw(o.disk); {
	case errors.As(err, &used):
		return used.Initiators, nil
	case err == nil, errors.Is(err, instance.ErrSnapshotInUse):
		return nil, refusal(err)
	default:
		return nil, api.Errorf(api.CodeUnavailable, "%v", err)
	}
}

// Close ends serving and closes the disk. If it was served until now, it is closed to be deleted,
// so its data need not be durable.
func (o *volumeDisk) Close(ctx context.Context) error {
	return refusal(o.disks.End(ctx, o.disk))
}
