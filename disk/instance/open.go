package instance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/slots"
	"kubevirt.io/disk/disk/overlay"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/words"
)

// Options says how to make a disk of an image.
type Options struct {
	// Name is the name of the disk, and of an ephemeral disk's directory in WorkDir. "": the
	// image's name, or PersistentName without an image.
	Name    string
	Mode    CopyMode // empty: CopyClone
	WorkDir string   // holds ephemeral disks and their state; made if it is missing
	// PersistentDir is the directory of a volume. If it is set, the disk is there, as
	// PersistentName. It is made if it is missing.
	PersistentDir string
	OnImageChange ImageChange
	// Leftovers says what happens to an ephemeral disk that does not fit its image any more. "":
	// LeftoversRemove.
	Leftovers Leftovers
	// Owner identifies the daemon that serves an ephemeral disk, and stays the same over restarts.
	// Only Sweep with the same owner removes the disk.
	Owner string
	// of the disk, bytes, at least the image's; 0: the image's, or the disk's size so far
	Size int64
	// BlockSize is the length of a logical block in bytes, disk.SectorSize or disk.LongBlock. 0:
	// the disk's block size so far, or disk.SectorSize.
	BlockSize int
	// BlockSizeKnown says that the content was written with such blocks, whatever it looks like.
	BlockSizeKnown bool
	// HeadTimeout is how long a new disk waits for the first blocks of a far image if no BlockSize
	// is set. They show which block size the content was made for. A registry that is away must not
	// hold up the start. Default 5 s.
	HeadTimeout time.Duration
	// Empty makes a disk of zeros, if there is neither an image nor a disk of an earlier start. It
	// needs a Size and a PersistentDir.
	Empty bool
	// Identity replaces the random identity: the serial unless it is empty, the NAA unless it is
	// zero.
	Identity disk.Identity
	// LUN is the number of the disk's LUN. KnownAs returns it at the next start. 0: none
	LUN      uint16
	ReadOnly bool // every write is refused
	// Durable makes Flush of an ephemeral disk reach storage. A flush of a persistent disk, or of
	// one served in place, always reaches it.
	Durable  bool
	Log      *zap.Logger     // nil: none
	Workers  *Workers        // nil: this disk has its own
	Progress *image.Progress // nil: unused
	// Reads is called for each range that the guest reads, or that its writes need from the image,
	// by any number of goroutines. It is not called in mode none, and not for a disk that is
	// complete from the start. nil: unused.
	Reads func(off, length int64)
	// CopyAfter delays the copying of the image until the channel is closed, because other data is
	// needed sooner. nil: no delay.
	CopyAfter <-chan struct{}
}

// Instance is a disk that was made of an image. The embedded Disk has the optional interfaces.
type Instance struct {
	disk.Disk
	Identity   disk.Identity
	BlockSize  int  // of a logical block, bytes
	ReadOnly   bool // writes are refused: as asked, or because the file cannot be written
	Grown      bool // it is larger than at the earlier start
	Persistent bool // it survives the pod

	path    string        // of the raw file that holds the disk
	tree    *overlay.Tree // nil: the image's own file is served, or another server's disk
	kept    bool          // the disk of an earlier start, with its data
	dir     *diskDir
	content string       // identifies the content of the disk
	durable bool         // a flush reaches storage
	img     *image.Image // nil: served without one
	copies  *background
	closed  func() error // works once

	file  *os.File               // the file at path, open; nil: none
	wrong atomic.Pointer[string] // see Wrong; nil: not looked for yet
}

