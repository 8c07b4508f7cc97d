package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// UploadPrefix is the prefix of all files that an upload keeps beside disk.img.
const UploadPrefix = diskName + ".upload"

// Filling is one upload into a volume that awaits its data.
type Filling struct {
	m   *Manager
	v   *volume
	dir string

	ctx      context.Context // ends when the upload must end
	cancel   context.CancelFunc
	released func()
	gone     chan struct{} // closed by Release

	received, total atomic.Int64
}

// Fill begins an upload. Each volume takes one at a time. The caller puts the data into files in
// Dir, calls Complete, and always calls Release. If mayMake is set, Fill makes a missing volume,
// and then made is true: the upload is this volume's, whoever else deletes and makes the name.
func (m *Manager) Fill(ctx context.Context, name string, mayMake bool) (f *Filling, made bool,
	err error) {
	if err := api.CheckName(name); err != nil {
		if mayMake {
			return nil, false, api.Errorf(api.CodeInvalid, "%v", err)
		}
		return nil, false, notFound(name)
	}
	v, err := m.hold(ctx, name)
	if err != nil {
		return nil, false, err
	}
	defer m.release(v)
	if mayMake {
		if made, err = m.unused(v); err != nil {
			return nil, false, err
		}
	}
	if made {
		spec, err := api.Spec{From: &api.Source{Upload: true}}.Resolved()
		if err == nil {
			err = m.create(ctx, v, spec, false)
		}
		if err != nil {
			return nil, false, err
		}
	}
	f, err = m.fill(v)
	return f, made, err
}

func (m *Manager) fill(v *volume) (*Filling, error) {
	name := v.name
	switch {
	case v.record.State == "" || v.record.State == store.StateDeleting:
		return nil, notFound(name)
	case v.record.State != store.StateAwaiting:
		return nil, api.Errorf(api.CodeHasData, "the volume %q has its data: delete it first, or "+
			"upload to another one", name)
	case v.filling != nil:
		return nil, api.Errorf(api.CodeBusy, "an upload to the volume %q is running already: let "+
			"it end first", name)
	}
	dir, _, err := m.find(v.record)
	if err != nil {
		return nil, fmt.Errorf("the volume %q cannot be filled: %w", name, err)
	}
	if v.saved == nil {
		// What came before may have been recorded as the disk, so it was not removed then.
		if err := m.certain(v); err != nil {
			return nil, err
		}
		if err := clearDisk(dir); err != nil {
			return nil, fmt.Errorf("the volume %q cannot be filled: %w", name, err)
		}
	}
	f := &Filling{m: m, v: v, dir: dir, gone: make(chan struct{})}
	f.ctx, f.cancel = context.WithCancel(m.ctx)
	f.released = sync.OnceFunc(f.release)
	m.mu.Lock()
	v.filling = f
	m.mu.Unlock()
	return f, nil
}

// Dir is the directory for the data: disk.img for a raw disk, or an image of another name. The
// names of all other files that the caller makes there begin with UploadPrefix. They are deleted
// with the volume.
func (f *Filling) Dir() string { return f.dir }

// Context ends when the upload must end, because its volume is deleted or the server stops.
func (f *Filling) Context() context.Context { return f.ctx }

// Size is the size of the volume in bytes. 0: the volume gets the size of the data.
func (f *Filling) Size() int64 {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	return int64(f.v.record.Spec.Size)
}

// Reserve counts the volume with a size before that much data is accepted. It returns an error if
// there is no room for it, or the volume is smaller.
func (f *Filling) Reserve(size int64) error {
	if size < 0 {
		return api.Errorf(api.CodeInvalid, "no disk has %d bytes", size)
	}
	want := f.Size()
	if want > 0 && size > want {
		return api.Errorf(api.CodeTooLarge, "the disk has %d bytes, and the volume %q %d: make "+
			"the volume larger first", size, f.v.name, want)
	}
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if err := f.m.roomLocked(f.v, max(size, want)); err != nil {
		return err
	}
	f.v.reserved = size
	return nil
}

// Progress notes how many bytes have come, and the total. total 0: unknown.
func (f *Filling) Progress(received, total int64) {
	f.received.Store(received)
	f.total.Store(total)
}

func (f *Filling) progress() *api.Progress {
	return &api.Progress{Received: f.received.Load(), Total: f.total.Load()}
}

