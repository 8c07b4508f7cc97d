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

// Upload is one upload into a volume that awaits its data.
type Upload struct {
	m   *Manager
	v   *volume
	dir string

	ctx      context.Context // ends when the upload must end
	cancel   context.CancelFunc
	released func()
	gone     chan struct{} // closed by Release

	received, total atomic.Int64
}

// Fill begins an upload. Each volume takes one at a time. The caller puts the data into Disk, or
// into a file next to it, calls Complete, and always calls Release. With mayMake, Fill makes a
// missing volume. Then made is true, and the upload is for that volume only, not for a later one of
// the same name.
func (m *Manager) Fill(ctx context.Context, name string, mayMake bool) (u *Upload, made bool,
	err error) {
	if err := api.CheckName(name); err != nil {
		if mayMake {
			return nil, false, api.Errorf(api.CodeInvalid, "%v", err)
		}
		return nil, false, notFound(name)
	}
	v, err := m.takeTurn(ctx, name)
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
	u, err = m.beginUpload(v)
	return u, made, err
}

func (m *Manager) beginUpload(v *volume) (*Upload, error) {
	name := v.name
	switch {
	case v.record.State == "" || v.record.State == store.StateDeleting:
		return nil, notFound(name)
	case v.record.State != store.StateAwaiting:
		return nil, api.Errorf(api.CodeHasData, "the volume %q has its data: delete it first, or "+
			"upload to another one", name)
	case m.uploadOf(v) != nil:
		return nil, api.Errorf(api.CodeBusy, "an upload to the volume %q is running already: let "+
			"it end first", name)
	}
	dir, _, err := m.find(v.record)
	if err != nil {
		return nil, fmt.Errorf("the volume %q cannot be filled: %w", name, err)
	}
	if v.saved == nil {
		// Data of an earlier upload may be recorded as the disk, so it was not removed.
		if err := m.ensureSaved(v); err != nil {
			return nil, err
		}
		if err := clearDisk(dir); err != nil {
			return nil, fmt.Errorf("the volume %q cannot be filled: %w", name, err)
		}
	}
	u := &Upload{m: m, v: v, dir: dir, gone: make(chan struct{})}
	u.ctx, u.cancel = context.WithCancel(m.ctx)
	u.released = sync.OnceFunc(u.release)
	m.mu.Lock()
	v.upload = u
	m.mu.Unlock()
	return u, nil
}

// uploadOf is the upload under way, or nil. It may end while another operation has the volume's
// turn.
func (m *Manager) uploadOf(v *volume) *Upload {
	m.mu.Lock()
	defer m.mu.Unlock()
	return v.upload
}

// Disk is the path of the disk. The paths of all files that the caller makes begin with it. They
// are deleted with the volume.
func (u *Upload) Disk() string { return filepath.Join(u.dir, diskName) }

// Files lists the files that the caller may remove: all files whose paths begin with that of the
// disk, except those that the volume needs without a disk.
func (u *Upload) Files() (paths []string, err error) { return disposable(u.dir) }

// Context ends when the upload must end, because its volume is deleted or the server stops.
func (u *Upload) Context() context.Context { return u.ctx }

// Size is the size of the volume in bytes. 0: the volume gets the size of the data.
func (u *Upload) Size() int64 {
	u.m.mu.Lock()
	defer u.m.mu.Unlock()
	return int64(u.v.record.Spec.Size)
}

// Reserve counts the volume with a size before that much data is accepted. It returns an error if
// that exceeds a limit, or the volume's size.
func (u *Upload) Reserve(size int64) error {
	if size < 0 {
		return api.Errorf(api.CodeInvalid, "no disk has %d bytes", size)
	}
	want := u.Size()
	if want > 0 && size > want {
		return api.Errorf(api.CodeTooLarge, "the disk has %d bytes, and the volume %q %d: make "+
			"the volume larger first", size, u.v.name, want)
	}
	u.m.mu.Lock()
	defer u.m.mu.Unlock()
	if err := u.m.roomLocked(u.v, max(size, want)); err != nil {
		return err
	}
	u.v.reserved = size
	return nil
}

// Progress notes how many bytes have come, and how many will. total 0: unknown.
func (u *Upload) Progress(received, total int64) {
	u.received.Store(received)
	u.total.Store(total)
}

