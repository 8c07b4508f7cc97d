package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/disk"
)

func (a *app) convertCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "convert IMAGE RAW",
		Short: "Expand an image into a sparse raw file",
		Long: `Expands an image, with its backing files, into a raw file in which zeros are holes. The file is written under a temporary
name beside RAW, which appears when it is complete. Progress goes to standard error.`,
		Args: usageArgs(cobra.ExactArgs(2)),
	}
	cmd.Flags().BoolVar(&force, "force", false, "replace RAW if it is there")
	cmd.RunE = running(func(cmd *cobra.Command, args []string) error {
		ctx, stop := a.interruptible(cmd.Context())
		defer stop()
		return a.convert(ctx, args[0], args[1], force)
	})
	return cmd
}

func (a *app) convert(ctx context.Context, source, destination string, force bool) error {
	if err := checkDestination(destination, force); err != nil {
		return err
	}
	img, err := disk.OpenImage(source, disk.ImageOptions{})
	if err != nil {
		return err
	}
	defer img.Close()
	p := new(disk.Progress)
	name := strings.ReplaceAll(harmless(img.Name()), "\n", `\n`) // a bar is one line
	report := newReporter(a.stderr, isTerminal(a.stderr), name)
	err = report.while(p, func() error { return disk.Convert(ctx, img, destination, p) })
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("interrupted: %s was not written", destination)
	}
	return explainWrite(err, destination)
}

// explainWrite names the file that was asked for where it is its directory that cannot be written: until it is complete, it has another name.
func explainWrite(err error, destination string) error {
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
		return fmt.Errorf("%s cannot be written by user %d: %w; name a file in a directory in which that user can make one", destination, os.Geteuid(), err)
	}
	return err
}

// checkDestination refuses to replace a file that nobody asked to replace.
func checkDestination(destination string, force bool) error {
	if strings.HasSuffix(destination, "/") {
		return fmt.Errorf("%s is the name of a directory: name the file in it", destination)
	}
	info, err := os.Lstat(destination)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		dir := filepath.Dir(destination)
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s cannot be written: there is no directory %s; make it, or name another file", destination, dir)
		}
		return nil
	case errors.Is(err, syscall.ENOTDIR):
		return fmt.Errorf("%s cannot be written: %s is no directory; name another file", destination, filepath.Dir(destination))
	case err != nil:
		return err
	case !force && info.Mode().IsRegular(): // anything else is not replaced even so, as disk.Convert says
		return fmt.Errorf("%s is there already: name another file, or replace it with --force", destination)
	}
	return nil
}
