package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// OpenOptions says how a disk is made of an image.
type OpenOptions struct {
	Mode     CopyMode    // empty: CopyClone
	WorkDir  string      // holds expanded disks and every disk's state; made if it is missing
	ReadOnly bool        // every write is refused
	Durable  bool        // Flush of an expanded disk reaches storage; a disk served in place is always durable
	Log      *zap.Logger // nil: none
	Progress *Progress   // nil: not wanted
	Workers  int         // that expand the image; 0: one per processor
}

// Instance is a disk that was made of an image. The optional interfaces are those of the embedded Disk.
type Instance struct {
	Disk
	Identity Identity
	Image    string   // file name in the image directory
	Mode     CopyMode // as it is served
	Path     string   // of the raw file that holds the disk
	ReadOnly bool     // writes are refused: as asked, or because the file cannot be written
	Kept     bool     // the disk of an earlier start, with what was written to it
	Created  time.Time

	work      *workDir
	closeOnce sync.Once
	closeErr  error
}

// Close closes the disk and frees its work directory. Calls after the first do nothing.
func (i *Instance) Close() error {
	i.closeOnce.Do(func() { i.closeErr = errors.Join(i.Disk.Close(), i.work.close()) })
	return i.closeErr
}

// Open makes a disk of an image. It returns when the disk is complete, or when ctx is cancelled, in which case nothing
// half-made is left. The instance then owns the image, and closes it when it needs it no longer; after an error the
// caller still does.
//
// Errors: *UnsupportedModeError, *LockedError where another process uses the disk, *SpaceError where it does not fit.
func Open(ctx context.Context, img *Image, opt OpenOptions) (*Instance, error) {
	if opt.Mode == "" {
		opt.Mode = CopyClone
	}
	if err := opt.Mode.Check(img); err != nil {
		return nil, err
	}
	if opt.Log == nil {
		opt.Log = zap.NewNop()
	}
	if opt.Progress == nil {
		opt.Progress = new(Progress)
	}
	opt.Log = opt.Log.With(zap.String("image", img.Name()))
	work, err := openWorkDir(opt.WorkDir, img.Name())
	if err != nil {
		return nil, err
	}
	o := &opening{img: img, opt: opt, work: work, log: opt.Log}
	make := o.clone
	if opt.Mode == CopyNone {
		make = o.inPlace
	}
	inst, err := make(ctx)
	if err != nil {
		return nil, errors.Join(err, work.close())
	}
	inst.Image, inst.Mode, inst.work = img.Name(), opt.Mode, work
	if err := img.Close(); err != nil {
		opt.Log.Warn("closing the image failed", zap.Error(err))
	}
	return inst, nil
}

// opening is one call of Open, with the work directory locked.
type opening struct {
	img  *Image
	opt  OpenOptions
	work *workDir
	log  *zap.Logger
}

// clone serves the expanded image: the disk of an earlier start where it is still the right one, or a new one.
func (o *opening) clone(ctx context.Context) (*Instance, error) {
	s, reason, err := o.keep(ctx)
	if err != nil {
		return nil, err
	}
	kept := s != nil
	if kept {
		o.opt.Progress.start(s.Size, 0)
		o.log.Info("keeping the existing disk, with what was written to it", zap.String("disk", o.work.disk()),
			zap.String("serial", s.Identity.Serial), zap.Time("created", s.Created))
	} else {
		if reason != "" {
			o.log.Warn("the existing disk is not kept, it is made of the image again", zap.String("reason", reason),
				zap.String("disk", o.work.disk()))
		}
		if s, err = o.expand(ctx); err != nil {
			return nil, err
		}
	}
	disk, err := OpenFile(o.work.disk(), FileOptions{ReadOnly: o.opt.ReadOnly, Durable: o.opt.Durable})
	if err != nil {
		return nil, err
	}
	o.opt.Progress.finish()
	return &Instance{Disk: disk, Identity: s.Identity, Path: o.work.disk(), ReadOnly: o.opt.ReadOnly,
		Kept: kept, Created: s.Created}, nil
}

