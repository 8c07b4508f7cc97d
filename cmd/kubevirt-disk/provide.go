package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/provide"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/readyfile"
)

const (
	keyTo        = "to"
	keyImagePath = "image-path"

	envCopyPath = "COPY_PATH"
)

// provideSettings are the settings that serve does not have. The variables have the names of the
// original file wrapper.
func provideSettings(p *providing) []settings.Setting {
	return []settings.Setting{
		{Key: keyTo, Command: "provide", Env: []string{envCopyPath}, Kind: settings.KindFile,
			Usage: "`path` of the file without its extension, in a directory that others share: " +
				"it becomes PATH.qcow2 or PATH.raw",
			To: settings.Text(&p.to)},
		{Key: keyImagePath, Command: "provide", Env: []string{"IMAGE_PATH"},
			Kind:  settings.KindFile,
			Usage: "`file` of the image (default the only one in the directory)",
			To:    settings.Text(&p.image)},
		{Key: keyReadOnly, Command: "provide", Env: []string{"READ_ONLY"},
			Default: "false", Kind: settings.KindBool,
			Usage: "nobody writes to the file, as to the backing file of an overlay: then it may " +
				"be a hard link to the image",
			To: settings.Truth(&p.readOnly)},
	}
}

func (a *app) provideCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "provide --to PATH [IMAGE]",
		Short: "Make the image a local file for a virtual machine, until the file is removed",
		Long: `Makes the image a file in a directory that others share, where QEMU of the same
machine can use it: PATH.qcow2, or PATH.raw for a raw image and for one with backing files. The file
is complete when it appears, and belongs to QEMU's user (107) if this user may give files away. It
shares the space of the image if the file system can do that (reflink); otherwise it is a copy.

The command runs until the file is removed, or until SIGTERM or SIGINT; then it removes the file.
The ready file is there while the file is. After a kill -9 the next start keeps the file, with what
a guest has written to it. A file that this command has not made is neither replaced nor removed.

Called as /entry-point.sh with COPY_PATH set, the program does the same.

Exit status 0: the file is gone. 1: the file cannot be made, and nothing is left of it.`,
		Args:              imageArgs(cobra.MaximumNArgs(1)),
		ValidArgsFunction: completeImages,
	}
	var p providing
	c := newConfig()
	own := slices.Concat(provideSettings(&p),
		settings.Pick(c.settings(), keyDiskDir, keyReadyFile, keyLogLevel, keyLogFormat))
	settings.AddFlags(cmd.Flags(), own)
	cmd.RunE = running(func(cmd *cobra.Command, args []string) error {
		l := load(cmd.Flags(), own)
		p.dir = c.Images.Dir
		p.ready = readyfile.File{Path: c.ReadyFile, Name: nameOf(keyReadyFile)}
		if len(args) > 0 {
			p.image = args[0]
		}
		for _, key := range []string{keyImagePath, keyDiskDir} {
			if len(args) > 0 && cmd.Flags().Changed(key) {
				l.Problems.Add("--"+key, "cannot be combined with an image as argument: use one "+
					"of them")
			}
		}
		switch {
		case p.to == "":
			l.Problems.AddMissing(nameOf(keyTo), "name the file to make, without its extension")
		case strings.HasSuffix(p.to, "/"):
			l.Problems.Add(l.Name(keyTo), "%q is the name of a directory: name the file in it, "+
				"without its extension", p.to)
		}
		if err := l.Problems.Err(); err != nil {
			return err
		}
		ctx, stop := a.interruptible(cmd.Context(), nil, nil)
		defer stop()
		signal.Ignore(syscall.SIGPIPE) // the reader of the log may have ended
		logging := c.log.Resolve(a.stderr)
		p.log = console.NewQueuedLogger(logging, logging.Level, a.stderr)
		defer func() { _ = p.log.Sync() }()
		err := p.run(ctx)
		if err != nil && logging.Format == console.JSON {
			p.log.Error("providing the disk has failed", console.ErrorField(err))
			return &toldError{err}
		}
		return err
	})
	return cmd
}

// providing is one run of provide.
type providing struct {
	to, image, dir string
	readOnly       bool
	ready          readyfile.File
	log            *zap.Logger
}

// run makes the file and waits until it is gone, or ctx ends.
func (p *providing) run(ctx context.Context) error {
	if err := p.ready.Clear(); err != nil {
		return err
	}
	file, err := p.provide(ctx)
	if err != nil {
		if ctx.Err() != nil {
			p.log.Info("stopped before the disk was ready")
			return nil
		}
		return err
	}
	err = p.ready.Write()
	if err == nil {
		p.await(ctx, file)
	}
	err = errors.Join(err, p.ready.Remove(), file.Remove())
	if err == nil {
		p.log.Info("stopped", zap.String("removed", file.Path))
	}
	return err
}

// progressEvery is the time between two reports of the progress of a copy in the log.
const progressEvery = 10 * time.Second

func (p *providing) provide(ctx context.Context) (*provide.File, error) {
	img, err := p.open()
	if err != nil {
		return nil, err
	}
	defer img.Close()
	progress, begin := new(image.Progress), time.Now()
	done := make(chan struct{})
	defer close(done)
	go func() {
		tick := time.NewTicker(progressEvery)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				p.log.Info("copying", progress.Fields(time.Since(begin))...)
			}
		}
	}()
	file, err := provide.Provide(ctx, img, provide.Options{To: p.to, ReadOnly: p.readOnly,
		Log: p.log, Progress: progress})
	if err != nil {
		return nil, explainWrite(err, p.to)
	}
	return file, nil
}

// open opens the image. It refuses several files. The original wrapper took the last one, which
// could be the wrong one.
func (p *providing) open() (*image.Image, error) {
	if p.image != "" {
		if err := checkSource(p.image); err != nil {
			return nil, err
		}
		return image.Open(p.image, image.Options{Hold: true})
	}
	images, err := image.ScanDir(p.dir, image.Options{Hold: true})
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("the image directory %q does not exist: put an image there, or "+
			"name another directory with %s: %w", p.dir, nameOf(keyDiskDir), err)
	case err != nil:
		return nil, err
	case len(images) == 1:
		return images[0], nil
	}
	names := make([]string, len(images))
	for i, img := range images {
		names[i] = img.Name()
		_ = img.Close() // it was opened for reading
	}
	return nil, fmt.Errorf("%q has %d images (%s), and one file is made of one image: name it, as "+
		"in \"provide --to %s %s\" or with %s", p.dir, len(images), strings.Join(names, ", "), p.to,
		filepath.Join(p.dir, names[0]), nameOf(keyImagePath))
}

// goneEvery is the time between two checks of await for the file.
const goneEvery = 500 * time.Millisecond

// await returns when the file is gone or ctx ends.
func (p *providing) await(ctx context.Context, file *provide.File) {
	tick := time.NewTicker(goneEvery)
	defer tick.Stop()
	warned := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		switch gone, err := file.Gone(); {
		case gone:
			p.log.Info("the file is gone", zap.String("path", file.Path))
			return
		case err != nil && !warned:
			warned = true
			p.log.Warn("it is not known whether the file is still there", zap.Error(err))
		}
	}
}
