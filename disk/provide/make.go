package provide

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/words"
)

// makeFile makes the file. A reflink is best: it shares the image's space until one of them is
// written. A hard link is the image's own file: a write to it would change the image for everybody,
// and its owner and mode cannot be set for QEMU. So it is made only for a file that is never
// written.
func (p *providing) makeFile(ctx context.Context, r record) error {
	if len(p.img.Info().BackingChain) > 0 {
		return p.convert(ctx, r)
	}
	src, err := p.img.OpenFile()
	if err != nil {
		return err
	}
	defer src.Close()
	out, err := durable.CreateNamed(p.path, 0o600, func(*os.File) error { return p.foreign() })
	if err != nil {
		return err
	}
	p.file.How = "reflink"
	err = osfile.Retry(func() error {
		return unix.IoctlFileClone(int(out.File.Fd()), int(src.Fd()))
	})
	if err != nil && p.opt.ReadOnly && readableByQEMU(src) {
		if err := p.link(src, r); err == nil {
			_ = out.Finish(errLinked) // another run would remove the partial file, too
			return nil
		}
	}
	if err != nil {
		p.file.How = "copy"
		err = p.copy(ctx, out.File, src)
	}
	if err == nil {
		err = p.complete(out.File, r)
	}
	if err := out.Finish(p.spaceError(err)); err != nil {
		return err
	}
	return p.open()
}

// errLinked ends a partial file that is not needed.
var errLinked = errors.New("the image was linked instead")

// link gives the image's own file the new name. The record must be there already.
func (p *providing) link(src *os.File, r record) error {
	r.Instance = instanceOf(src)
	if err := r.save(p.file.state); err != nil {
		return err
	}
	// By the descriptor: the image's name may lead to another file by now.
	from := fmt.Sprintf("/proc/self/fd/%d", src.Fd())
	err := osfile.Retry(func() error {
		return unix.Linkat(unix.AT_FDCWD, from, unix.AT_FDCWD, p.path, unix.AT_SYMLINK_FOLLOW)
	})
	if err != nil {
		return err
	}
	p.file.How = "hard link"
	return errors.Join(durable.SyncParent(p.path), p.open())
}

// convert makes a raw file of an image with backing files.
func (p *providing) convert(ctx context.Context, r record) error {
	expanded := p.hidden(".expanded")
	p.file.How = "conversion"
	err := image.Convert(ctx, p.img, expanded, true, p.opt.Progress)
	var f *os.File
	if err == nil {
		f, err = osfile.OpenFile(expanded, os.O_RDWR, 0)
	}
	if err == nil {
		err = errors.Join(p.complete(f, r), f.Close())
	}
	if err == nil {
		err = durable.RenameNew(expanded, p.path)
	}
	if err != nil {
		return errors.Join(p.spaceError(err), osfile.Remove(expanded))
	}
	return p.open()
}

// complete makes a file ready for its name: owner, mode, durability and record.
func (p *providing) complete(f *os.File, r record) error {
	if err := p.img.CheckUntouched(); err != nil {
		return err
	}
	if err := p.giveToQEMU(f); err != nil {
		return err
	}
	if p.file.Format == image.FormatRaw {
		// A guest may write anything into the file, and the content must not decide the format
		// then.
		if err := image.MarkRaw(f, ""); err != nil {
			p.opt.Log.Debug("the file cannot be marked as raw", zap.Error(err))
		}
	}
	if err := osfile.Retry(f.Sync); err != nil {
		return err
	}
	r.Instance = instanceOf(f)
	return r.save(p.file.state)
}

// open opens the file by its name, and makes the name durable.
func (p *providing) open() error {
	if err := durable.SyncParent(p.path); err != nil {
		return err
	}
	f, err := durable.OpenToLock(p.path)
	if err != nil {
		return err
	}
	p.file.file = f
	known, err := loadRecord(p.file.state)
	if err == nil && (known == nil || known.Instance != instanceOf(f)) {
		err = p.foreign() // by now: convert --force, for example, has replaced it
	}
	return err
}

