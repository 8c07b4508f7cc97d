package main

import (
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/registry/transport"
)

func (a *app) inspectCommand() *cobra.Command {
	var asJSON bool
	var format string
	cmd := &cobra.Command{
		Use:   "inspect IMAGE|DIRECTORY... | REFERENCE | ADDRESS",
		Short: "Show what images are, and whether they would be served",
		Long: `Validates images as serve does, and shows the format, sizes, compression and backing
files of each. Backing files must be in the image's own directory. For a directory, inspect looks at
the images that serve --disk-dir would serve. In the directory of a persistent disk that is
disk.img.

For the reference of an image in a registry, inspect shows its digest, its platforms, its disks, who
has signed it, and whether serve --image streams it or fetches all of it first. It fetches little of
the image. Of one that is not streamed, it shows the first disk that it finds, which is not
verified. With --verify-key or --signature-policy, it says whether they admit the image, and looks
into no other one. For the address of a disk on a web server, it shows the digest that is known, and
the size.

Exit status 1: serve would refuse one of them; the output says why. With --json, one image is an
object, and a directory or several images are an array.`,
		Args:              imageArgs(cobra.MinimumNArgs(1)),
		ValidArgsFunction: completeImages,
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 1 && transport.IsAddress(args[0]) {
			ref, err := transport.ParseSource(args[0])
			if err != nil {
				return err
			}
			return a.inspectReference(cmd, ref, asJSON)
		}
		if ref, ok := namesImage(args); ok {
			return a.inspectReference(cmd, ref, asJSON)
		}
		return running(func(*cobra.Command, []string) error {
			return a.inspect(args, format, asJSON)
		})(cmd, args)
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	addFormatFlag(cmd, &format)
	settings.AddFlags(cmd.Flags(), new(reach).withAddresses())
	return cmd
}

// inspected is one image of several.
type inspected struct {
	Path string `json:"path"`
	image.Info
}

func (a *app) inspect(paths []string, format string, asJSON bool) error {
	if _, err := assumed("", format); err != nil {
		return err
	}
	if at := slices.IndexFunc(paths, isDirectory); at >= 0 && format != "" {
		var wrong problems.List
		wrong.Add("--"+keyFormat,
			"says what one image is, but %q is a directory: name the image in it",
			paths[at])
		return wrong.Err()
	}
	if len(paths) == 1 && !isDirectory(paths[0]) {
		return a.inspectOne(paths[0], format, asJSON)
	}
	all := []inspected{}
	refused := problems.Refusal{Verb: "would not be served"}
	for _, path := range paths {
		found, err := lookAt(path, format)
		if err != nil {
			refused.Add(err)
			continue
		}
		for _, info := range found {
			all = append(all, info)
			if !info.Servable {
				refused.Add(fmt.Errorf("%q %s", info.Path, info.Reason))
			}
		}
	}
	if err := a.printInspected(all, asJSON); err != nil {
		return err
	}
	return refused.Err()
}

func (a *app) printInspected(all []inspected, asJSON bool) error {
	if asJSON {
		return console.WriteJSON(a.stdout, all)
	}
	for i, one := range all {
		if i > 0 {
			fmt.Fprintln(a.stdout)
		}
		one.Name = one.Path
		if err := writeInfo(a.stdout, one.Info); err != nil {
			return err
		}
	}
	return nil
}

// lookAt describes an image, or all images of a directory.
func lookAt(path, format string) ([]inspected, error) {
	if !isDirectory(path) {
		info, err := inspectImage(path, format)
		return []inspected{{path, info}}, err
	}
	infos, err := image.InspectDir(path, image.Options{})
	var all []inspected
	own := instance.PersistentName + "."
	persistent := slices.ContainsFunc(infos, func(info image.Info) bool {
		return info.Name == own+"state"
	}) && instance.HasPersistent(path)
	for _, info := range infos {
		if persistent && strings.HasPrefix(info.Name, own) {
			continue // a file beside the disk, not an image
		}
		all = append(all, inspected{filepath.Join(path, info.Name), info})
	}
	return all, err
}

func (a *app) inspectOne(path, format string, asJSON bool) error {
	info, err := inspectImage(path, format)
	if err != nil {
		return err
	}
	if asJSON {
		err = console.WriteJSON(a.stdout, info)
	} else {
		err = writeInfo(a.stdout, info)
	}
	if err == nil && !info.Servable {
		err = errSilent
	}
	return err
}

func inspectImage(path, format string) (image.Info, error) {
	if err := checkSource(path); err != nil {
		return image.Info{}, err
	}
	opt, err := assumed(path, format)
	if err != nil {
		return image.Info{}, err
	}
	return image.Inspect(path, opt)
}

// addFormatFlag adds the flag that says what format an image has.
func addFormatFlag(cmd *cobra.Command, format *string) {
	cmd.Flags().StringVar(format, keyFormat, "",
		"what the image is, `raw` or qcow2: raw if a guest has written its content "+
			"(default as it was served, or else by its content)")
}

// assumed returns the options for a format that a person gave. With "", the image itself tells its
// format. An error is about usage.
func assumed(path, format string) (image.Options, error) {
	f, err := image.ParseFormat(format)
	if err != nil {
		var wrong problems.List
		wrong.Add("--"+keyFormat, "%v", err)
		return image.Options{}, wrong.Err()
	}
	return image.Options{Named: true, Formats: map[string]image.Format{filepath.Base(path): f}}, nil
}

// assumption completes "known by" for the format of an image, and says what to do if it is wrong.
func assumption(info image.Info) string {
	var text string
	switch {
	case info.FormatSource == image.SourceServed:
		text = "its mark: it was made or served raw, so a guest wrote its content"
	case info.FormatSource == image.SourceDevice:
		text = "its being a block device; --" + keyFormat + " qcow2 if no guest wrote it"
	case info.FormatSource == image.SourceTold:
		text = "--" + keyFormat
	case info.Format == image.FormatRaw:
		text = "its name, as its content is of no other format"
	default:
		text = "its content; --" + keyFormat + " raw if a guest wrote it"
	}
	if info.LooksLike != "" {
		text += fmt.Sprintf("; it looks like %s", info.LooksLike)
	}
	return text
}

// writeInfo prints the facts that apply to an image, one per line.
func writeInfo(w io.Writer, info image.Info) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	row := func(name, value string) { fmt.Fprintf(t, "%s\t%s\n", name, value) }
	row("image", strconv.Quote(info.Name))
	row("format", formatText(info.Format, info.Version))
	if info.Servable {
		row("known by", assumption(info))
		row("virtual size", console.Size(info.VirtualSize))
		row("allocated size", console.Size(info.AllocatedSize))
	}
	row("file size", console.Size(info.FileSize))
	if info.ClusterSize > 0 {
		row("cluster size", console.Size(info.ClusterSize))
	}
	if info.Servable {
		row("compression", orNone(info.Compression))
		if len(info.BackingChain) == 0 {
			row("backing file", "none")
		}
		for _, b := range info.BackingChain {
			row("backing file", fmt.Sprintf("%q, %s, %s", b.Name, formatText(b.Format, b.Version),
				console.Size(b.VirtualSize)))
		}
		row("servable", "yes")
	} else {
		row("servable", "no: it "+info.Reason)
	}
	return t.Flush()
}

func formatText(f image.Format, version int) string {
	switch {
	case f == "":
		return "unknown"
	case version > 0:
		return fmt.Sprintf("%s version %d", f, version)
	}
	return string(f)
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}
