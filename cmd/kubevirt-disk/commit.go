package main

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/nbd"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/transport"
)

const flagFlat = "flat"

func (a *app) commitCommand() *cobra.Command {
	var from, compress string
	var onto registry.Onto
	var flat bool
	cmd := &cobra.Command{
		Use:   "commit URI REF (--onto IMAGE | --flat)",
		Short: "Store a disk of a running daemon as an image in a registry",
		Long: `Stores a disk that a daemon serves by NBD as a container image: the layers of the image that it
came from (--onto) and one with what differs, or the whole disk (--flat). With --squash, the layers
of the versions between the oldest one and this one are left out. The digest is printed at the end.

URI is nbd+unix:///EXPORT?socket=PATH or nbd://127.0.0.1:PORT/EXPORT. commit is a client like any
other: in access mode write-exclusive, it is refused while somebody uses the disk, and nobody can
use it until commit has read it. In other modes, see to it that nobody writes meanwhile. All of the
disk is read, so that what a streamed disk has not fetched yet is fetched.

Exit status: 0 done, 1 failed while running, 2 wrong usage.

` + registryHelp,
		Args: imageArgs(cobra.ExactArgs(2)),
	}
	cmd.Flags().StringVar(&onto.Image, flagOnto, "", "`reference` of the image that the disk came "+
		"from, or of another version of it: only what differs is stored")
	addSquash(cmd, &onto)
	cmd.Flags().BoolVar(&flat, flagFlat, false, "store the whole disk, as one file")
	cmd.Flags().StringVar(&from, "base", base, "`reference` of the base image with --flat; none "+
		"makes a KubeVirt containerDisk")
	cmd.Flags().StringVar(&compress, flagCompress, "", "`method` zstd, zlib (for QEMU before 5.1) "+
		"or none (default zstd)")
	addFlags(cmd.Flags(), registrySettings(new(transport.Options)))
	_ = cmd.RegisterFlagCompletionFunc(flagCompress,
		cobra.FixedCompletions(compressions, cobra.ShellCompDirectiveNoFileComp))
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		uri, err := nbd.ParseURI(args[0])
		if err == nil && uri.TLS {
			err = errors.New("commit is for daemons of this machine: use a socket or 127.0.0.1")
		}
		if err != nil {
			return fmt.Errorf("the disk: %w", err)
		}
		ref, err := transport.ParseReference(args[1])
		if err != nil {
			return err
		}
		switch {
		case flat == (onto.Image != ""):
			return fmt.Errorf("say either --%s, with the image that the disk came from, or --%s",
				flagOnto, flagFlat)
		case flat && from == "":
			return fmt.Errorf("name the base image with --base, or say --base=%s",
				registry.BaseNone)
		}
		if err := errors.Join(checkCompress(compress), checkOnto(onto, nil)); err != nil {
			return err
		}
		opt := pushOptions(from, compress)
		opt.Onto = onto
		opt.Open = func(name string) (*image.Image, error) {
			return openExport(cmd.Context(), uri, name)
		}
		return a.withRegistry(cmd, ref, func(ctx context.Context, client *registry.Client) error {
			return a.push(ctx, client, []string{exportFile(uri.Export)}, ref, opt)
		})
	}
	return cmd
}

// exportFile is the name of a committed disk in the image: that of the export, which may be a
// reference with a tag, or a snapshot of a disk.
func exportFile(export string) string {
	name, _, _ := strings.Cut(path.Base(export), "@")
	name, _, _ = strings.Cut(name, ":")
	if name == "" || name == "." || name == "/" {
		name = "disk"
	}
	return strings.TrimSuffix(name, path.Ext(name)) + ".raw"
}

// openExport opens an export of a daemon as a raw image.
func openExport(ctx context.Context, uri nbd.URI, name string) (*image.Image, error) {
	return image.OpenSource(ctx, name, func(ctx context.Context, _ string) (image.Source, error) {
		r, err := nbd.OpenRemote(ctx, nbd.RemoteOptions{Address: uri.Address, Export: uri.Export,
			Once: true})
		if err != nil {
			return nil, err
		}
		return exported{r}, nil
	}, image.Options{Formats: map[string]image.Format{name: image.FormatRaw}})
}

// exported is an export as the bytes of an image. Nobody else writes to it while it is open.
type exported struct{ *nbd.Remote }

func (e exported) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	return e.Within(ctx).ReadAt(p, off)
}

func (e exported) Identity() image.Identity   { return image.Identity{} }
func (e exported) Parallel() int              { return 1 }
func (e exported) WillRead(off, length int64) {}
func (e exported) Check() error               { return nil }

// Extent knows nothing: the client of a relay asks for no extents.
func (e exported) Extent(off, length int64) (disk.Extent, error) {
	return disk.Extent{Length: min(length, e.Size()-off), Data: true}, nil
}