// giveToQEMU lets QEMU's user use the file.
func (p *providing) giveToQEMU(f *os.File) error {
	// Only root can change a file's owner, and not in every container.
	_ = unix.Fchown(int(f.Fd()), qemuID, qemuID)
	var st unix.Stat_t
	if err := osfile.Retry(func() error { return unix.Fstat(int(f.Fd()), &st) }); err != nil {
		return err
	}
	mode := fs.FileMode(0o660)
	switch own := st.Uid == qemuID; {
	case own && p.opt.ReadOnly:
		mode = 0o440
	case own:
	case p.opt.ReadOnly:
		mode = 0o444
	default:
		mode = 0o644
		p.opt.Log.Warn("QEMU's user can read the file and not write to it, because it belongs to "+
			"another user: run this as that user or as root, or use an overlay",
			zap.Int("qemu_user", qemuID), zap.Uint32("owner", st.Uid))
	}
	return f.Chmod(mode)
}

// readableByQEMU reports whether QEMU's user can read a file whose mode must stay as it is.
func readableByQEMU(f *os.File) bool {
	var st unix.Stat_t
	if osfile.Retry(func() error { return unix.Fstat(int(f.Fd()), &st) }) != nil {
		return false
	}
	switch {
	case st.Uid == qemuID:
		return st.Mode&unix.S_IRUSR != 0
	case st.Gid == qemuID:
		return st.Mode&unix.S_IRGRP != 0
	}
	return st.Mode&unix.S_IROTH != 0
}

// copyBuffer is how much is copied at once if the kernel cannot copy. Bytes.
const copyBuffer = 1 << 20

// copyStep is how much is copied before the context is checked again. Bytes.
const copyStep = 16 << 20

// copy copies the image's file. Holes stay holes.
func (p *providing) copy(ctx context.Context, dst, src *os.File) error {
	var st unix.Stat_t
	if err := osfile.Retry(func() error { return unix.Fstat(int(src.Fd()), &st) }); err != nil {
		return err
	}
	data := min(st.Blocks*osfile.StatBlock, st.Size)
	available, err := osfile.AvailableSpace(p.dir)
	if err != nil {
		return err
	}
	if data > available {
		return &image.SpaceError{Dir: p.dir, What: "the file of " + words.Name(p.img.Name()),
			Needed: data, Available: available}
	}
	var done atomic.Int64
	p.opt.Progress.Follow(st.Size, func() (int64, int64) { return min(done.Load(), data), data })
	if err := osfile.Retry(func() error { return dst.Truncate(st.Size) }); err != nil {
		return err
	}
	for off := int64(0); off < st.Size; {
		n, isData, err := osfile.SeekExtent(src, off, st.Size-off)
		if err != nil {
			return err
		}
		for end := off + n; isData && off < end; {
			if err := ctx.Err(); err != nil {
				return err
			}
			step := min(end-off, copyStep)
			if err := copyRange(dst, src, off, step); err != nil {
				return fmt.Errorf("writing %q: %w", filepath.Base(p.path), err)
			}
			off += step
			done.Add(step)
		}
		if !isData {
			off += n
		}
	}
	return nil
}

// copyRange copies a range to the same place of another file, in the kernel if possible.
func copyRange(dst, src *os.File, off, length int64) error {
	for length > 0 {
		from, to, n := off, off, 0
		err := osfile.Retry(func() (err error) {
			n, err = unix.CopyFileRange(int(src.Fd()), &from, int(dst.Fd()), &to, int(length), 0)
			return err
		})
		if err != nil || n == 0 {
			if disk.IsNoSpace(err) || errors.Is(err, unix.EIO) {
				return err
			}
			_, err := io.CopyBuffer(io.NewOffsetWriter(dst, off),
				io.NewSectionReader(src, off, length), make([]byte, copyBuffer))
			return err
		}
		off, length = off+int64(n), length-int64(n)
	}
	return nil
}
