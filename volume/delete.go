package volume

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"go.uber.org/zap"

	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// Delete removes a volume and its data. If there is no such volume, it returns nil. It refuses
// while initiators use the volume or an upload is under way, unless force is set. With force, it
// first fences these users: none of their commands reaches the disk any more. It always refuses
// while other volumes need a snapshot of the volume.
//
// A deletion that has begun goes on if ctx ends, and after a restart.
func (m *Manager) Delete(ctx context.Context, name string, force bool) error {
	if api.CheckName(name) != nil {
		return nil // the volume need not exist
	}
	v, err := m.takeTurn(ctx, name)
	if err != nil {
		return err
	}
	r := v.record
	if r.State == "" {
		err := v.failure
		m.release(v)
		return err
	}
	if clones := m.opt.Disks.Leave(name, true); len(clones) > 0 {
		m.release(v)
		return api.Errorf(api.CodeInUse, "the volume %q is needed by the volumes that were cloned "+
			"from it, %s: delete those first, or wait until they are copied (copy mode %s)",
			name, strings.Join(clones, ", "), api.CopyClone)
	}
	if err := m.free(ctx, v, force); err != nil {
		m.opt.Disks.Leave(name, false)
		m.release(v)
		return err
	}
	before := r
	r.State = store.StateDeleting
	if err := m.set(v, r); err != nil {
		// The next start deletes the volume, unless the former record is saved again.
		again := m.set(v, before)
		if !force || again != nil || before.State != store.StateReady {
			err = m.retire(ctx, v, errors.Join(err, again))
		}
		m.opt.Disks.Leave(name, false)
		m.release(v)
		return err
	}
	done := make(chan error, 1)
	m.work.Go(func() {
		defer m.release(v)
		done <- m.remove(v)
	})
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return api.Errorf(api.CodeUnavailable, "the volume %q is still being deleted: try again",
			name)
	}
}

// free makes sure that nobody uses a volume that will be deleted. Without force, its disk stops
// being a LUN, so that later initiators find none. The record says only afterwards that the volume
// is being deleted, so that a volume in use survives a crash at this point.
func (m *Manager) free(ctx context.Context, v *volume, force bool) error {
	switch upload := m.uploadOf(v); {
	case upload == nil:
	case !force:
		return api.Errorf(api.CodeInUse, "an upload to the volume %q is running: end it first, "+
			"or delete the volume all the same with ?force=true", v.name)
	default:
		if err := upload.end(ctx); err != nil {
			return err
		}
	}
	if err := m.abortFetch(ctx, v); err != nil {
		return err
	}
	if v.opened == nil {
		if err := m.refuseServed(v.record); err != nil || force {
			return err
		}
		return m.refuseInMachine(v.record)
	}
	if force {
		return nil
	}
	users, err := v.opened.Withdraw()
	if err != nil || len(users) == 0 {
		return err
	}
	return &api.Error{Code: api.CodeInUse, Users: users, Message: fmt.Sprintf("the volume %q (LUN "+
		"%d) is used by %s: log out there first, and release persistent reservations, or fence "+
		"them and delete it all the same with ?force=true", v.name, v.record.LUN,
		strings.Join(users, ", "))}
}

// retire closes the disk of a volume that cannot be deleted because of err. The disk was withdrawn
// already, or the record on storage may say that the volume is deleted.
func (m *Manager) retire(ctx context.Context, v *volume, err error) error {
	if v.opened == nil && v.record.State == store.StateAwaiting {
		return err
	}
	opened := v.opened
	m.mu.Lock()
	v.opened = nil
	m.mu.Unlock()
	if opened != nil {
		err = errors.Join(err, opened.Close(ctx))
	}
	err = fmt.Errorf("the volume %q could not be deleted and is not served any more: DELETE it "+
		"again, or PUT it to have it back: %w", v.name, err)
	m.fail(v, err)
	return err
}

// remove ends a volume whose record says that it is being deleted.
func (m *Manager) remove(v *volume) error {
	if v.opened != nil {
		// Closing may fail because the last data did not reach storage. That data is removed
		// anyway.
		err := v.opened.Close(m.ctx)
		if m.ctx.Err() != nil && err != nil || api.Is(err, api.CodeUnavailable) {
			return api.Errorf(api.CodeUnavailable, "the server is stopping, and deletes the "+
				"volume %q at the next start", v.name)
		} else if err != nil {
			m.log.Warn("the disk of a volume that is deleted was not closed cleanly",
				zap.String("volume", v.name), zap.Error(err))
		}
		m.mu.Lock()
		v.opened = nil
		m.mu.Unlock()
	}
	if err := m.erase(v); err != nil {
		m.fail(v, err)
		return fmt.Errorf("the volume %q could not be deleted and is not served any more, try "+
			"again: %w", v.name, err)
	}
	m.log.Info("deleted a volume", zap.String("volume", v.name), zap.Uint16("lun", v.record.LUN))
	m.forget(v)
	return nil
}

// erase removes the files of a volume, and then its record.
func (m *Manager) erase(v *volume) error {
	if err := m.clear(v.record); err != nil {
		return err
	}
	return m.store.Remove(v.name)
}

// forget removes the volume from the manager.
func (m *Manager) forget(v *volume) {
	m.opt.Disks.Forget(v.name)
	m.mu.Lock()
	defer m.mu.Unlock()
	v.record, v.saved, v.failure = store.Record{}, nil, nil
}

// undo removes the rest of a volume that could not be made. If that fails, the next start removes
// it, and the name stays taken until then.
func (m *Manager) undo(v *volume) {
	r := v.record
	r.State = store.StateDeleting
	err := m.set(v, r) // the record may already say that the volume is ready
	if erased := m.erase(v); erased != nil {
		err = errors.Join(err, erased)
		m.log.Warn("a failed volume could not be removed: the next start removes it, or "+
			"DELETE", zap.String("volume", v.name), zap.Error(err))
		m.mu.Lock()
		v.record, v.failure = r, err
		m.mu.Unlock()
		return
	}
	m.forget(v)
}