// Open makes a disk of an image. It returns when the disk can be used. In mode clone the image is
// then still being copied, and the disk needs it until Progress is finished. The instance owns the
// image and closes it; after an error the caller closes it. The image may be nil for a disk that is
// complete without it: a persistent one, or one for which IsComplete returns true.
//
// Errors: *UnsupportedModeError, *LockedError if another process uses the disk, *SpaceError if it
// does not fit, *SizeError, *BlockSizeError, and *PersistentError for a persistent disk that must
// not be used like that.
func Open(ctx context.Context, img *image.Image, opt Options) (*Instance, error) {
	opt.Mode = cmp.Or(opt.Mode, CopyClone)
	opt.Log = cmp.Or(opt.Log, zap.NewNop())
	if opt.Workers == nil {
		opt.Workers = NewWorkers()
	}
	opt.Progress = cmp.Or(opt.Progress, new(image.Progress))
	o := &opening{img: img, opt: opt, name: PersistentName}
	if img != nil {
		o.name = img.Name()
	}
	if opt.Name != "" {
		o.name = opt.Name
	}
	if img != nil {
		if err := opt.Mode.Check(img); err != nil {
			return nil, err
		}
	}
	o.log = opt.Log.With(zap.String("image", o.name))
	if err := o.check(); err != nil {
		return nil, err
	}
	err := knowBoot()
	if err != nil {
		return nil, err
	}
	if opt.PersistentDir != "" {
		o.dir, err = openPersistentDir(opt.PersistentDir)
	} else {
		o.dir, err = openWorkDir(opt.WorkDir, o.name, opt.Durable)
	}
	if err != nil {
		return nil, err
	}
	if err = o.dir.settleAsides(); err != nil {
		return nil, errors.Join(err, o.dir.close())
	}
	if err = ctx.Err(); err == nil && img != nil {
		err = img.CheckUntouched()
	}
	make := o.overImage
	if opt.Mode == CopyNone {
		make = o.inPlace
	}
	var inst *Instance
	if err == nil {
		inst, err = make(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, o.dir.close())
	}
	o.settleLeftovers()
	inst.dir, inst.img, inst.Persistent = o.dir, img, o.dir.persistent
	inst.file = o.file
	looking, stop := context.WithCancel(context.Background())
	var look sync.WaitGroup
	look.Go(func() { inst.look(looking) })
	inst.closed = sync.OnceValue(func() error {
		stop()
		look.Wait()
		return inst.end()
	})
	if inst.copies == nil && img != nil {
		// The image is not read any more.
		if err := img.Close(); err != nil {
			o.log.Warn("closing the image failed", zap.Error(err))
		}
	}
	return inst, nil
}

// Close stops the copying, closes the disk and the image, and releases the directory. Later calls
// do nothing.
func (i *Instance) Close() error { return i.closed() }

func (i *Instance) end() error {
	if i.copies != nil {
		i.copies.stop()
	}
	errs := []error{i.Disk.Close()}
	if i.img != nil {
		errs = append(errs, i.img.Close())
	}
	err := errors.Join(errs...)
	if err == nil {
		_ = i.dir.lock.Truncate(0) // otherwise the next start takes this process for a killed one
	}
	return errors.Join(err, i.dir.close())
}

// lookEvery is how often to check whether others have changed the files of a disk. Each check wakes
// the process: once a second took 0.03 % of a processor for each disk.
const lookEvery = 10 * time.Second

func (i *Instance) look(ctx context.Context) {
	for slots.Rest(ctx, lookEvery) == nil {
		text := ""
		switch there, err := flock.HasName(i.file, i.path); {
		case err == nil && !there:
			text = fmt.Sprintf("the file %q was moved, replaced or removed while it is served: "+
				"put it back, or copy it from /proc/%d/fd/%d, before the daemon stops; what "+
				"guests write is lost then", i.path, os.Getpid(), i.file.Fd())
		case i.copies != nil && i.copies.imageChanged():
			text = "somebody has written to the image while the disk needs it, so a guest may " +
				"read neither the former content nor the new one: stop its machine, and put the " +
				"former image back"
		}
		i.wrong.Store(&text)
	}
}

// Wrong says what others have done to the files of the disk, if the guest must not go on: the next
// start would refuse the disk, or find another one. "": nothing is known.
func (i *Instance) Wrong() string {
	if text := i.wrong.Load(); text != nil {
		return *text
	}
	return ""
}

// Store is where the logical unit keeps data that belongs to the disk's content: reservations, and
// the former content of interrupted writes. It is removed when the content is replaced, and is as
// durable as the disk.
func (i *Instance) Store() *durable.Store {
	s := durable.NewStore(i.dir.disk()+image.UnitInfix+i.content, i.durable)
	s.May = i.dir.checkPath
	return s
}

// opening is one call of Open, with the disk's directory locked.
type opening struct {
	img  *image.Image // nil: there is none; only for a complete disk
	name string
	opt  Options
	dir  *diskDir
	log  *zap.Logger
	file *os.File // the disk's own, or the image's if that is served in place
}

