package volume

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// Put makes a volume, or returns the existing one if it is as requested. A larger size enlarges it.
// If the existing one differs, the error names the differences. If the volume could not be served
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
	held, err := m.takeTurn(ctx, name)
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

// unused reports whether a volume can be made. If a former attempt to delete the volume failed,
// unused first completes the deletion.
func (m *Manager) unused(v *volume) (bool, error) {
	if v.record.State == store.StateDeleting {
		if err := m.remove(v); err != nil {
			return false, err
		}
	}
	if v.record.State == "" && v.failure != nil { // its record is damaged
		return false, v.failure
	}
	return v.record.State == "", nil
}

// create makes a volume. First it writes a record that says that the volume is being made. The
// volume exists once its record says that it is ready.
func (m *Manager) create(ctx context.Context, v *volume, spec api.Spec, unsaid bool) (err error) {
	if unsaid {
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
		Place: m.place(v.name, spec), Created: nowUTC()}
	if store.Private(v.name) {
		return api.Errorf(api.CodeInvalid, "%q is the name of a file that the server keeps beside "+
			"the volumes: use another one", v.name)
	}
	if err := m.opt.Disks.Enter(r, false); err != nil {
		return err
	}
	dir, err := m.begin(v, &r)
	if err != nil {
		m.forget(v)
		return err
	}
	if err := m.makeDisk(ctx, v, r, dir); err != nil {
		m.undo(v)
		return err
	}
	m.log.Info("made a volume", zap.String("volume", v.name), zap.Uint16("lun", r.LUN),
		zap.Int64("size_bytes", v.record.Size), zap.String("state", string(v.record.State)))
	return nil
}

// begin chooses the number of a volume, and makes its record. After an error nothing of the volume
// is left, and all that was there before is unchanged.
func (m *Manager) begin(v *volume, r *store.Record) (dir string, err error) {
	if r.Place.Kind != store.PlaceClaim {
		r.LUN, err = m.store.NextLUN(func(lun uint16) (taken bool) {
			return !m.opt.Disks.TakeNumber(r.Name, lun)
		})
		if err != nil {
			return "", fmt.Errorf("there is no LUN for the volume %q: %w", r.Name, err)
		}
	}
	r.Unmade = r.Place.Kind != store.PlaceOwn
	if dir, err = m.dir(*r); err == nil {
		err = m.enter(v, *r)
	}
	if err != nil {
		return "", err
	}
	if err := m.store.Make(*r); err != nil {
		return "", fmt.Errorf("the directory of the volume %q could not be made: %w", r.Name, err)
	}
	saved := *r
	m.noteSaved(v, &saved)
	return dir, nil
}

// makeDisk makes the disk of a volume that already has a record, and serves it.
func (m *Manager) makeDisk(ctx context.Context, v *volume, r store.Record, dir string) error {
	if r.Unmade {
		if err := m.occupy(r, dir); err != nil {
			return err
		}
		r.Unmade, r.Marked = false, r.Place.Kind != store.PlaceUsageType
		m.mu.Lock()
		v.record = r // even if it cannot be saved: the disk is removed with the volume
		m.mu.Unlock()
		if err := m.set(v, r); err != nil {
			return err
		}
	}
	if r.Spec.From != nil && r.Spec.From.Upload {
		r.State = store.StateAwaiting
		return m.set(v, r)
	}
	if !r.Spec.From.Far() && r.Place.Kind != store.PlaceClaim {
		return m.serve(ctx, v, r)
	}
	r.State = store.StateFilling
	if err := m.set(v, r); err != nil {
		return err
	}
	return m.resume(ctx, v, m.timeout)
}

// resume continues a volume from the state in its record. If an image takes longer than timeout to
// fetch, the fetch goes on in the background.
func (m *Manager) resume(ctx context.Context, v *volume, timeout time.Duration) error {
	switch {
	case fetched(v.record):
		return m.fetch(ctx, v, timeout)
	case v.record.State == store.StateReady && v.record.Place.Kind == store.PlaceClaim:
		_, _, err := m.find(v.record) // only to check the storage
		if err == nil {
			m.fail(v, nil)
		}
		return err
	case v.record.State == store.StateReady, v.record.State == store.StateFilling:
		return m.serve(ctx, v, v.record)
	}
	return nil
}

