package instance

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/internal/slots"
	"kubevirt.io/disk/disk/overlay"
)

// background is the work during the use of an overlay, in two goroutines. One, identify, reads the
// image once, so that the next start recognises it. The other, run, copies the image in mode clone
// until the disk no longer needs it. Their rules:
//
//   - state and unsaved belong to identify until it ends. run waits for that before complete, which
//     records that the disk is complete.
//   - run offers what it copies to the hash (ReadAlong), so that identify reads only the rest.
//   - When copying has ended, identify tries only once more. If the image cannot be read to its
//     end, the disk becomes complete without a hash.
//   - cancel stops copying, abandon also stops identify. stop calls cancel at once, and abandon
//     only identifyGrace later: without the hash, the next start may not recognise the image.
//   - complete saves the state, then removes the maps, then closes the image. A kill in between
//     leaves a complete disk with maps, which the next start removes.
type background struct {
	over     *overlay.Disk
	file     *rawfile.File // below over
	img      *image.Image
	dir      *diskDir
	log      *zap.Logger
	progress *image.Progress
	clone    bool
	workers  *Workers
	cancel   context.CancelFunc // stops copying
	abandon  context.CancelFunc // stops reading the image
	retry    time.Duration      // see readRetry
	after    <-chan struct{}    // copying begins when it is closed; nil: at once
	done     sync.WaitGroup
	settled  chan struct{} // closed by settle
	settling sync.Once
	unproven error // why it is unknown whether the image is right; set when settled is closed

	// identify uses these until it ends, then complete.
	state   *state
	unsaved bool // state has changes that its file lacks

	closing sync.Mutex
	closed  bool // guarded by closing; img is closed, because the disk is complete
}

func startBackground(o *opening, over *overlay.Disk, file *rawfile.File, s *state) *background {
	identifying, abandon := context.WithCancel(context.Background())
	ctx, cancel := context.WithCancel(identifying)
	b := &background{over: over, file: file, img: o.img, dir: o.dir, log: o.log,
		progress: o.opt.Progress, clone: o.opt.Mode == CopyClone, workers: o.opt.Workers,
		cancel: cancel, abandon: abandon, retry: readRetry, after: o.opt.CopyAfter, state: s,
		unsaved: s.stale, settled: make(chan struct{})}
	b.done.Go(func() {
		if err := b.run(ctx, identifying); err != nil && !errors.Is(err, context.Canceled) {
			b.log.Error(message(err), zap.Error(err))
		}
	})
	return b
}

// message explains an error of the background work.
func message(err error) string {
	if errors.Is(err, disk.ErrWrongContent) {
		return "the image has wrong content"
	}
	return "the disk goes on with its image, but cannot be completed"
}

const (
	// scarceRetry is the wait before the state is saved again after a lack of space or descriptors.
	scarceRetry = time.Second
	// readRetry is the wait before reading the image, or recording that it is copied, again.
	readRetry = 30 * time.Second
)

// identifyGrace is how long a stop waits until the image is read. Without the hash, the next start
// may not recognise the image.
const identifyGrace = 2 * time.Second

// stop ends the work and waits for it.
func (b *background) stop() {
	b.cancel()
	grace := time.AfterFunc(identifyGrace, b.abandon)
	b.done.Wait()
	grace.Stop()
	b.abandon()
}

