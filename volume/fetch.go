package volume

import (
	"context"
	"errors"
	"io/fs"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// fetchTimeout is how long a request waits for an image in a registry. A disk of an image with a
// table of contents can be used at once, so the answer describes the ready volume. Any other image
// must be fetched first, and the answer does not wait for that.
const fetchTimeout = time.Second

// fetching is the opening of a volume's disk in the background: its image may have to be fetched
// first.
type fetching struct {
	cancel context.CancelFunc
	waits  func() string
	done   chan struct{} // closed when the disk is open, or cannot be opened

	// set before done is closed
	opened Opened
	err    error
}

// fetched reports whether the volume's image is in a registry and its disk is not complete yet.
func fetched(r store.Record) bool {
	return r.Spec.From.Far() && r.State == store.StateFilling
}

// fetch makes the disk of a volume whose image is in a registry. If that takes longer than timeout,
// it goes on in the background, and after a restart. The caller has the volume's turn.
func (m *Manager) fetch(ctx context.Context, v *volume, timeout time.Duration) error {
	want, err := m.diskFor(v.record)
	if err != nil {
		return err
	}
	fetchCtx, cancel := context.WithCancel(m.ctx)
	began := time.Now()
	f := &fetching{cancel: cancel, done: make(chan struct{}),
		waits: func() string { return m.opt.Disks.Waits(want.Source, began) }}
	m.mu.Lock()
	v.fetching, v.failure = f, nil
	m.mu.Unlock()
	m.work.Go(func() {
		defer close(f.done)
		f.opened, f.err = m.opt.Disks.Open(fetchCtx, want)
	})
	select {
	case <-f.done:
		return m.endFetch(v, f)
	case <-time.After(timeout):
	case <-ctx.Done():
	}
	m.work.Go(func() { m.awaitFetch(v, f) })
	return nil
}

// endFetch gives the opened disk to the volume. The caller has the volume's turn.
func (m *Manager) endFetch(v *volume, f *fetching) error {
	f.cancel()
	m.mu.Lock()
	v.fetching = nil
	m.mu.Unlock()
	err := f.err
	if err == nil {
		err = m.adopt(v, v.record, f.opened)
	}
	if err == nil {
		return nil
	}
	// The disk is unused so far. So first change the record, which says that the disk was made.
	r := v.record
	r.State = store.StateFilling
	if setErr := m.set(v, r); setErr != nil {
		return errors.Join(err, setErr)
	}
	if dir, dirErr := m.dir(v.record); dirErr == nil {
		if clearErr := clearDisk(dir); !errors.Is(clearErr, fs.ErrNotExist) {
			err = errors.Join(err, clearErr)
		}
	}
	return err
}

// awaitFetch ends a fetch that no request is waiting for.
func (m *Manager) awaitFetch(v *volume, f *fetching) {
	<-f.done // after Close, this ends soon
	held, err := m.takeTurn(m.ctx, v.name)
	if err != nil {
		return
	}
	defer m.release(held)
	if held != v || v.fetching != f || m.ctx.Err() != nil {
		return
	}
	if err := m.endFetch(v, f); err != nil {
		m.fail(v, err)
		m.log.Error("the image of a volume could not be fetched: PUT it again to try again, or "+
			"delete it", zap.String("volume", v.name), zap.Error(err))
		return
	}
	m.log.Info("a volume can use its image",
		zap.String("volume", v.name), zap.Uint16("lun", v.record.LUN))
}

// abortFetch ends a fetch for another operation. The caller has the volume's turn, and closes
// v.opened.
func (m *Manager) abortFetch(ctx context.Context, v *volume) error {
	f := v.fetching
	if f == nil {
		return nil
	}
	f.cancel()
	select {
	case <-f.done:
	case <-ctx.Done():
		return api.Errorf(api.CodeUnavailable, "the image of the volume %q is being fetched, and "+
			"that has not ended yet: try again", v.name)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	v.fetching = nil
	if f.err == nil {
		v.opened = f.opened
	}
	return nil
}