// serve opens the disk of a volume, records its state and size, and makes it a LUN.
func (m *Manager) serve(ctx context.Context, v *volume, r store.Record) error {
	opened, err := m.open(ctx, r)
	if err != nil {
		return err
	}
	return m.adopt(v, r, opened)
}

func (m *Manager) open(ctx context.Context, r store.Record) (Opened, error) {
	want, err := m.diskFor(r)
	if err != nil {
		return nil, err
	}
	return m.opt.Disks.Open(ctx, want)
}

// adopt records the state and the size of a volume whose disk is open, and makes it a LUN. On a
// claim, the disk is closed as soon as it is complete.
func (m *Manager) adopt(v *volume, r store.Record, opened Opened) error {
	onClaim := r.Place.Kind == store.PlaceClaim
	if !onClaim {
		r.State = store.StateReady
	}
	err := m.size(v, opened.Size())
	if err == nil {
		r.Size, r.BlockSize = opened.Size(), opened.BlockSize()
		err = m.set(v, r)
	}
	if err == nil && !onClaim {
		err = opened.Serve()
	}
	if err != nil {
		return errors.Join(err, opened.Close(context.Background()))
	}
	if onClaim && opened.Copied() { // at once where there is nothing to copy
		return m.finishClaim(v, opened)
	}
	m.mu.Lock()
	v.opened, v.failure = opened, nil
	m.mu.Unlock()
	if onClaim {
		m.afterCopy(v, opened, func() {
			if err := m.finishClaim(v, opened); err != nil {
				m.fail(v, err)
				m.log.Error("a claim could not be filled", zap.String("volume", v.name),
					zap.Error(err))
			}
		})
		return nil
	}
	m.unmark(v.record)
	if r.File != "" {
		m.afterCopy(v, opened, func() { m.dropFile(v) })
	}
	return nil
}

// update compares a volume with a request, and enlarges it.
func (m *Manager) update(ctx context.Context, v *volume, spec api.Spec, unsaid bool) error {
	if err := m.ensureSaved(v); err != nil {
		return err
	}
	if !unsaid {
		is := v.record.Spec
		if v.record.BlockSize != 0 {
			is.BlockSize = v.record.BlockSize // the disk's block size, requested or not
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
		if err := m.retry(ctx, v); err != nil {
			return err
		}
	}
	if int64(spec.Size) > v.record.Size {
		return m.grow(ctx, v, int64(spec.Size))
	}
	return nil
}

// renew keeps the query of the address in the new request: the old one may have expired.
func (m *Manager) renew(v *volume, from *api.Source) error {
	is := v.record.Spec.From
	if from == nil || is == nil || from.URL == is.URL {
		return nil
	}
	next := v.record
	next.Spec.From = from
	if err := m.set(v, next); err != nil {
		return fmt.Errorf("the address of the volume %q could not be kept: %w", v.name, err)
	}
	return nil
}

// retry tries to serve a volume that could not be served.
func (m *Manager) retry(ctx context.Context, v *volume) error {
	if v.opened != nil {
		return nil
	}
	if err := m.resume(ctx, v, m.timeout); err != nil {
		m.fail(v, err)
		return fmt.Errorf("the volume %q exists, but cannot be served: %w", v.name, err)
	}
	m.log.Info("a volume is tried again", zap.String("volume", v.name))
	return nil
}

func (m *Manager) fail(v *volume, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v.failure = err
}

// grow enlarges a volume. It changes the record first: the next start enlarges a disk that is
// smaller than its record. If a disk is larger than its record, another program has enlarged it.
func (m *Manager) grow(ctx context.Context, v *volume, size int64) error {
	before := v.record
	if m.uploadOf(v) != nil || before.State == store.StateFilling {
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
		err = errors.Join(err, m.set(v, before))
		m.mu.Lock()
		v.record = before // answers have the size of the LUN, not the saved one
		m.mu.Unlock()
		return fmt.Errorf("the volume %q could not be enlarged: %w", v.name, err)
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
		dir, err := m.dir(v.record)
		if err != nil {
			return err
		}
		opened, err := m.open(ctx, v.record) // opening enlarges the disk
		if err != nil {
			return err
		}
		return errors.Join(opened.Close(m.ctx), share(dir))
	}
	return nil // it awaits its data
}