func (b *background) run(ctx, identifying context.Context) error {
	var along *image.ReadAlong
	var contents []*image.Hash
	if !image.Identified(b.state.Chain) {
		contents = b.img.Hashes(b.over.Rest)
		along = image.NewReadAlong(b.img, contents[0])
	}
	copying, copied := context.WithCancel(ctx)
	defer copied()
	var identity sync.WaitGroup // of identify and compare
	identity.Go(func() {
		if !b.clone {
			_ = slots.Rest(identifying, overlay.FirstReads) // copying has a wait of its own
		}
		b.keepIdentifying(identifying, copying, contents)
	})
	defer identity.Wait()
	if !b.clone {
		return b.settle(b.verifyBeside(ctx))
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	compared := make(chan error, 1)
	identity.Go(func() {
		err := b.compare(ctx)
		if errors.Is(err, disk.ErrWrongContent) {
			cancel(err) // the copy is not needed
		}
		if err != nil || !b.img.Unverified() {
			err = b.settle(err)
		}
		compared <- err
	})
	begin := time.Now()
	_, data := b.over.Copied()
	opt := overlay.CopyOptions{Slots: b.workers.copying, Log: b.log, Progress: b.progress,
		Writer: b.file.ServedWriter}
	if b.img.Parallel() > 1 {
		opt.Slots = b.workers.far
	}
	if along != nil {
		opt.Follower = along
	}
	if b.after != nil {
		select {
		case <-b.after:
		case <-ctx.Done():
		}
	}
	err := b.over.Copy(ctx, opt)
	if along != nil {
		along.End()
	}
	copied()
	if errors.Is(err, context.Canceled) {
		err = context.Cause(ctx)
	}
	if agree := <-compared; err == nil { // wait for it even if the image could not be copied
		err = agree
	}
	if err == nil {
		identity.Wait() // identify owns the state until it ends
		err = b.verify(ctx)
	}
	if b.settle(err) != nil {
		return err
	}
	if err := b.keepCompleting(ctx); err != nil {
		return err
	}
	elapsed := time.Since(begin)
	b.log.Info("the disk is complete, the image is not needed any more", zap.Int64("bytes", data),
		zap.Duration("duration", elapsed),
		zap.Float64("mib_per_s", image.Tenths(float64(data)/(1<<20)/max(elapsed.Seconds(), 1e-9))))
	return nil
}

// verifyBeside makes the image's checks while the disk is in use: compare, and verify if the
// content is served before it was verified.
func (b *background) verifyBeside(ctx context.Context) error {
	if err := b.compare(ctx); err != nil || !b.img.Unverified() {
		return err
	}
	return b.verify(ctx)
}

// settle ends Instance.Settled, which callers wait for before they make something of the disk, such
// as a snapshot. err says what is wrong with the image, or why this is unknown until the next
// start. settle returns err.
func (b *background) settle(err error) error {
	b.settling.Do(func() {
		b.unproven = err
		close(b.settled)
	})
	return err
}

// compare compares the two descriptions of the image's content, after the guest's first reads.
func (b *background) compare(ctx context.Context) error {
	if err := slots.Rest(ctx, overlay.FirstReads); err != nil {
		return err
	}
	return b.condemn(b.img.Agree(ctx))
}

// verify verifies the rest of the image's content.
func (b *background) verify(ctx context.Context) error { return b.condemn(b.img.Verify(ctx)) }

// condemn makes the disk fail if an error says that the content of its image is wrong.
func (b *background) condemn(err error) error {
	if errors.Is(err, disk.ErrWrongContent) {
		b.over.Condemn(err)
		return fmt.Errorf("the disk has failed, every read and write of it ends with an error: %w",
			err)
	}
	return err
}

// keepIdentifying identifies the image. It tries again after errors of storage. When copying has
// ended, it tries only once more: a complete disk does not wait for an image that cannot be read.
func (b *background) keepIdentifying(ctx, copying context.Context, contents []*image.Hash) {
	for {
		last := copying.Err() != nil
		err := b.identify(ctx, contents)
		unread := errors.As(err, new(*disk.MediumError)) || errors.Is(err, disk.ErrNotNow)
		switch {
		case err == nil:
			return
		case isScarce(err):
			_ = slots.Rest(ctx, scarceRetry)
		case unread && !last:
			b.log.Warn("cannot read the image to recognise it later: trying again",
				zap.Error(err), zap.Duration("after", b.retry))
			_ = slots.Rest(copying, b.retry)
		default:
			b.log.Warn("a later start will not recognise the image", zap.Error(err))
			return
		}
	}
}

// isScarce reports whether an error is about space or descriptors, which may become free again.
func isScarce(err error) bool {
	return disk.IsNoSpace(err) || errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE)
}

// identify adds the hashes of the image's content to the state. Without contents, the state already
// has them. After an error, the next call goes on where this one has ended.
func (b *background) identify(ctx context.Context, contents []*image.Hash) error {
	if !image.Identified(b.state.Chain) {
		chain, err := b.img.Fingerprint(ctx, contents, b.workers.hashing)
		if err != nil {
			return err
		}
		b.state.Chain, b.unsaved = chain, true
	}
	if !b.unsaved {
		return nil
	}
	err := b.workers.hashing.Do(ctx,
		func() error { return b.dir.saveState(b.state, b.state.Durable) })
	b.unsaved = err != nil
	return err
}

// keepCompleting is complete, tried again after errors of storage: a claim, or the snapshot that a
// clone reads, would wait for that until the next start.
func (b *background) keepCompleting(ctx context.Context) error {
	for {
		err := b.workers.copying.Do(ctx, b.complete)
		wait := b.retry
		switch {
		case err == nil, ctx.Err() != nil, b.state.Complete, errors.Is(err, disk.ErrFailed),
			errors.Is(err, image.ErrChanged):
			return err
		case isScarce(err):
			wait = scarceRetry
		default:
			b.log.Warn("the disk is copied, but that cannot be recorded: trying again",
				zap.Error(err), zap.Duration("after", wait))
		}
		b.progress.Wait(disk.IsNoSpace(err))
		if err := slots.Rest(ctx, wait); err != nil {
			return err
		}
	}
}

// complete records that the file is the whole disk, because everything is copied. The disk then
// needs neither its map nor its image.
func (b *background) complete() error {
	if err := b.img.CheckUntouched(); err != nil {
		return err
	}
	if err := b.over.Flush(); err != nil {
		return err
	}
	done := *b.state
	done.Complete = true
	if err := b.dir.saveState(&done, done.Durable); err != nil {
		return err
	}
	*b.state = done
	if err := b.dir.removeMaps(); err != nil {
		b.log.Warn("the map of the complete disk could not be removed", zap.Error(err))
	}
	if err := b.over.Detach(); err != nil {
		b.log.Warn("closing the map of the complete disk failed", zap.Error(err))
	}
	b.progress.Finish()
	b.closing.Lock()
	defer b.closing.Unlock()
	b.closed = true
	return b.img.Close()
}

// imageChanged reports whether the image was written to while the disk needs it.
func (b *background) imageChanged() bool {
	b.closing.Lock()
	defer b.closing.Unlock()
	return !b.closed && errors.Is(b.img.CheckUntouched(), image.ErrChanged)
}

// Workers limit the background work of all disks that share them. A daemon makes one for all of its
// disks. Any number of goroutines may use it.
type Workers struct {
	copying *slots.Slots // copies images into disks
	far     *slots.Slots // copies images that are far away
	// hashes images; separate slots, so that neither copying nor hashing waits for the other
	hashing *slots.Slots
}

// NewWorkers returns Workers for this machine's number of processors.
func NewWorkers() *Workers {
	return &Workers{
		copying: overlay.NewSlots(), far: overlay.NewFarSlots(),
		hashing: slots.New(2, slots.Options{}),
	}
}
