package nbd

import (
	"context"

	"kubevirt.io/disk/disk"
)

// ReadAt implements disk.Disk.
func (r *Remote) ReadAt(p []byte, off int64) (int, error) { return r.always().ReadAt(p, off) }

// WriteAt implements disk.Disk.
func (r *Remote) WriteAt(p []byte, off int64) (int, error) { return r.always().WriteAt(p, off) }

// Flush implements disk.Disk: the server makes everything durable that it has acknowledged.
func (r *Remote) Flush() error { return r.flush(r.ctx) }

// Size implements disk.Disk. A disk that grows at the server has its former size here.
func (r *Remote) Size() int64 { return r.first.size }

// Discard implements disk.Discarder.
func (r *Remote) Discard(off, length int64) error { return r.always().Discard(off, length) }

// Zero implements disk.Zeroer.
func (r *Remote) Zero(off, length int64) error { return r.always().Zero(off, length) }

// Name is what the server calls the disk.
func (r *Remote) Name() string { return r.first.name }

// Identity is the disk's at its server.
func (r *Remote) Identity() disk.Identity { return r.first.identity }

// Generation implements disk.Elsewhere.
func (r *Remote) Generation() string { return r.first.generation }

// ReadOnly implements disk.Elsewhere.
func (r *Remote) ReadOnly() bool { return r.readOnly.Load() }

// Shared implements disk.Elsewhere.
func (r *Remote) Shared() bool { return r.shared.Load() }

// BlockSize is the length of a logical block of the disk in bytes.
func (r *Remote) BlockSize() int { return r.first.block }

// Close implements disk.Disk.
func (r *Remote) Close() error {
	r.stop()
	r.wg.Wait()
	if l := r.now(); l != nil {
		l.close()
	}
	r.set(nil, disk.ErrFailed)
	return nil
}

// Within implements disk.Distant: nothing of the disk is here.
func (r *Remote) Within(ctx context.Context) disk.Disk { return remoteWithin{r, ctx} }

func (r *Remote) always() remoteWithin { return remoteWithin{r, r.ctx} }

// over is a context that has ended: for calls that must not wait.
var over = func() context.Context {
	ctx, end := context.WithCancel(context.Background())
	end()
	return ctx
}()

// remoteWithin is a Remote as one command uses it.
type remoteWithin struct {
	*Remote
	ctx context.Context
}

// ReadAt implements disk.Disk.
func (w remoteWithin) ReadAt(p []byte, off int64) (n int, err error) {
	for n < len(p) {
		part := p[n:min(n+w.first.limit, len(p))]
		c := w.free.take(cmdRead, off+int64(n), int64(len(part)), part)
		err := w.call(w.ctx, c)
		w.free.give(c)
		if err != nil {
			return n, err
		}
		n += len(part)
	}
	return n, nil
}

// WriteAt implements disk.Disk.
func (w remoteWithin) WriteAt(p []byte, off int64) (n int, err error) {
	for n < len(p) {
		part := p[n:min(n+w.first.limit, len(p))]
		if err := w.change(w.ctx, cmdWrite, off+int64(n), int64(len(part)), part); err != nil {
			return n, err
		}
		n += len(part)
	}
	return n, nil
}

// Discard implements disk.Discarder.
func (w remoteWithin) Discard(off, length int64) error {
	if w.first.flags&flagSendTrim == 0 {
		return w.Zero(off, length)
	}
	return w.changes(cmdTrim, off, length)
}

// Zero implements disk.Zeroer.
func (w remoteWithin) Zero(off, length int64) error {
	return w.changes(cmdWriteZeroes, off, length)
}

func (w remoteWithin) changes(command uint16, off, length int64) error {
	for length > 0 {
		n := min(length, longest)
		if err := w.change(w.ctx, command, off, n, nil); err != nil {
			return err
		}
		off, length = off+n, length-n
	}
	return nil
}