func (u *Upload) progress() *api.Progress {
	return &api.Progress{Received: u.received.Load(), Total: u.total.Load()}
}

// Complete makes the volume from the data, and serves it. With image "", the file Disk is the disk,
// and the caller has brought all of it to storage. Otherwise image is the path of a file next to
// it, which is removed when the disk has copied all of it. After an error the volume is as empty as
// before: all Files are removed. With api.CodeUnavailable they stay: the server stops, or storage
// may say that the volume has its data.
func (u *Upload) Complete(ctx context.Context, image string) error {
	m, v := u.m, u.v
	held, err := u.takeTurn(ctx)
	if err != nil {
		return err
	}
	defer m.release(held)
	if held != v || v.record.State != store.StateAwaiting {
		return notFound(v.name)
	}
	before := v.record
	r := before
	if image != "" {
		r.File = filepath.Base(image)
	}
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
	if api.Is(err, api.CodeUnavailable) {
		return err
	}
	// The record first: the disk of a volume that is ready is never made again.
	if setErr := m.set(v, before); setErr != nil {
		// Storage may say that the volume is ready: then the next start needs the data.
		err = errors.Join(api.Errorf(api.CodeUnavailable, "storage may record "+
			"the volume as ready, so its data stays: try again"), err, setErr)
	} else {
		err = errors.Join(err, clearDisk(u.dir))
	}
	return fmt.Errorf("the data of the volume %q cannot be used: %w", v.name, err)
}

// takeTurn takes the turn of the volume. If a deletion has the turn and waits for the end of this
// upload, takeTurn fails.
func (u *Upload) takeTurn(ctx context.Context) (*volume, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(u.ctx, cancel)()
	held, err := u.m.takeTurn(ctx, u.v.name)
	switch {
	case u.ctx.Err() == nil:
		return held, err
	case err == nil:
		u.m.release(held)
	}
	if u.m.ctx.Err() != nil {
		return nil, api.Errorf(api.CodeUnavailable, "the server is stopping")
	}
	return nil, notFound(u.v.name)
}

// Undo deletes the volume that was made for this upload, and releases the upload. It does nothing
// if another operation deletes the volume: then its name may be another volume's.
func (u *Upload) Undo(ctx context.Context) error {
	m, v := u.m, u.v
	defer u.Release()
	held, err := u.takeTurn(ctx)
	if err != nil {
		if u.ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer m.release(held)
	if held != v || v.record.State != store.StateAwaiting {
		return nil
	}
	u.Release()
	r := v.record
	r.State = store.StateDeleting
	if err := m.set(v, r); err != nil {
		return err
	}
	return m.remove(v)
}

// Release ends the upload, so that another one can begin. Later calls do nothing.
func (u *Upload) Release() { u.released() }

func (u *Upload) release() {
	u.cancel()
	u.m.mu.Lock()
	u.v.upload, u.v.reserved = nil, 0
	u.m.mu.Unlock()
	close(u.gone)
}

// end ends the upload for another operation, and waits until it has ended.
func (u *Upload) end(ctx context.Context) error {
	u.cancel()
	select {
	case <-u.gone:
		return nil
	case <-ctx.Done():
		return api.Errorf(api.CodeUnavailable, "the upload to the volume %q has not ended yet: "+
			"try again", u.v.name)
	}
}

// afterCopy calls f in the volume's turn, when its disk has copied all of its source. It does not
// call f if the disk is closed before, or the manager stops.
func (m *Manager) afterCopy(v *volume, opened Opened, f func()) {
	m.work.Go(func() {
		select {
		case <-opened.Ended():
		case <-m.ctx.Done():
			return
		}
		held, err := m.takeTurn(m.ctx, v.name)
		if err != nil {
			return
		}
		defer m.release(held)
		if held == v && v.opened == opened && opened.Copied() {
			f()
		}
	})
}

// dropFile removes a volume's image, of which the disk has copied everything.
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

// finishClaim closes the disk of a claim, which a virtual machine uses directly, and records that
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

// share lets QEMU use the disk of a claim. QEMU runs as another user, in the claim's group. The
// owner of the claim may have put another file in the disk's place, whose mode must not change.
func share(dir string) error {
	f, err := osfile.OpenFile(filepath.Join(dir, diskName), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Chmod(0o660), f.Close())
}
