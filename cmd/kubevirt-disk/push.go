package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/transport"
)

// base is the base image of this release, set by the linker: -X
// main.base=registry.example.com/kubevirt.io:disk.
var base = ""

func (a *app) pushCommand() *cobra.Command {
	var from, compress, order, signKey string
	var onto registry.Onto
	var artifact bool
	var unpackMemory int64
	cmd := &cobra.Command{
		Use:   "push FILE... REF",
		Short: "Store disk images as a container image in a registry",
		Long: `Stores disk images as a container image that serves them, as "FROM kubevirt.io:disk"
and "ADD FILE /disk/" make it: one layer for each file, with its backing files. Every file is
validated as serve would before anything is sent. Blobs that the registry has are not sent again.
The same files on the same base have the same digest, which is printed at the end. A wrapped file is
unpacked into $TMPDIR first.

With --artifact, the result is an OCI artifact instead of a container image: clients such as oras
fetch FILE as it is, and serve --image streams it.

With --onto, FILE is a new version of the disk in another image. The new image has the layers of
that one, and a layer with what differs. So little is sent, and whoever has the old image fetches
little. To compare the two, push fetches the old disk; of a raw disk, only the chunks that differ.
With --squash, the layers of the versions between the oldest one and the new one are left out.

Exit status: 0 done, 1 failed while running, 2 wrong usage.

` + formatsHelp + "\n\n" + registryHelp,
		Args: imageArgs(cobra.MinimumNArgs(2)),
	}
	cmd.Flags().StringVar(&from, "base", base, "`reference` of the base image; none makes a "+
		"KubeVirt containerDisk: one disk, no server")
	cmd.Flags().StringVar(&compress, flagCompress, "", "how to compress what is not compressed "+
		"yet: `method` zstd, zlib (for QEMU before 5.1) or none (default zstd for raw files, "+
		"none for others)")
	cmd.Flags().StringVar(&order, flagBootOrder, "", "`file` with the boot order recorded by "+
		"serve --record-boot: these blocks are fetched first when the image is served from the "+
		"registry")
	cmd.Flags().StringVar(&onto.Image, flagOnto, "", "`reference` of an image with another "+
		"version of the disk: only what differs is stored; --base counts only if nothing is "+
		"the same")
	cmd.Flags().StringVar(&onto.File, flagOntoFile, "", "`file` with a copy of that other "+
		"version, as pull --format=original writes it: what it has is not fetched")
	cmd.Flags().BoolVar(&artifact, flagArtifact, false, "store an OCI artifact, as oras push "+
		"does: each FILE is a layer as it is, without a base image")
	addSquash(cmd, &onto)
	addSignKey(cmd, &signKey)
	unpacking := unpackSetting(&unpackMemory, defaultUnpack)
	settings.AddFlags(cmd.Flags(), append(new(reach).settings(), unpacking))
	cmd.ValidArgsFunction = completeImages
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		files, last := args[:len(args)-1], args[len(args)-1]
		if info, err := os.Stat(last); err == nil && info.Mode().IsRegular() {
			return fmt.Errorf("%q is a file, and the reference of the image comes last: usage is "+
				"%q", last, cmd.UseLine())
		}
		ref, err := transport.ParseReference(last)
		if err != nil {
			return err
		}
		if err := checkCompress(compress); err != nil {
			return err
		}
		if err := checkOnto(onto, files); err != nil {
			return err
		}
		if artifact && (onto.Image != "" || cmd.Flags().Changed("base")) {
			return fmt.Errorf("--%s has no other layers than its files: leave out --base and --%s",
				flagArtifact, flagOnto)
		}
		if from == "" && onto.Image == "" && !artifact {
			return fmt.Errorf("name the base image with --base, such as "+
				"--base=REGISTRY/kubevirt.io:disk, or say --base=%s", registry.BaseNone)
		}
		opt := pushOptions(from, compress)
		opt.Onto, opt.Artifact = onto, artifact
		if artifact && compress == "" {
			opt.CompressRaw = ""
		}
		if opt.Boot, err = readBootOrder(order); err != nil {
			return err
		}
		if opt.Sign, err = a.readSignKey(signKey); err != nil {
			return err
		}
		var reach reach
		l := load(cmd.Flags(), append(reach.settings(), unpacking))
		opt.UnpackMemory = unpackMemory
		return a.withRegistryOf(cmd, l, reach, ref, func(ctx context.Context,
			client *registry.Client) error {
			_, err := a.push(ctx, client, files, ref, opt)
			return err
		})
	}
	return cmd
}

