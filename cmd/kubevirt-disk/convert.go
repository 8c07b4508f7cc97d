package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/problems"
)

func (a *app) convertCommand() *cobra.Command {
	var o convertOptions
	cmd := &cobra.Command{
		Use:   "convert IMAGE RAW",
		Short: "Expand an image into a sparse raw file",
		Long: `Expands an image, with its backing files, into a raw file in which zeros are holes. The file is written under a temporary
name beside RAW, which appears when it is complete. Where RAW is -, the disk goes to standard output, zeros included.
Progress goes to standard error.`,
		Args:              imageArgs(cobra.ExactArgs(2)),
		ValidArgsFunction: completeConvert,
	}
	cmd.Flags().BoolVar(&o.force, "force", false, "replace RAW if it is there")
	cmd.Flags().StringVar(&o.targetFormat, flagTargetFormat, "", "`format` to write: raw (default raw, unless the name of RAW says another)")
	addFormatFlag(cmd, &o.format)
	cmd.RunE = running(func(cmd *cobra.Command, args []string) error {
		if err := o.check(cmd); err != nil {
			return err
		}
		ctx, stop := a.interruptible(cmd.Context(), nil)
		defer stop()
		return a.convert(ctx, args[0], args[1], o)
	})
	return cmd
}

const flagTargetFormat = "target-format"

// targetFormats are what convert can write.
var targetFormats = []string{string(image.FormatRaw)}

type convertOptions struct {
	force        bool
	targetFormat string // "": nothing was said
	format       string // of the image; "": the image says
}

func (o convertOptions) check(cmd *cobra.Command) error {
	var wrong problems.List
	if cmd.Flags().Changed(flagTargetFormat) && !slices.Contains(targetFormats, o.targetFormat) {
		wrong.Add("--"+flagTargetFormat, "%q is no format that can be written: use %s", o.targetFormat, strings.Join(targetFormats, " or "))
	}
	return wrong.Err()
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
	img, err := image.Open(source, opt)
	if err != nil {
		return err
	}
	defer img.Close()
	p := new(image.Progress)
	name := strings.ReplaceAll(harmless(img.Name()), "\n", `\n`) // a bar is one line
	info := img.Info()
	fmt.Fprintf(a.stderr, "%s: %s, known by %s\n",
		name, formatText(info.Format, info.Version), assumption(info))
	report := newReporter(a.stderr, isTerminal(a.stderr), name)
	if destination == standardStream {
		return a.stream(ctx, img, p, report)
	}
	err = report.while(p, func() error { return image.Convert(ctx, img, destination, p) })
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("interrupted: %q was not written", destination)
	}
	return explainWrite(err, destination)
}

// stream writes the disk to standard output.
func (a *app) stream(ctx context.Context, img *image.Image, p *image.Progress, report *reporter) error {
	err := report.while(p, func() error {
		done := make(chan error, 1)
		go func() { done <- image.Stream(ctx, img, a.stdout, p) }()
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			return ctx.Err() // although nobody may be reading, which a write would wait for
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

// explainWrite names the file that was asked for where it is its directory that cannot be written: until it is complete, it has another name.
func explainWrite(err error, destination string) error {
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
		return fmt.Errorf("%q cannot be written by user %d: %w; name a file in a directory in which that user can make one",
			destination, os.Geteuid(), err)
	}
	return err
}

// checkDestination refuses to replace a file that nobody asked to replace, and a name that would tell a lie.
func (a *app) checkDestination(destination string, o convertOptions) error {
	if destination == standardStream {
		if isTerminal(a.stdout) {
			return errors.New(`standard output is a terminal, which the bytes of a disk would garble: redirect it (">disk.raw", "| ssh ...")`)
		}
		return nil
	}
	if strings.HasSuffix(destination, "/") {
		return fmt.Errorf("%q is the name of a directory: name the file in it", destination)
	}
	if said := formatOfName(destination); said != "" && o.targetFormat == "" {
		stem := strings.TrimSuffix(destination, filepath.Ext(destination))
		if !image.HasRawExtension(stem) {
			stem += ".raw"
		}
		return fmt.Errorf("the name %q says that it is %s, and what is written is a raw disk: name it %q, or keep the name by --%s=raw",
			destination, said, stem, flagTargetFormat)
	}
	info, err := os.Lstat(destination)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		dir := filepath.Dir(destination)
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%q cannot be written: there is no directory %q; make it, or name another file", destination, dir)
		}
	case errors.Is(err, syscall.ENOTDIR):
		return fmt.Errorf("%q cannot be written: %q is no directory; name another file", destination, filepath.Dir(destination))
	case err != nil:
		return err
	case !o.force && info.Mode().IsRegular(): // anything else is not replaced even so, as image.Convert says
		return fmt.Errorf("%q is there already: name another file, or replace it with --force", destination)
	}
	return nil
}

func hasExtension(name string, extensions []string) bool {
	return slices.Contains(extensions, strings.ToLower(filepath.Ext(name)))
}

// otherFormats are the extensions by which people and programs take a file for something else than a raw disk.
var otherFormats = []struct {
	what       string
	extensions []string
}{
	{"a qcow2 image", []string{".qcow2", ".qcow", ".qc2"}},
	{"a QED image", []string{".qed"}},
	{"a VMDK image", []string{".vmdk"}},
	{"a VHDX image", []string{".vhdx"}},
	{"a VHD image", []string{".vhd", ".vpc"}},
	{"a VDI image", []string{".vdi"}},
	{"a Parallels image", []string{".hdd", ".hds"}},
	{"an Apple disk image", []string{".dmg"}},
	{"an appliance", []string{".ova", ".ovf"}},
	{"a compressed file", []string{".gz", ".tgz", ".xz", ".txz", ".zst", ".zstd", ".bz2", ".lz4", ".lzma", ".lz", ".lzo"}},
	{"an archive", []string{".zip", ".7z", ".rar", ".tar", ".cpio"}},
}

// formatOfName is what a name says that the file is, unless that is a raw disk or nothing.
func formatOfName(name string) string {
	for _, f := range otherFormats {
		if hasExtension(name, f.extensions) {
			return f.what
		}
	}
	return ""
}