// check refuses options that contradict each other.
func (o *opening) check() error {
	switch {
	case o.img == nil && o.opt.PersistentDir == "" && o.opt.Name == "":
		return errors.New("a disk needs an image")
	case o.img == nil && o.opt.PersistentDir == "" && o.opt.Mode == CopyNone:
		return errors.New("a disk that is served in place needs an image")
	case o.opt.Mode == CopyNone && o.opt.PersistentDir != "":
		return &UnsupportedModeError{Mode: CopyNone, Image: o.name,
			Reason: "serves the image itself, and a persistent disk is a copy of it",
			Use:    fmt.Sprintf("use %q, or leave the persistent directory out", string(CopyClone))}
	case o.opt.Mode == CopyNone && o.opt.Size != 0 && o.opt.Size != o.img.Size():
		return &UnsupportedModeError{Mode: CopyNone, Image: o.name,
			Reason: "serves the image file as it is, so the disk cannot have another size",
			Use:    fmt.Sprintf("use %q, or enlarge the file", string(CopyClone))}
	case o.opt.Size < 0 || o.opt.Size%disk.SectorSize != 0:
		return notWhole(o.name, o.opt.Size, disk.SectorSize)
	case o.opt.Size > maxSize:
		return overMax(o.name, o.opt.Size)
	case o.opt.BlockSize != 0 && o.opt.BlockSize != disk.SectorSize &&
		o.opt.BlockSize != disk.LongBlock:
		return fmt.Errorf("%q: a logical block has %d or %d bytes, not %d", o.name, disk.SectorSize,
			disk.LongBlock, o.opt.BlockSize)
	case o.img != nil && o.opt.Size != 0 && o.opt.Size < o.img.Size():
		return &SizeError{Image: o.name, Size: o.opt.Size,
			Reason: fmt.Sprintf("is less than the %d bytes (%s) of the image: give none, or at "+
				"least that", o.img.Size(), words.Bytes(o.img.Size()))}
	case o.opt.Identity.NAA != [8]byte{} && o.opt.Identity.NAA[0]>>4 != 3:
		return fmt.Errorf("%q: the NAA identifier %x does not begin with 3 (locally assigned)",
			o.name, o.opt.Identity.NAA)
	}
	return nil
}

// durable reports whether a flush reaches storage.
func (o *opening) durable() bool { return o.dir.persistent || o.opt.Durable }

// owner returns the owner for the state.
func (o *opening) owner() string {
	if o.dir.persistent {
		return "" // it is not swept, and it may go to another machine
	}
	return o.opt.Owner
}

// identity returns the identity of the options, completed by another one.
func (o *opening) identity(or disk.Identity) disk.Identity { return o.opt.Identity.Or(or) }

// spaceError explains an error of writing a small file in the disk's directory.
func (o *opening) spaceError(err error) error {
	return image.NoRoom(err, o.dir.path, "the state in "+filepath.Base(o.dir.path), 0)
}

// IsComplete reports whether Open needs no image: an earlier start left a complete disk that was
// made of the image whose files have these digests, the image's own first. Open finds that disk
// with the same WorkDir, PersistentDir and Name.
func IsComplete(opt Options, digests []string) bool {
	d := persistentDirOf(opt.PersistentDir)
	if opt.PersistentDir == "" {
		root, err := osfile.Resolved(opt.WorkDir)
		if err != nil {
			return false
		}
		d = workDirOf(root, escapeName(opt.Name))
		if osfile.CheckOwner(d.path) != nil {
			return false
		}
	}
	s, err := loadState(d.state())
	if err != nil || !s.Complete || knowBoot() != nil || !s.survivesBoot(bootID()) {
		return false
	}
	if !d.persistent && s.Image != storedName(opt.Name) {
		return false
	}
	st, err := os.Lstat(d.disk())
	if err != nil || !st.Mode().IsRegular() || st.Size() < s.Size {
		return false
	}
	var made []string
	for _, f := range s.Chain {
		made = append(made, f.Digest)
	}
	return len(digests) > 0 && !slices.Contains(digests, "") && slices.Equal(made, digests)
}

// WithoutFiles makes an instance of another server's disk, which has the identity that it has
// there, or of a snapshot. The instance has no directory, so it has no Store and cannot Grow.
func WithoutFiles(d disk.Disk, id disk.Identity, blockSize int, readOnly bool) *Instance {
	return &Instance{Disk: d, Identity: id, BlockSize: blockSize, ReadOnly: readOnly,
		Persistent: true, closed: d.Close}
}

// Grow enlarges the disk to a size in bytes while it is used. The new part reads as zeros. The
// caller tells the clients (serving.Disks.Resize). If the disk is durable, so is its new size when
// Grow returns nil: the next start takes it from the file. One call at a time, and none during
// Close.
//
// Errors: *SizeError, *image.SpaceError if no file can be that large, disk.ErrReadOnly.
func (i *Instance) Grow(size int64) error {
	name := filepath.Base(i.path)
	switch now := i.Size(); {
	case size == now:
		return nil
	case size < now:
		return &SizeError{Image: name, Size: size, Reason: fmt.Sprintf("is less than the %d bytes "+
			"(%s) that the disk has, and a disk is never made smaller", now, words.Bytes(now))}
	case size%int64(max(i.BlockSize, disk.SectorSize)) != 0:
		return notWhole(name, size, int64(max(i.BlockSize, disk.SectorSize)))
	case size > maxSize:
		return overMax(name, size)
	case i.tree == nil:
		return &SizeError{Image: name, Size: size,
			Reason: "is not that of the image, which is served as it is"}
	}
	return image.NoRoom(i.tree.Grow(size), filepath.Dir(i.path), "the disk of "+words.Name(name),
		size)
}
