package volume

import (
	"context"
	"fmt"
	"slices"

	"go.uber.org/zap"

	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// Snapshots lists the snapshots of a volume, oldest first.
func (m *Manager) Snapshots(ctx context.Context, name string) (all []api.Snapshot, err error) {
	err = m.withOpened(ctx, name, func(o Opened) error {
		all = o.Snapshots()
		return nil
	})
	return all, err
}

// Snapshot returns one snapshot of a volume.
func (m *Manager) Snapshot(ctx context.Context, name, snapshot string) (api.Snapshot, error) {
	all, err := m.Snapshots(ctx, name)
	if err != nil {
		return api.Snapshot{}, err
	}
	if one := snapshotOf(all, snapshot); one != nil {
		return *one, nil
	}
	return api.Snapshot{}, noSnapshot(name, snapshot)
}

func snapshotOf(all []api.Snapshot, name string) *api.Snapshot {
	at := slices.IndexFunc(all, func(s api.Snapshot) bool { return s.Name == name })
	if at < 0 {
		return nil
	}
	return &all[at]
}

func noSnapshot(volume, name string) error {
	return api.Errorf(api.CodeNotFound, "the volume %q has no snapshot %q", volume, name)
}

// TakeSnapshot takes a snapshot of a volume. If there is one of that name, it stays as it is.
func (m *Manager) TakeSnapshot(ctx context.Context, name, snapshot string) (one api.Snapshot,
	made bool, err error) {
	err = m.withOpened(ctx, name, func(o Opened) error {
		if there := snapshotOf(o.Snapshots(), snapshot); there != nil {
			one = *there
			return nil
		}
		if err := o.TakeSnapshot(ctx, snapshot); err != nil {
			return err
		}
		taken := snapshotOf(o.Snapshots(), snapshot)
		if taken == nil {
			return noSnapshot(name, snapshot)
		}
		one, made = *taken, true
		m.log.Info("took a snapshot of a volume", zap.String("volume", name),
			zap.String("snapshot", snapshot))
		return nil
	})
	return one, made, err
}

// DeleteSnapshot deletes a snapshot, if it exists. The space that only it needed is freed in the
// background.
func (m *Manager) DeleteSnapshot(ctx context.Context, name, snapshot string) error {
	return m.withOpened(ctx, name, func(o Opened) error {
		if snapshotOf(o.Snapshots(), snapshot) == nil {
			return nil
		}
		m.log.Info("deleting a snapshot of a volume", zap.String("volume", name),
			zap.String("snapshot", snapshot))
		return o.DeleteSnapshot(ctx, snapshot)
	})
}

// Revert gives a volume that nobody uses the content of a snapshot.
func (m *Manager) Revert(ctx context.Context, name, snapshot string) error {
	return m.withOpened(ctx, name, func(o Opened) error {
		if snapshotOf(o.Snapshots(), snapshot) == nil {
			return noSnapshot(name, snapshot)
		}
		if err := o.Revert(ctx, snapshot); err != nil {
			return err
		}
		m.log.Info("a volume has the content of a snapshot again", zap.String("volume", name),
			zap.String("snapshot", snapshot))
		return nil
	})
}

// Changes lists a page of the ranges that may differ between a snapshot, and the volume or a later
// snapshot.
func (m *Manager) Changes(ctx context.Context, name, since string, page api.Page) (c api.Changes,
	err error) {
	err = m.withOpened(ctx, name, func(o Opened) (err error) {
		c, err = o.Changes(ctx, since, page)
		return err
	})
	return c, err
}

// withOpened calls f with the open disk of a volume, in the volume's turn.
func (m *Manager) withOpened(ctx context.Context, name string, f func(Opened) error) error {
	if api.CheckName(name) != nil {
		return notFound(name)
	}
	v, err := m.takeTurn(ctx, name)
	if err != nil {
		return err
	}
	defer m.release(v)
	switch r := v.record; {
	case r.State == "" || r.State == store.StateDeleting:
		return notFound(name)
	case r.Place.Kind == store.PlaceClaim:
		return api.Errorf(api.CodeInvalid, "the volume %q is a file on a claim, which its machine "+
			"uses without this server: take a snapshot of the claim (VolumeSnapshot)", name)
	case v.opened == nil && v.failure != nil: // another attempt would not help
		return fmt.Errorf("the volume %q cannot be served: %w", name, v.failure)
	case v.opened == nil:
		return api.Errorf(api.CodeUnavailable, "the volume %q is not ready: ask for it, and try "+
			"again", name)
	}
	if err := m.ensureSaved(v); err != nil {
		return err
	}
	return f(v.opened)
}
