package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"strings"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/committed"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/nbd"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/transport"
)

const (
	flagFlat       = "flat"
	flagDigestFile = "digest-file"
	flagImage      = "image"
)

// committing is one call of commit.
type committing struct {
	a      *app
	cmd    *cobra.Command
	ask    *asker
	onto   registry.Onto
	dir    string // a persistent directory; "": none
	image  string // image that the disk in it was made from; "": the image of --onto
	digest string // file for the digest; "": none
	flat   bool   // all of the disk is stored, not only the changes
}

func (a *app) commitCommand() *cobra.Command {
	c := &committing{a: a}
	var from, compress, signKey string
	cmd := &cobra.Command{
		Use:   "commit [DISK[@SNAPSHOT]] REF [--onto IMAGE | --flat]",
		Short: "Store a disk as an image in a registry",
		Long: `Stores a disk as a container image: the layers of the image that it came from (--onto) and one
with what differs, or the whole disk (--flat). A daemon knows from which image in a registry it
serves a disk, so --onto may be left out for that one. With --squash, the layers of the versions
between the oldest one and this one are left out. The digest is printed at the end.

DISK is one of

  a name as the command ps shows it, a volume, or a LUN: a disk of a running daemon, which is asked
      by its control socket. Its guest goes on: commit takes a snapshot, and deletes it at the end.
      With @SNAPSHOT, commit stores that snapshot, and keeps it.
  a name of a disk in --persistent-dir, which no daemon may serve meanwhile. Without DISK, or with
      @SNAPSHOT only, the directory must have one disk.
  nbd+unix:///EXPORT?socket=PATH or nbd://127.0.0.1:PORT/EXPORT: an export of a daemon. commit is a
      client like any other: in access mode write-exclusive, it is refused while somebody uses the
      disk, and nobody can use it until commit has read it. In other modes, make sure that nobody
      writes meanwhile.

Exit status: 0 done, 1 failed while running, 2 wrong usage.

` + registryHelp,
		Args: imageArgs(cobra.RangeArgs(1, 2)),
	}
	c.cmd = cmd
	cmd.Flags().StringVar(&c.onto.Image, flagOnto, "", "`reference` of the image that the disk "+
		"came from, or of another version of it: only what differs is stored")
	addSquash(cmd, &c.onto)
	cmd.Flags().BoolVar(&c.flat, flagFlat, false, "store the whole disk, as one file")
	cmd.Flags().StringVar(&from, "base", base, "`reference` of the base image with --flat, "+
		"or if nothing is the same; none makes a KubeVirt containerDisk")
	cmd.Flags().StringVar(&compress, flagCompress, "", "`method` zstd, zlib (for QEMU before 5.1) "+
		"or none (default zstd)")
	cmd.Flags().StringVar(&c.dir, keyPersistentDir, "", "`directory` of a mounted volume with "+
		"the disk, as of serve")
	cmd.Flags().StringVar(&c.image, flagImage, "", "with --"+keyPersistentDir+": `reference`, or "+
		"path of a file, of what the disk was made of, if it is not complete without (default "+
		"that of --"+flagOnto+")")
	addDigestFile(cmd, &c.digest)
	addSignKey(cmd, &signKey)
	c.ask = a.asker(cmd)
	cmd.ValidArgsFunction = c.ask.completeDisk(false)
	settings.AddSettings(cmd.Flags(), new(reach).settings())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ref, err := transport.ParseReference(args[len(args)-1])
		if err != nil {
			return err
		}
		open, err := c.opener(append([]string{""}, args[:len(args)-1]...))
		if err != nil {
			return err
		}
		switch {
		case c.flat && c.onto.Image != "",
			!c.flat && c.onto.Image == "" && !c.asksDaemon(args[:len(args)-1]):
			return c.ontoOrFlat("")
		case c.flat && from == "":
			return fmt.Errorf("name the base image with --base, or say --base=%s",
				registry.BaseNone)
		}
		if err := errors.Join(checkCompress(compress), c.checkOnto()); err != nil {
			return err
		}
		opt := pushOptions(from, compress)
		if opt.Sign, err = a.readSignKey(signKey); err != nil {
			return err
		}
		return a.withRegistry(cmd, ref, func(ctx context.Context, client *registry.Client) error {
			return c.run(ctx, client, ref, opt, open)
		})
	}
	return cmd
}

// asksDaemon reports whether the arguments name a disk of a running daemon.
func (c *committing) asksDaemon(args []string) bool {
	return c.dir == "" && len(args) == 1 && !strings.Contains(args[0], "://")
}

// ontoOrFlat is the error of a call with neither --onto nor --flat.
func (c *committing) ontoOrFlat(why string) error {
	return fmt.Errorf("%ssay either --%s, with the image that the disk came from, or --%s", why,
		flagOnto, flagFlat)
}

// checkOnto checks the flags for the image below. If none is given, the daemon may name one later.
func (c *committing) checkOnto() error {
	if c.onto.Image == "" && !c.flat {
		return nil
	}
	return checkOnto(c.onto, nil)
}

type openCommitted func(ctx context.Context, client *registry.Client) (*committed.Disk, error)