// keep returns the state of the existing disk if it was made of this very image and is intact. Otherwise reason says
// why not; it is empty where there is no disk.
func (o *opening) keep(ctx context.Context) (s *state, reason string, err error) {
	st, err := os.Lstat(o.work.disk())
	if errors.Is(err, fs.ErrNotExist) {
		if s, err := loadState(o.work.state()); err == nil && s.Mode == o.opt.Mode {
			return nil, "its file is missing", nil
		}
		return nil, "", nil
	}
	if err != nil {
		return nil, "", err
	}
	s, err = loadState(o.work.state())
	if err != nil {
		return nil, stateReason(err), nil
	}
	switch {
	case !st.Mode().IsRegular():
		return nil, "its file is not a regular file", nil
	case s.Image != o.img.Name():
		return nil, fmt.Sprintf("it belongs to the image %s", printable(s.Image)), nil
	case s.Mode != o.opt.Mode:
		return nil, fmt.Sprintf("it was made in copy mode %q", string(s.Mode)), nil
	case st.Size() != s.Size:
		return nil, fmt.Sprintf("its file has %d bytes and should have %d", st.Size(), s.Size), nil
	case s.Size != o.img.Size():
		return nil, fmt.Sprintf("the image has changed: its virtual size is %d now, and was %d", o.img.Size(), s.Size), nil
	case !s.survivesBoot(bootID()):
		return nil, "the machine was restarted since, and an ephemeral disk is not flushed to storage", nil
	}
	o.log.Info("checking whether the image is still the one of the existing disk", zap.String("disk", o.work.disk()))
	reason, now, err := o.img.compareImage(ctx, s.Chain)
	if err != nil || reason != "" {
		return nil, reason, err
	}
	// Whoever runs it without Durable from now on no longer flushes.
	if durable := s.Durable && o.opt.Durable; !equalFingerprints(now, s.Chain) || durable != s.Durable {
		s.Chain, s.Durable, s.Boot = now, durable, bootID()
		if err := s.save(o.work.state(), s.Durable); err != nil {
			return nil, "", o.spaceError(err)
		}
	}
	return s, "", nil
}

func equalFingerprints(a, b []fileFingerprint) bool {
	for i := range a {
		if !a[i].untouched(&b[i]) {
			return false
		}
	}
	return true
}

// expand makes a new disk of the image, and its state.
func (o *opening) expand(ctx context.Context) (*state, error) {
	if err := o.work.clear(); err != nil {
		return nil, err
	}
	if err := checkSpace(ctx, o.img, o.work.path, o.opt.Workers); err != nil {
		return nil, err
	}
	begin := time.Now()
	o.log.Info("expanding the image", zap.String("format", string(o.img.format())), zap.Int64("virtual_size", o.img.Size()),
		zap.Int64("data", o.img.use.total()), zap.String("disk", o.work.disk()))
	written, chain, err := o.fill(ctx)
	if err != nil {
		return nil, err
	}
	s := &state{Version: stateVersion, Image: o.img.Name(), Mode: o.opt.Mode, Size: o.img.Size(), Identity: newIdentity(),
		Created: time.Now().UTC(), Durable: o.opt.Durable, Boot: bootID(), Chain: chain}
	if err := s.save(o.work.state(), s.Durable); err != nil {
		return nil, o.spaceError(err)
	}
	elapsed := time.Since(begin)
	o.log.Info("expanded the image", zap.Int64("bytes_written", written), zap.Duration("duration", elapsed),
		zap.Float64("mib_per_s", tenths(float64(written)/(1<<20)/max(elapsed.Seconds(), 1e-9))),
		zap.String("serial", s.Identity.Serial))
	return s, nil
}

// fill writes the disk and fingerprints the image at the same time. The disk has its final name when it is complete.
func (o *opening) fill(ctx context.Context) (written int64, chain []fileFingerprint, err error) {
	out, err := createPartial(o.work.disk(), 0o600)
	if err != nil {
		return 0, nil, o.spaceError(err)
	}
	logging, stopLogging := context.WithCancel(ctx)
	var logger sync.WaitGroup
	logger.Go(func() { o.opt.Progress.logWhile(logging, o.log, progressInterval) })

	group, groupCtx := errgroup.WithContext(ctx)
	group.Go(func() (err error) {
		chain, err = o.img.fingerprint(groupCtx)
		return err
	})
	group.Go(func() (err error) {
		written, err = newCopier(o.img, out.file, o.opt.Progress, o.opt.Workers).run(groupCtx)
		return err
	})
	err = group.Wait()
	stopLogging()
	logger.Wait()
	if err == nil {
		err = o.img.checkUntouched()
	}
	if err == nil && o.opt.Durable {
		err = out.file.Sync()
	}
	return written, chain, out.finish(err)
}

