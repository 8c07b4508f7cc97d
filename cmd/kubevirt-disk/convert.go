package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/disk/unpack"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/problems"
)

func (a *app) convertCommand() *cobra.Command {
	var o convertOptions
	cmd := &cobra.Command{
		Use:   "convert IMAGE DEST",
		Short: "Make a raw file or a qcow2 image of an image",
		Long: `Makes a raw file of an image and its backing files, with holes for zeros. If the name
of DEST ends in .qcow2, convert makes a compressed qcow2 image without backing files. The same disk
always gives the same image, bit by bit. The file is written under a temporary name beside DEST and
renamed when it is complete. A block device is overwritten. If DEST is -, the disk goes to standard
output: raw with its zeros, or as qcow2, which is made in a temporary file first. Progress goes to
standard error.

` + formatsHelp,
		Args:              imageArgs(cobra.ExactArgs(2)),
		ValidArgsFunction: completeConvert,
	}
	cmd.Flags().BoolVar(&o.force, "force", false, "replace DEST if it exists")
	cmd.Flags().StringVar(&o.targetFormat, flagTargetFormat, "",
		"`format` to write: raw or qcow2 (default what the name of DEST says, otherwise raw)")
	cmd.Flags().StringVar(&o.compression, flagCompress, "",
		"`method` to compress qcow2: zstd, zlib (for QEMU before 5.1) or none (default zstd)")
	addFormatFlag(cmd, &o.format)
	own := []settings.Setting{unpackSetting(&o.unpack, defaultUnpack)}
	settings.AddSettings(cmd.Flags(), own)
	cmd.RunE = running(func(cmd *cobra.Command, args []string) error {
		if err := load(cmd.Flags(), own).Problems.Err(); err != nil {
			return err
		}
		if err := o.check(args[1]); err != nil {
			return err
		}
		ctx, stop := a.interruptible(cmd.Context(), nil, nil)
		defer stop()
		return a.convert(ctx, args[0], args[1], o)
	})
	return cmd
}

const flagTargetFormat = "target-format"

// targetFormats are the formats that convert can write.
var targetFormats = texts(image.FormatRaw, image.FormatQcow2)

type convertOptions struct {
	force        bool
	targetFormat string // "": not set
	compression  string // of qcow2; "": not set
	format       string // of the image; "": it is detected
	unpack       int64  // bytes
}

func (o convertOptions) check(destination string) error {
	var wrong problems.List
	if o.targetFormat != "" && !slices.Contains(targetFormats, o.targetFormat) {
		wrong.Add("--"+flagTargetFormat, "%q is not a format that can be written: use %s",
			o.targetFormat, strings.Join(targetFormats, " or "))
	}
	switch {
	case o.compression == "":
	case !slices.Contains(compressions, o.compression):
		wrong.Add("--"+flagCompress, "%q is not a compression: use %s",
			o.compression, strings.Join(compressions, ", "))
	case o.target(destination) != image.FormatQcow2:
		wrong.Add("--"+flagCompress, "a raw disk is not compressed: name a .qcow2 file, or say "+
			"--%s=%s", flagTargetFormat, image.FormatQcow2)
	}
	return wrong.Err()
}

// target is the format to write.
func (o convertOptions) target(destination string) image.Format {
	switch {
	case o.targetFormat != "":
		return image.Format(o.targetFormat)
	case hasExtension(destination, qcow2Extensions):
		return image.FormatQcow2
	}
	return image.FormatRaw
}

func (a *app) convert(ctx context.Context, source, destination string, o convertOptions) error {
	if err := checkSource(source); err != nil {
		return err
	}
	opt, err := assumed(source, o.format)
	if err != nil {
		return err
	}
	if err := a.checkDestination(destination, o); err != nil {
		return err
	}
	opt.Foreign, opt.Hold = true, true
	img, err := image.Open(source, opt)
	if err != nil {
		img, err = a.openWrapped(ctx, source, destination, o, err)
	}
	if err != nil || img == nil {
		return err
	}
	p := new(image.Progress)
	name := console.OneLine(img.Name())
	info := img.Info()
	fmt.Fprintf(a.stderr, "%s: %s, known by %s\n",
		name, formatText(info.Format, info.Version), assumption(info))
	report := a.reporter(name)
	isQcow2 := o.target(destination) == image.FormatQcow2
	compression := qcow2.Compression(o.compression)
	if destination == standardStream {
		return a.stream(ctx, p, report, func() error {
			defer img.Close() // here, because a write may go on after an interrupt
			if isQcow2 {
				return storeTo(ctx, img, a.stdout, compression, p)
			}
			return image.Stream(ctx, img, a.stdout, p)
		})
	}
	defer img.Close()
	err = report.While(p, func() error {
		if isQcow2 {
			return image.ConvertQcow2(ctx, img, destination, o.force, compression, p)
		}
		return image.Convert(ctx, img, destination, o.force, p)
	})
	if err != nil && ctx.Err() != nil {
		return interrupted(destination)
	}
	return explainWrite(err, destination)
}