// Complete makes the volume from the data, and serves it. Without an image, disk.img is the disk,
// and the caller has brought all of it to storage. Otherwise image is a file in Dir, which is
// removed when the disk has copied all of it. After an error the volume is as empty as before:
// disk.img and all files with UploadPrefix are gone.
func (f *Filling) Complete(ctx context.Context, image string) error {
	m, v := f.m, f.v
	held, err := f.hold(ctx)
	if err != nil {
		return err
	}
	defer m.release(held)
	if held != v || v.record.State != store.StateAwaiting {
		return notFound(v.name)
	}
	before := v.record
	r := before
	r.File = image
	r.Size = int64(before.Spec.Size)
	if r.Place.Kind == store.PlaceClaim {
		r.State = store.StateFilling
		err = m.set(v, r)
	}
	if err == nil {
		err = m.serve(ctx, v, r)
	}
	if err == nil {
		m.log.Info("a volume has its data", zap.String("volume", v.name),
			zap.Uint16("lun", r.LUN), zap.Int64("size_bytes", v.record.Size))
		return nil
	}
	// The record first: the disk of a volume that is ready is never made again.
	if setErr := m.set(v, before); setErr != nil {
		err = errors.Join(err, setErr)
	} else {
		err = errors.Join(err, clearDisk(f.dir))
	}
	return fmt.Errorf("the data of the volume %q cannot be used: %w", v.name, err)
}

// hold holds the volume. A deletion that waits for the end of this upload holds it too, so hold
// does not wait for that.
func (f *Filling) hold(ctx context.Context) (*volume, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(f.ctx, cancel)()
	held, err := f.m.hold(ctx, f.v.name)
	switch {
	case f.ctx.Err() == nil:
		return held, err
	case err == nil:
		f.m.release(held)
	}
	return nil, notFound(f.v.name)
}

// Undo deletes the volume, which was made for this upload, and releases it. It does nothing if
// somebody else deletes the volume: by then its name may be another's.
func (f *Filling) Undo(ctx context.Context) error {
	m, v := f.m, f.v
	defer f.Release()
	held, err := f.hold(ctx)
	if err != nil {
		if f.ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer m.release(held)
	if held != v || v.record.State != store.StateAwaiting {
		return nil
	}
	f.Release()
	r := v.record
	r.State = store.StateDeleting
	if err := m.set(v, r); err != nil {
		return err
	}
	return m.remove(v)
}

// Release ends the upload, so that another one can begin. Later calls do nothing.
func (f *Filling) Release() { f.released() }

func (f *Filling) release() {
	f.cancel()
	f.m.mu.Lock()
	f.v.filling, f.v.reserved = nil, 0
	f.m.mu.Unlock()
	close(f.gone)
}

// end ends the upload on behalf of another operation, and waits until it has ended.
func (f *Filling) end(ctx context.Context) error {
	f.cancel()
	select {
	case <-f.gone:
		return nil
	case <-ctx.Done():
		return api.Errorf(api.CodeUnavailable, "the upload to the volume %q has not ended yet: "+
			"try again", f.v.name)
	}
}

// afterCopy calls f in the volume's turn, when its disk has copied all of its source. It does not,
// if the disk is closed before, or the manager stops.
func (m *Manager) afterCopy(v *volume, opened Opened, f func()) {
	m.work.Go(func() {
		select {
		case <-opened.Ended():
		case <-m.ctx.Done():
			return
		}
		held, err := m.hold(m.ctx, v.name)
		if err != nil {
			return
		}
		defer m.release(held)
		if held == v && v.opened == opened && opened.Copied() {
			f()
		}
	})
}

// dropFile removes the image of a volume whose disk has copied all of it.
func (m *Manager) dropFile(v *volume) {
	if v.record.File == "" {
		return
	}
	if err := m.forgetFile(v); err != nil {
		m.log.Warn("the uploaded image of a volume is not needed any more and could not be "+
			"removed: it is removed after the next start", zap.String("volume", v.name),
			zap.Error(err))
	}
}

// forgetFile removes the image of a volume, because the disk no longer needs it.
func (m *Manager) forgetFile(v *volume) error {
	r := v.record
	dir, err := m.dir(r)
	if err != nil {
		return err
	}
	if err := osfile.Remove(filepath.Join(dir, r.File)); err != nil {
		return err
	}
	r.File = ""
	return m.set(v, r)
}

// finishClaim closes the disk of a claim, because a virtual machine uses it there, and records that
// it can be used.
func (m *Manager) finishClaim(v *volume, opened Opened) error {
	dir, err := m.dir(v.record)
	if err != nil {
		return err
	}
	m.mu.Lock()
	v.opened = nil
	m.mu.Unlock()
	if err := opened.Close(m.ctx); err != nil {
		return err
	}
	if err := share(dir); err != nil {
		return err
	}
	if v.record.File != "" {
		if err := m.forgetFile(v); err != nil {
			return err
		}
	}
	r := v.record
	r.State = store.StateReady
	m.mu.Lock()
	v.failure = nil
	m.mu.Unlock()
	if err := m.set(v, r); err != nil {
		return err
	}
	m.unmark(r)
	return nil
}

// share lets QEMU use the disk of a claim: it runs as another user, in the claim's group. The owner
// of the claim may have put another file in its place, whose mode must not change.
func share(dir string) error {
	f, err := osfile.OpenFile(filepath.Join(dir, diskName), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Chmod(0o660), f.Close())
}
