package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"go.uber.org/zap"

	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// Put makes a volume, or returns the existing one if it is as asked. A larger size enlarges it. If
// another volume has the name, the error names the differences. If the volume could not be served
// before, Put tries again.
func (m *Manager) Put(ctx context.Context, name string, asked api.Spec) (v Volume, created bool,
	err error) {
	if err := api.CheckName(name); err != nil {
		return Volume{}, false, api.Errorf(api.CodeInvalid, "%v", err)
	}
	spec, err := asked.Resolved()
	if err != nil {
		return Volume{}, false, api.Errorf(api.CodeInvalid, "%v", err)
	}
	held, err := m.hold(ctx, name)
	if err != nil {
		return Volume{}, false, err
	}
	defer m.release(held)
	created, err = m.unused(held)
	switch {
	case err != nil:
	case created:
		err = m.create(ctx, held, spec, asked.IsZero())
	default:
		err = m.update(ctx, held, spec, asked.IsZero())
	}
	if err != nil {
		return Volume{}, false, err
	}
	v, err = m.Get(name)
	return v, created, err
}

// unused reports whether a volume can be made. If an attempt to delete it has failed, it goes on
// with that.
func (m *Manager) unused(v *volume) (bool, error) {
	if v.record.State == store.StateDeleting {
		if err := m.remove(v); err != nil {
			return false, err
		}
	}
	if v.record.State == "" && v.failure != nil { // its record is damaged
		return false, failed("%w", v.failure)
	}
	return v.record.State == "", nil
}

// create makes a volume. First it writes a record that says that the volume is being made. The
// volume exists once its record says that it is ready.
func (m *Manager) create(ctx context.Context, v *volume, spec api.Spec, any bool) (err error) {
	if any {
		if spec, err = m.opt.Disks.Default(); err != nil {
			return err
		}
		if spec, err = spec.Resolved(); err != nil {
			return err
		}
	}
	if spec.Needed() {
		return api.Errorf(api.CodeInvalid, "size: an empty disk needs a size, such as 20Gi; or "+
			"name a source with from")
	}
	r := store.Record{Name: v.name, State: store.StateMaking, Size: int64(spec.Size), Spec: spec,
		Place: m.place(v.name, spec), Created: now()}
	defer m.unchoose(v)
	r.LUN, err = m.chooseLUN(v, r.Place.Kind == store.PlaceClaim)
	if errors.As(err, new(*api.Error)) {
		return err
	} else if err != nil {
		return failed("there is no LUN for the volume %q: %w", v.name, err)
	}
	dir, err := m.dir(r)
	if err != nil {
		return err
	}
	if err := m.begin(v, r, dir); err != nil {
		m.forget(v)
		return err
	}
	if err := m.make(ctx, v, r, dir); err != nil {
		m.undo(v)
		return err
	}
	m.log.Info("made a volume", zap.String("volume", v.name), zap.Uint16("lun", r.LUN),
		zap.Int64("size_bytes", v.record.Size), zap.String("state", string(v.record.State)))
	return nil
}

// begin makes the record of a volume. After an error nothing of the volume is left, and everything
// that was there before is unchanged.
func (m *Manager) begin(v *volume, r store.Record, dir string) error {
	if err := m.enter(v, r); err != nil {
		return err
	}
	if err := m.mayClone(r); err != nil {
		return err
	}
	if r.Place.Kind == store.PlaceRoot || r.Place.Kind == store.PlaceClaim {
		if err := m.vacant(r, dir); err != nil {
			return err
		}
	}
	if err := m.store.Make(r); err != nil {
		return failed("the directory of the volume %q could not be made: %w", r.Name, err)
	}
	m.noteSaved(v, &r)
	return nil
}

// make makes the disk of a volume that already has a record, and serves it.
func (m *Manager) make(ctx context.Context, v *volume, r store.Record, dir string) error {
	switch r.Place.Kind {
	case store.PlaceUsageType:
		if err := makePlace(dir); errors.Is(err, fs.ErrExist) {
			return api.Errorf(api.CodeInUse, "%q is there already, perhaps of a volume that was "+
				"deleted while this storage was away: move it away, or use another name", dir)
		} else if err != nil {
			return failed("the directory of the volume %q could not be made: %w", r.Name, err)
		}
	case store.PlaceRoot, store.PlaceClaim:
		if err := mark(dir, r.Name); err != nil {
			return failed("the directory of the volume %q cannot be used: %w", r.Name, err)
		}
		r.Marked = true
	}
	if r.Spec.From != nil && r.Spec.From.Upload {
		r.State = store.StateAwaiting
		return m.set(v, r)
	}
	remote := r.Spec.From.Far()
	if !remote && r.Place.Kind != store.PlaceClaim {
		return m.serve(ctx, v, r, store.StateReady)
	}
	r.State = store.StateFilling
	if err := m.set(v, r); err != nil {
		return err
	}
	if remote {
		return m.fetch(ctx, v)
	}
	return m.fillClaim(ctx, v)
}

// serve opens the disk of a volume, records its state and size, and makes it a LUN.
func (m *Manager) serve(ctx context.Context, v *volume, r store.Record, next store.State) error {
	dir, err := m.dir(r)
	if err != nil {
		return err
	}
	opened, err := m.opt.Disks.Open(ctx, m.disk(r, dir))
	if err != nil {
		return failed("%w", err)
	}
	return m.adopt(v, r, opened, next)
}