// inPlace serves a raw file itself. Its identity is kept in the work directory.
func (o *opening) inPlace(context.Context) (*Instance, error) {
	file, readOnly, err := o.openImageFile()
	if err != nil {
		return nil, err
	}
	disk, err := newFile(file, FileOptions{ReadOnly: readOnly, Durable: true})
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	s, err := loadState(o.work.state())
	kept := err == nil && s.Mode == CopyNone && s.Image == o.img.Name()
	if !kept {
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			o.log.Warn("the disk gets a new identity", zap.String("reason", stateReason(err)))
		}
		if _, err := os.Lstat(o.work.disk()); err == nil {
			o.log.Warn("removing the disk of an earlier start: the image is served in place now", zap.String("disk", o.work.disk()))
		}
		err = o.work.clear()
		s = &state{Version: stateVersion, Image: o.img.Name(), Mode: CopyNone, Size: disk.Size(), Identity: newIdentity(),
			Created: time.Now().UTC(), Durable: true}
		if err == nil {
			err = o.spaceError(s.save(o.work.state(), true))
		}
		if err != nil {
			return nil, errors.Join(err, disk.Close())
		}
	}
	o.opt.Progress.start(disk.Size(), 0)
	o.opt.Progress.finish()
	o.log.Info("serving the image file in place", zap.String("disk", o.img.Path()), zap.Bool("read_only", readOnly),
		zap.String("serial", s.Identity.Serial))
	return &Instance{Disk: disk, Identity: s.Identity, Path: o.img.Path(), ReadOnly: readOnly, Kept: kept, Created: s.Created}, nil
}

// openImageFile opens the image's own file for writing, and locks it: two daemons that write to one file destroy it.
// Where it cannot be written it is opened read-only.
func (o *opening) openImageFile() (file *os.File, readOnly bool, err error) {
	dir, err := openDirectory(o.img.dir)
	if err != nil {
		return nil, false, err
	}
	defer dir.close()
	readOnly = o.opt.ReadOnly
	access := unix.O_RDWR
	if readOnly {
		access = unix.O_RDONLY
	}
	file, st, err := dir.openAs(o.img.Name(), access)
	if !readOnly && (errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM)) {
		o.log.Warn("the image file cannot be written, so the disk is read-only", zap.Error(err))
		readOnly = true
		file, st, err = dir.openAs(o.img.Name(), unix.O_RDONLY)
	}
	if err != nil {
		reason, _ := explainOpen(err)
		return nil, false, fmt.Errorf("image %s %s: %w", o.img.Path(), reason, err)
	}
	// Not compared by inode: an overlay file system may give the file another one when it is opened for writing.
	if err := o.stillRaw(file, st); err != nil {
		return nil, false, errors.Join(err, file.Close())
	}
	if !readOnly {
		if err := lockFile(file); errors.Is(err, unix.EWOULDBLOCK) {
			return nil, false, errors.Join(&LockedError{Path: "image " + o.img.Path(), Holder: "another process"}, file.Close())
		} else if err != nil {
			return nil, false, errors.Join(&os.PathError{Op: "flock", Path: o.img.Path(), Err: err}, file.Close())
		}
	}
	return file, readOnly, nil
}

// stillRaw checks what was validated once more, as the file was opened a second time.
func (o *opening) stillRaw(file *os.File, st *unix.Stat_t) error {
	head, tail, err := readEnds(file, st.Size)
	if err != nil {
		return fmt.Errorf("image %s: %w", o.img.Path(), err)
	}
	if detect(head, tail) != nil || st.Size != o.img.Size() {
		return fmt.Errorf("image %s was exchanged after it was validated; start again", o.img.Path())
	}
	return nil
}

// spaceError explains an error of writing something small into the work directory.
func (o *opening) spaceError(err error) error {
	if err == nil || !isNoSpace(err) {
		return err
	}
	return &SpaceError{Dir: o.work.path, What: "the state in " + filepath.Base(o.work.path), Available: 0}
}