const (
	flagCompress  = "compress"
	flagBootOrder = "boot-order"
	flagOnto      = "onto"
	flagOntoFile  = "onto-file"
	flagSquash    = "squash"
	flagArtifact  = "artifact"
)

// addSquash adds the flag that keeps the chain of versions short.
func addSquash(cmd *cobra.Command, onto *registry.Onto) {
	cmd.Flags().BoolVar(&onto.Squash, flagSquash, false, "with --"+flagOnto+": leave out the "+
		"layers of the versions between the oldest one and the new one, which gets what they have")
}

// checkOnto checks the flags for another version of the disk.
func checkOnto(onto registry.Onto, files []string) error {
	switch {
	case onto.Image == "" && onto.Squash:
		return fmt.Errorf("--%s is about the versions below a new one: name the image that has "+
			"them with --%s", flagSquash, flagOnto)
	case onto.Image == "" && onto.File == "":
		return nil
	case onto.Image == "":
		return fmt.Errorf("--%s is a copy of the disk in an image: name the image with --%s",
			flagOntoFile, flagOnto)
	case len(files) > 1:
		return fmt.Errorf("--%s takes one file: push the first one, and the next one onto the "+
			"result", flagOnto)
	}
	_, err := transport.ParseReference(onto.Image)
	if err != nil {
		return fmt.Errorf("--%s: %w", flagOnto, err)
	}
	if onto.File != "" {
		return checkSource(onto.File)
	}
	return nil
}

// readBootOrder reads a boot order that serve has recorded. It returns nil if path is "".
func readBootOrder(path string) (*registry.BootOrder, error) {
	if path == "" {
		return nil, nil
	}
	f, err := osfile.OpenText(path)
	if err != nil {
		return nil, fmt.Errorf("--%s: %w", flagBootOrder, err)
	}
	defer f.Close()
	order, err := registry.ReadBootOrder(f)
	if err != nil {
		return nil, fmt.Errorf("--%s: %q: %w", flagBootOrder, path, err)
	}
	return order, nil
}

func checkCompress(compress string) error {
	if compress != "" && !slices.Contains(compressions, compress) {
		return fmt.Errorf("--%s: %q is none of %s", flagCompress, compress,
			strings.Join(compressions, ", "))
	}
	return nil
}

// compressions are the values of --compress.
var compressions = texts(qcow2.CompressionZstd, qcow2.CompressionZlib, qcow2.CompressionNone)

// uploadsDir is where push remembers unfinished uploads. It is "" if the user has no cache
// directory, as in a container without a home.
func uploadsDir() string {
	cache, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	if _, err := os.Stat(filepath.Dir(cache)); err != nil {
		return ""
	}
	return filepath.Join(cache, "kubevirt-disk", "uploads")
}

// pushOptions are the options of a command line.
func pushOptions(from, compress string) registry.PushOptions {
	opt := registry.PushOptions{Base: from, Uploads: uploadsDir(),
		Image: image.Options{Foreign: true, Hold: true}}
	switch c := qcow2.Compression(compress); c {
	case "":
		opt.CompressRaw = qcow2.CompressionZstd
	case qcow2.CompressionNone:
	default:
		opt.Compress = c
	}
	return opt
}

// push stores files as an image, and prints and returns its digest.
func (a *app) push(ctx context.Context, client *registry.Client, files []string,
	ref transport.Reference, opt registry.PushOptions) (digest string, err error) {
	for _, file := range files {
		if err := checkSource(file); err != nil {
			return "", err
		}
	}
	if opt.Base == registry.BaseNone && len(files) > 1 && !opt.Artifact {
		fmt.Fprintln(a.stderr, "a KubeVirt containerDisk has one disk: with several, a VM has to "+
			"give the path of its disk")
	}
	p := new(registry.Progress)
	opt.Progress = p
	report, began := a.reporter(console.OneLine(ref.String())), time.Now()
	err = report.Watch(p, func() (err error) {
		digest, err = client.Push(ctx, files, ref, opt)
		return err
	})
	report.Clear()
	switch {
	case err != nil && ctx.Err() != nil:
		return "", errors.New("interrupted: the tag was not set; run the same command again to " +
			"resume")
	case err != nil:
		return "", err
	}
	fmt.Fprintf(a.stderr, "%s: %s are stored, in %s\n", console.OneLine(ref.String()),
		console.ShortSize(p.Stored()), time.Since(began).Round(time.Millisecond))
	if opt.Sign != nil {
		fmt.Fprintf(a.stderr, "%s: signed by %s\n", console.OneLine(ref.String()),
			opt.Sign.Fingerprint)
	}
	_, err = fmt.Fprintln(a.stdout, digest)
	return digest, err
}