// adopt records the state and the size of a volume whose disk is open, and makes it a LUN.
func (m *Manager) adopt(v *volume, r store.Record, opened Opened, next store.State) error {
	r.State = next
	err := m.size(v, opened.Size())
	if err == nil {
		r.Size, r.BlockSize = opened.Size(), opened.BlockSize()
		err = m.set(v, r)
	}
	if err == nil {
		err = opened.Serve()
	}
	if err != nil {
		return failed("%w", join(err, opened.Close(context.Background())))
	}
	m.mu.Lock()
	v.opened, v.failure = opened, nil
	m.mu.Unlock()
	m.unmark(v.record)
	if r.File != "" {
		m.dropFile(v, opened)
	}
	return nil
}

// disk says what to open for a volume.
func (m *Manager) disk(r store.Record, dir string) Disk {
	return Disk{Name: r.Name, LUN: r.LUN, Dir: dir, Size: r.Size,
		BlockSize: r.Spec.BlockSize, Source: r.Spec.From,
		File: r.File, CopyMode: r.Spec.Copy.Mode, AccessMode: r.Spec.AccessMode,
		UsageType: r.Spec.Copy.UsageType, Made: r.State == store.StateReady}
}

// update compares a volume with a request, and enlarges it.
func (m *Manager) update(ctx context.Context, v *volume, spec api.Spec, any bool) error {
	if err := m.certain(v); err != nil {
		return err
	}
	if !any {
		is := v.record.Spec
		if v.record.BlockSize != 0 {
			is.BlockSize = v.record.BlockSize // what the disk has, asked for or not
		}
		all := api.Differences(is, spec)
		if spec.Size != 0 && int64(spec.Size) < v.record.Size {
			all = append(all, api.Difference{Field: "size", Is: fmt.Sprint(v.record.Size),
				Asked: fmt.Sprint(spec.Size) + ", and a disk is never made smaller"})
		}
		if len(all) > 0 {
			return api.Differ(v.name, all)
		}
		if err := m.renew(v, spec.From); err != nil {
			return err
		}
	}
	if v.failure != nil {
		if err := m.again(ctx, v); err != nil {
			return err
		}
	}
	if int64(spec.Size) > v.record.Size {
		return m.grow(ctx, v, int64(spec.Size))
	}
	return nil
}

// renew keeps the query with which an address is asked for now: that of before may have expired.
func (m *Manager) renew(v *volume, from *api.Source) error {
	is := v.record.Spec.From
	if from == nil || is == nil || from.URL == is.URL {
		return nil
	}
	next := v.record
	next.Spec.From = from
	if err := m.set(v, next); err != nil {
		return failed("the address of the volume %q could not be kept: %w", v.name, err)
	}
	return nil
}

// again tries to serve a volume that could not be served.
func (m *Manager) again(ctx context.Context, v *volume) error {
	if v.opened != nil {
		return nil
	}
	if err := m.tryAgain(ctx, v); err != nil {
		m.fail(v, err)
		return failed("the volume %q exists, but cannot be served: %w", v.name, err)
	}
	m.log.Info("a volume is tried again", zap.String("volume", v.name))
	return nil
}

func (m *Manager) tryAgain(ctx context.Context, v *volume) error {
	switch {
	case fetched(v.record):
		return m.fetch(ctx, v)
	case v.record.State == store.StateFilling:
		return m.fillClaim(ctx, v)
	case v.record.State == store.StateReady && v.record.Place.Kind != store.PlaceClaim:
		return m.serve(ctx, v, v.record, store.StateReady)
	case v.record.State == store.StateReady:
		return m.presentOnClaim(v)
	}
	return nil
}

func (m *Manager) fail(v *volume, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v.failure = err
}

// grow enlarges a volume. It changes the record first: the next start enlarges a disk that is
// smaller than its record. If a disk is larger than its record, somebody else has enlarged it.
func (m *Manager) grow(ctx context.Context, v *volume, size int64) error {
	before := v.record
	if v.filling != nil || before.State == store.StateFilling {
		return api.Errorf(api.CodeBusy, "the volume %q is being filled, and grows after that: try "+
			"again", v.name)
	}
	if err := m.size(v, size); err != nil {
		return err
	}
	next := before
	next.Size, next.Spec.Size = size, api.Size(size)
	err := m.set(v, next)
	if err == nil {
		err = m.growDisk(ctx, v, size)
	}
	if err != nil {
		err = join(err, m.set(v, before))
		m.mu.Lock()
		v.record = before // answers tell the size that the LUN has, whatever could be saved
		m.mu.Unlock()
		return failed("the volume %q could not be enlarged: %w", v.name, err)
	}
	m.log.Info("enlarged a volume", zap.String("volume", v.name), zap.Int64("size_bytes", size),
		zap.Int64("before_bytes", before.Size))
	return nil
}

func (m *Manager) growDisk(ctx context.Context, v *volume, size int64) error {
	switch {
	case v.opened != nil:
		return v.opened.Grow(size)
	case v.record.State == store.StateReady && v.record.Place.Kind == store.PlaceClaim:
		return m.onClaim(ctx, v, func(o Opened) error { return nil }) // opening it is enough
	}
	return nil // it awaits its data
}