// storeTo writes a qcow2 image to w. It makes the image in a file first, because the header is
// known only at the end.
func storeTo(ctx context.Context, img *image.Image, w io.Writer, c qcow2.Compression,
	p *image.Progress) error {
	scratch, err := image.Scratch(os.TempDir())
	if err != nil {
		return err
	}
	n, err := image.Store(ctx, img, scratch.File(), c, p)
	if err == nil {
		_, err = io.Copy(w, io.NewSectionReader(scratch.File(), 0, n))
	}
	return errors.Join(image.InTempDir(err), scratch.Finish(nil))
}

// stream runs write, which writes the disk to standard output.
func (a *app) stream(ctx context.Context, p *image.Progress, report *console.Reporter,
	write func() error) error {
	err := report.While(p, func() error {
		done := make(chan error, 1)
		go func() { done <- write() }()
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			return ctx.Err() // at once, even if the reader has stopped and the write waits
		}
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return errors.New("interrupted: standard output has only a part of the disk")
	case err != nil:
		return fmt.Errorf("standard output has only a part of the disk: %w", err)
	}
	return nil
}

// interrupted describes the files that remain after an interrupt.
func interrupted(destination string) error {
	if isBlockDevice(destination) {
		return fmt.Errorf("interrupted: block device %q has only a part of the disk", destination)
	}
	return fmt.Errorf("interrupted: %q was not written", destination)
}

func isBlockDevice(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().Type() == fs.ModeDevice
}

// explainWrite explains that the directory cannot be written. It names the file of the command
// line, not the temporary one next to it.
func explainWrite(err error, destination string) error {
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
		return fmt.Errorf("%q cannot be written by user %d: %w; name a file in a directory in "+
			"which that user can make one", destination, os.Geteuid(), err)
	}
	return err
}

// checkDestination refuses to replace a file without --force, and refuses a name that contradicts
// the format.
func (a *app) checkDestination(destination string, o convertOptions) error {
	if destination == standardStream {
		return a.checkStdout()
	}
	if strings.HasSuffix(destination, "/") {
		return fmt.Errorf("%q is the name of a directory: name the file in it", destination)
	}
	if o.targetFormat == "" && o.target(destination) == image.FormatRaw {
		err := checkRawName(destination, "keep the name with --"+flagTargetFormat+"=raw")
		if err != nil {
			return err
		}
	}
	info, err := os.Lstat(destination)
	if device, statErr := os.Stat(destination); statErr == nil &&
		device.Mode().Type() == fs.ModeDevice {
		info = device // perhaps by a link, such as the name of a logical volume
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		dir := filepath.Dir(destination)
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%q cannot be written: there is no directory %q; make it, or name "+
				"another file", destination, dir)
		}
	case errors.Is(err, syscall.ENOTDIR):
		return fmt.Errorf("%q cannot be written: %q is not a directory; name another file",
			destination, filepath.Dir(destination))
	case err != nil:
		return err
	case info.Mode().Type() == fs.ModeDevice && o.target(destination) == image.FormatQcow2:
		return fmt.Errorf("%q is a block device, which takes a raw disk: leave out --%s",
			destination, flagTargetFormat)
	case !o.force && info.Mode().IsRegular():
		// image.Convert replaces nothing else, even with --force
		return fmt.Errorf("%q exists already: name another file, or replace it with --force",
			destination)
	}
	return nil
}

func hasExtension(name string, extensions []string) bool {
	return slices.Contains(extensions, strings.ToLower(filepath.Ext(name)))
}

