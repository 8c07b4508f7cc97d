package volume

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"kubevirt.io/disk/volume/store"
)

// missingPoll is how often the manager checks whether missing storage is back.
const missingPoll = 5 * time.Second

// loadsAtOnce is how many volumes Load opens at once. They mostly wait for storage.
const loadsAtOnce = 16

// recall reads the records of an earlier process.
func (m *Manager) recall() error {
	records, damaged, foreign, err := m.store.Load()
	if err != nil {
		return fmt.Errorf("the directory of the volumes cannot be read: %w", err)
	}
	for _, name := range foreign {
		m.log.Warn("a directory that is not a volume was ignored",
			zap.String("directory", m.store.Dir(name)))
	}
	for _, r := range records {
		m.volumes[r.Name] = &volume{name: r.Name, turn: make(chan struct{}, 1), record: r,
			saved: &r, failure: damaged[r.Name]}
		if err := m.opt.Disks.Enter(r, true); err != nil {
			return err
		}
	}
	return nil
}

// Load serves the volumes of an earlier process. Call it before initiators can log in and before
// any other method. It removes volumes that were being made or deleted. If a volume cannot be
// served, Load goes on with the others. The log and Get say why.
func (m *Manager) Load(ctx context.Context) error {
	m.mu.Lock()
	all := slices.Collect(maps.Values(m.volumes))
	m.mu.Unlock()
	var clones []*volume
	var group errgroup.Group
	group.SetLimit(loadsAtOnce)
	for _, v := range all {
		if disk, _ := v.record.Spec.From.Cloned(); disk != "" {
			clones = append(clones, v)
			continue
		}
		group.Go(func() error {
			m.loadOne(ctx, v)
			return nil
		})
	}
	_ = group.Wait()
	m.inOrder(clones)
	for _, v := range clones {
		m.loadOne(ctx, v)
	}
	m.work.Go(m.findMissing)
	return ctx.Err()
}

func (m *Manager) loadOne(ctx context.Context, v *volume) {
	v.turn <- struct{}{}
	defer m.release(v)
	if err := m.load(ctx, v); err != nil && ctx.Err() == nil {
		m.fail(v, err)
		m.log.Error("a volume cannot be served: fix the problem, and PUT it again or restart",
			zap.String("volume", v.name), zap.Error(err))
	}
}

// inOrder sorts volumes so that a clone comes after its origin.
func (m *Manager) inOrder(clones []*volume) {
	m.mu.Lock()
	defer m.mu.Unlock()
	depth := func(v *volume) (n int) {
		for v != nil && n <= len(m.volumes) { // a record that was edited may name itself
			disk, _ := v.record.Spec.From.Cloned()
			v = m.volumes[disk]
			n++
		}
		return n
	}
	slices.SortFunc(clones, func(a, b *volume) int {
		return cmp.Or(cmp.Compare(depth(a), depth(b)), strings.Compare(a.name, b.name))
	})
}

// findMissing serves volumes whose storage has come back.
func (m *Manager) findMissing() {
	tick := time.NewTicker(m.missingPoll)
	defer tick.Stop()
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-tick.C:
		}
		m.mu.Lock()
		var missing []string
		for _, v := range m.volumes {
			if v.missingLocked() {
				missing = append(missing, v.name)
			}
		}
		m.mu.Unlock()
		for _, name := range missing {
			v, err := m.takeTurn(m.ctx, name)
			if err != nil {
				return
			}
			m.mu.Lock()
			still := v.missingLocked()
			m.mu.Unlock()
			if still {
				m.back(v)
			}
			m.release(v)
		}
	}
}

// back serves a volume if its storage is back.
func (m *Manager) back(v *volume) {
	switch err := m.resume(m.ctx, v, m.timeout); {
	case err == nil:
		m.log.Info("the storage of a volume is back", zap.String("volume", v.name),
			zap.Uint16("lun", v.record.LUN))
	case fetched(v.record): // the fetch was tried again, which ended its former failure
		m.fail(v, err)
	case !errors.Is(err, fs.ErrNotExist):
		m.fail(v, &missingError{tried: err})
	}
}

func (v *volume) missingLocked() bool {
	if v.record.State == store.StateFilling {
		return errors.As(v.failure, new(*missingError)) // false for a source that is missing
	}
	return v.opened == nil && v.record.State == store.StateReady &&
		errors.Is(v.failure, fs.ErrNotExist)
}

func (m *Manager) load(ctx context.Context, v *volume) error {
	switch {
	case v.failure != nil:
		return v.failure
	case ctx.Err() != nil:
		return ctx.Err()
	}
	switch v.record.State {
	case store.StateMaking, store.StateDeleting:
		if v.record.Unmade {
			if err := m.vacate(v.record); err != nil {
				return err
			}
		}
		if err := m.erase(v); err != nil {
			return err
		}
		m.log.Info("removed what was left of a volume", zap.String("volume", v.name),
			zap.String("state", string(v.record.State)))
		m.forget(v)
	default:
		return m.resume(ctx, v, 0)
	}
	return nil
}
