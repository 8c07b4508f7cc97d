package scsi

import (
	"context"
	"crypto/rand"

	"kubevirt.io/disk/disk"
)

// eraseStep is how much is freed at once, in bytes.
const eraseStep = 64 << 20

// carryOut does what the service action asks for.
func (r *sanitizeRun) carryOut(ctx context.Context) error {
	if err := r.unit.forgetAtomic(); err != nil { // else the next start puts old blocks back
		return err
	}
	switch r.action {
	case saBlockErase:
		return r.erase(ctx)
	case saCryptoErase:
		return r.shred(ctx)
	}
	return r.overwrite(ctx)
}

// erase frees all blocks, which then read as zeros.
func (r *sanitizeRun) erase(ctx context.Context) error {
	for at := int64(0); at < r.size; at += eraseStep {
		if ctx.Err() != nil {
			return errStopped
		}
		n := min(eraseStep, r.size-at)
		if err := r.task.Discard(r.unit.served, at, n); err != nil {
			return err
		}
		r.advance(n)
	}
	return r.unit.sync()
}

// shred reaches the goal of a cryptographic erase: afterwards nobody who has the storage can read
// or decipher the former content. The content is not encrypted, so there is no key to change.
//
// Instead shred overwrites all allocated blocks once with random bytes, which no layer below can
// deduplicate. It brings them to storage before it frees the space, and then brings that to storage
// too. Blocks then read as zeros. It takes as long as writing what is allocated. As with an
// overwrite, storage that never writes in place may keep the former blocks for a while.
func (r *sanitizeRun) shred(ctx context.Context) error {
	for at := int64(0); at < r.size; at += eraseStep {
		n := min(eraseStep, r.size-at)
		written, err := r.scramble(ctx, at, n)
		if err != nil {
			return err
		}
		if written {
			if err := r.unit.sync(); err != nil {
				return err
			}
		}
		if err := r.task.Discard(r.unit.served, at, n); err != nil {
			return err
		}
		r.advance(n)
	}
	return r.unit.sync()
}

// scramble writes random bytes over the allocated parts of the range. It reports whether there were
// any.
func (r *sanitizeRun) scramble(ctx context.Context, off, length int64) (written bool, err error) {
	buf := scratch.Get().(*[scratchSize]byte)
	defer scratch.Put(buf)
	for end := off + length; off < end; {
		if ctx.Err() != nil {
			return written, errStopped
		}
		run := disk.Extent{Length: end - off, Data: true}
		if r.unit.Extents != nil {
			if run, err = r.task.Extent(r.unit.served, off, end-off); err != nil {
				return written, err
			}
		}
		n := run.Length
		if run.Data {
			n = min(n, scratchSize)
			_, _ = rand.Read(buf[:n]) // it never fails (crypto/rand)
			if _, err := r.task.WriteAt(r.unit.served, buf[:n], off); err != nil {
				return written, err
			}
			written = true
		}
		off += n
	}
	return written, nil
}

// overwrite writes the pattern to every block, as many times as requested. Each pass reaches
// storage before the next one begins.
func (r *sanitizeRun) overwrite(ctx context.Context) error {
	buf := scratch.Get().(*[scratchSize]byte)
	defer scratch.Put(buf)
	for i := 0; i < scratchSize; i += len(r.pattern) {
		copy(buf[i:], r.pattern)
	}
	for pass := range r.passes {
		if pass > 0 && r.invert {
			for i := range buf {
				buf[i] = ^buf[i]
			}
		}
		for at := int64(0); at < r.size; at += scratchSize {
			if ctx.Err() != nil {
				return errStopped
			}
			n := min(scratchSize, r.size-at)
			if _, err := r.task.WriteAt(r.unit.served, buf[:n], at); err != nil {
				return err
			}
			r.advance(n)
		}
		if err := r.unit.sync(); err != nil {
			return err
		}
	}
	return nil
}

func (r *sanitizeRun) advance(n int64) {
	r.finished += n
	total := float64(r.size) * float64(r.passes)
	r.unit.sanitizing.progress.Store(uint32(65536 * (float64(r.finished) / total)))
}

// sync brings the changes to storage, even where a flush promises nothing because the disk dies
// with its pod: data that is to be destroyed must not survive in a layer below.
func (u *unit) sync() error {
	if s, ok := u.Disk.(disk.Syncer); ok {
		return s.Sync()
	}
	return u.Disk.Flush()
}