var qcow2Extensions = []string{".qcow2", ".qcow", ".qc2"}

// otherFormats are the extensions that people and programs take for other formats than raw.
var otherFormats = []struct {
	what       string
	extensions []string
}{
	{"a qcow2 image", qcow2Extensions},
	{"a QED image", []string{".qed"}},
	{"a VMDK image", []string{".vmdk"}},
	{"a VHDX image", []string{".vhdx"}},
	{"a VHD image", []string{".vhd", ".vpc"}},
	{"a VDI image", []string{".vdi"}},
	{"a Parallels image", []string{".hdd", ".hds"}},
	{"an Apple disk image", []string{".dmg"}},
	{"an appliance", []string{".ova", ".ovf"}},
	{"a compressed file", []string{".gz", ".tgz", ".xz", ".txz", ".zst", ".zstd", ".bz2", ".lz4",
		".lzma", ".lz", ".lzo"}},
	{"an archive", []string{".zip", ".7z", ".rar", ".tar", ".cpio"}},
}

// checkRawName refuses a name for a raw disk with the extension of another format. The text or
// names the other solution.
func checkRawName(name, or string) error {
	for _, f := range otherFormats {
		if hasExtension(name, f.extensions) {
			stem := strings.TrimSuffix(name, filepath.Ext(name))
			if !image.HasRawExtension(stem) {
				stem += ".raw"
			}
			return fmt.Errorf("%q is named like %s, but becomes a raw disk: name it %q, or %s",
				name, f.what, stem, or)
		}
	}
	return nil
}

// foreign are the options for files that are converted or fetched.
var foreign = image.Options{Foreign: true}

// openWrapped converts the disk in a wrapped file. If that can be done while the file is read, it
// returns no image. Otherwise it unpacks the disk to a temporary file first, because the
// destination needs other places of the disk than come next: a qcow2 image any place, standard
// output all in order. why says that the file is no image.
func (a *app) openWrapped(ctx context.Context, source, destination string, o convertOptions,
	why error) (*image.Image, error) {
	f, err := unpack.Find(source, why, unpack.Options{Memory: o.unpack})
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if f.Is(destination) {
		return nil, fmt.Errorf("destination %q is the image itself; name another file", destination)
	}
	fmt.Fprintf(a.stderr, "%s: unpacking %s\n", console.OneLine(source), console.OneLine(f.Name))
	p := &unpacking{file: f}
	report := a.reporter(console.OneLine(f.Name))
	if o.target(destination) == image.FormatRaw && destination != standardStream {
		err := report.While(p, func() error { return p.expand(ctx, destination, o.force) })
		if err != nil && ctx.Err() != nil {
			return nil, interrupted(destination)
		}
		return nil, explainWrite(err, destination)
	}
	var file *os.File
	err = report.While(p, func() (err error) {
		file, err = f.Scratch(ctx, foreign, p.count)
		return err
	})
	if err != nil {
		return nil, err
	}
	img, err := image.OpenUnnamed(ctx, f.Name, file, foreign)
	return img, errors.Join(err, file.Close())
}

// unpacking is the progress of a wrapped file.
type unpacking struct {
	file *unpack.File
	came atomic.Int64 // bytes of the file that have been read
	size atomic.Int64 // of the disk, bytes; 0: it is not complete
}

func (u *unpacking) count(n int) { u.came.Add(int64(n)) }

func (u *unpacking) Done() int64 { return min(u.came.Load(), u.file.Packed) }

func (u *unpacking) Total() int64 {
	if size := u.size.Load(); size > 0 {
		return size
	}
	return u.file.Packed
}

func (u *unpacking) Data() (done, total int64) { return u.Done(), u.file.Packed }

// expand writes the disk as a raw one while its file is read.
func (u *unpacking) expand(ctx context.Context, destination string, replace bool) error {
	open := func() (*image.Destination, error) {
		return image.CreateDestination(destination, replace)
	}
	if isBlockDevice(destination) {
		open = func() (*image.Destination, error) { return image.OpenDevice(destination) }
	}
	to, err := open()
	if err != nil {
		return err
	}
	a, err := u.file.Write(ctx, to, image.ArrivalOptions{Options: foreign}, u.count)
	if err = to.Finish(err); err == nil {
		u.size.Store(a.VirtualSize())
	}
	return err
}