// opener reads a command line. args ends with the disk, which may be "".
func (c *committing) opener(args []string) (openCommitted, error) {
	what := args[len(args)-1]
	if c.image != "" && c.dir == "" {
		return nil, fmt.Errorf("--%s is about a disk in --%s", flagImage, keyPersistentDir)
	}
	if strings.Contains(what, "://") {
		if c.dir != "" {
			return nil, fmt.Errorf("an export is not in --%s: leave one out", keyPersistentDir)
		}
		return openExport(what)
	}
	name, snapshot, at := strings.Cut(what, "@")
	if i := strings.LastIndex(what, "@"); i > 0 { // a name may be a reference with a digest
		if name, snapshot = what[:i], what[i+1:]; strings.Contains(snapshot, ":") {
			name, snapshot, at = what, "", false
		}
	}
	switch {
	case at && snapshot == "":
		return nil, fmt.Errorf("%q names no snapshot behind the @", what)
	case c.dir != "":
		return func(ctx context.Context, client *registry.Client) (*committed.Disk, error) {
			return c.openKept(ctx, client, name, snapshot)
		}, nil
	case name == "":
		return nil, fmt.Errorf("name the disk: usage is %q", c.cmd.UseLine())
	}
	return func(ctx context.Context, _ *registry.Client) (*committed.Disk, error) {
		return c.openOfDaemon(ctx, name, snapshot)
	}, nil
}

// openExport returns a function that opens an export of a daemon.
func openExport(text string) (openCommitted, error) {
	uri, err := nbd.ParseURI(text)
	if err == nil && uri.TLS {
		err = errors.New("commit is for daemons of this machine: use a socket or 127.0.0.1")
	}
	if err != nil {
		return nil, fmt.Errorf("the disk: %w", err)
	}
	return func(ctx context.Context, _ *registry.Client) (*committed.Disk, error) {
		return committed.OpenExport(ctx, uri.Address, uri.Export)
	}, nil
}

// openOfDaemon opens a disk of a running daemon, which may know the image that the disk was made
// from.
func (c *committing) openOfDaemon(ctx context.Context, name, snapshot string) (*committed.Disk,
	error) {
	socket, err := c.ask.socket(nil)
	if err != nil {
		return nil, err
	}
	d, err := committed.OpenOfDaemon(ctx, daemonAt(socket), name, snapshot, func(err error) error {
		if err == nil || errors.Is(err, disk.ErrNotNow) || errors.Is(err, context.Canceled) {
			return err
		}
		return explainControl(err, socket, pendingChange)
	})
	if err == nil && c.onto.Image == "" && !c.flat {
		if c.onto.Image = d.Reference; d.Reference == "" {
			return nil, errors.Join(c.ontoOrFlat(fmt.Sprintf("%q was not made of an image in a "+
				"registry, as far as the daemon knows: ", d.Name)), d.Close())
		}
	}
	return d, err
}

// openKept opens a disk in the persistent directory.
func (c *committing) openKept(ctx context.Context, client *registry.Client,
	name, snapshot string) (*committed.Disk, error) {
	d, err := committed.OpenKept(ctx, client, committed.Kept{Dir: c.dir, Name: name,
		Snapshot: snapshot, Below: cmp.Or(c.image, c.onto.Image)})
	switch {
	case errors.As(err, new(*committed.NoDiskError)):
		err = fmt.Errorf("--%s: %w", keyPersistentDir, err)
	case errors.As(err, new(*committed.BelowError)):
		err = fmt.Errorf("%w (--%s)", err, flagImage)
	case errors.As(err, new(*durable.LockedError)):
		err = fmt.Errorf("%w; a disk that a daemon serves is committed without --%s, by its name",
			err, keyPersistentDir)
	}
	return d, err
}

// run stores the disk.
func (c *committing) run(ctx context.Context, client *registry.Client, ref transport.Reference,
	opt registry.PushOptions, open openCommitted) (err error) {
	d, err := open(ctx, client)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	opt.Onto = c.onto
	file := d.Prepare(ctx, &opt)
	digest, err := c.a.push(ctx, client, []string{file}, ref, opt)
	if err != nil {
		return err
	}
	if err := d.Stored(ctx, digest); err != nil {
		fmt.Fprintf(c.a.stderr, "the next commit will read more, because it could not be "+
			"recorded that the snapshot is stored: %v\n", err)
	}
	return writeDigest(c.digest, digest)
}

func addDigestFile(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, flagDigestFile, "", "write the digest of the image to this "+
		"`file`, too, such as /dev/termination-log")
	cmd.PreRunE = func(*cobra.Command, []string) error { return checkDigestFile(*file) }
}

// digestText is the content of a file of --digest-file.
var digestText = regexp.MustCompile(`^(sha256:[0-9a-f]{64}\n?)?$`)

// checkDigestFile checks that nothing but a digest would be replaced.
func checkDigestFile(file string) error {
	if file == "" {
		return nil
	}
	f, err := openDigestFile(file, os.O_RDONLY)
	switch {
	case err == nil:
		err = f.Close()
	case errors.Is(err, fs.ErrNotExist), errors.As(err, new(*osfile.NotRegularError)):
		return nil
	}
	if err != nil {
		return fmt.Errorf("--%s: %w", flagDigestFile, err)
	}
	return nil
}

// openDigestFile opens a file that has a digest or nothing: the name may be a mistake, such as the
// path of an image. It does not open anything but a regular file.
func openDigestFile(file string, flags int) (*os.File, error) {
	f, err := osfile.OpenRegularFile(file, flags, 0o644)
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(f, 100))
	if err == nil && !digestText.Match(text) {
		err = fmt.Errorf("%q exists and has something other than a digest: name another file",
			file)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// writeDigest writes the digest of an image that was stored or fetched into the file of
// --digest-file ("": none).
func writeDigest(file, digest string) error {
	if file == "" {
		return nil
	}
	text := []byte(digest + "\n")
	f, err := openDigestFile(file, os.O_RDWR|os.O_CREATE)
	switch {
	case errors.As(err, new(*osfile.NotRegularError)):
		err = os.WriteFile(file, text, 0o644)
	case err == nil:
		if err = f.Truncate(0); err == nil {
			_, err = f.WriteAt(text, 0)
		}
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("the image %s is there, but --%s: %w", digest, flagDigestFile, err)
	}
	return nil
}
