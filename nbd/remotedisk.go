package nbd

import (
	"context"

	"kubevirt.io/disk/disk"
)

// Flush implements disk.Disk: the server makes all acknowledged changes durable.
func (r *Remote) Flush() error { return r.flush(r.ctx, false) }

// Size implements disk.Disk. A disk that grows at the server has its former size here.
func (r *Remote) Size() int64 { return r.first.size }

// Name is the server's name for the disk.
func (r *Remote) Name() string { return r.first.name }

// Identity is the disk's identity at its server.
func (r *Remote) Identity() disk.Identity { return r.first.identity }

// Generation implements disk.Remote.
func (r *Remote) Generation() string { return r.first.generation }

// ReadOnly implements disk.Remote.
func (r *Remote) ReadOnly() bool { return r.readOnly.Load() }

// Shared implements disk.Remote.
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

// Far implements disk.Far: nothing of the disk is here.
func (r *Remote) Far() bool { return true }

// ReadAt implements disk.Disk.
func (r *Remote) ReadAt(ctx context.Context, p []byte, off int64) (n int, err error) {
	for n < len(p) {
		part := p[n:min(n+r.first.limit, len(p))]
		c := r.free.take(cmdRead, off+int64(n), int64(len(part)), part)
		err := r.call(ctx, c)
		r.free.putBack(c)
		if err != nil {
			return n, err
		}
		n += len(part)
	}
	return n, nil
}

// WriteAt implements disk.Disk. An empty write only says whether the disk has failed.
func (r *Remote) WriteAt(ctx context.Context, p []byte, off int64) (n int, err error) {
	if len(p) == 0 {
		r.mu.Lock()
		defer r.mu.Unlock()
		return 0, r.failed
	}
	for n < len(p) {
		part := p[n:min(n+r.first.limit, len(p))]
		if err := r.change(ctx, cmdWrite, off+int64(n), int64(len(part)), part); err != nil {
			return n, err
		}
		n += len(part)
	}
	return n, nil
}

// Discard implements disk.Discarder.
func (r *Remote) Discard(ctx context.Context, off, length int64) error {
	if r.first.flags&flagSendTrim == 0 {
		return r.Zero(ctx, off, length)
	}
	return r.changes(ctx, cmdTrim, off, length)
}

// Zero implements disk.Zeroer.
func (r *Remote) Zero(ctx context.Context, off, length int64) error {
	return r.changes(ctx, cmdWriteZeroes, off, length)
}

func (r *Remote) changes(ctx context.Context, command uint16, off, length int64) error {
	for length > 0 {
		n := min(length, longest)
		if err := r.change(ctx, command, off, n, nil); err != nil {
			return err
		}
		off, length = off+n, length-n
	}
	return nil
}
