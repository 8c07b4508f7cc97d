package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/signature"
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
the images that serve --disk-dir would serve. In the directory of a persistent disk, it looks only
at disk.img.

For the reference of an image in a registry, inspect shows its digest, its platforms, its disks, who
has signed it, and whether serve --image streams it or fetches all of it first. It fetches little of
the image. If the image is not streamed, it shows the first disk that it finds, which is not
verified. With --verify-key or --signature-policy, it says whether they admit the image, and looks
into the image only if they do. For the address of a disk on a web server, it shows the digest that
is known, and the size.

Exit status 1: serve would refuse an image; the output says why. With --json, one image is an
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
		ref, ok, err := namesImage(args)
		if err != nil {
			return err
		}
		if ok {
			return a.inspectReference(cmd, ref, asJSON)
		}
		for _, row := range new(reach).withAddresses() {
			if cmd.Flags().Changed(row.Key) { // the file must not seem verified
				return fmt.Errorf("--%s is for one image in a registry, as REGISTRY/NAME:TAG, and "+
					"%q is none", row.Key, args[0])
			}
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
		wrong.Add("--"+keyFormat, "says what one image is, but %q is a directory: name the "+
			"image in it", paths[at])
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
			continue // a file that is not an image
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

func addFormatFlag(cmd *cobra.Command, format *string) {
	cmd.Flags().StringVar(format, keyFormat, "", "what the image is, `raw` or qcow2: raw if a "+
		"guest has written its content (default as it was served, or else by its content)")
}

// assumed returns the options for a format that a person gave; "": the format is detected. Errors
// are about usage.
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
		row("compression", cmp.Or(info.Compression, "none"))
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

// namesImage reports whether the arguments are one reference of an image. A file with that name has
// precedence, and so has an argument that can only be a path: a registry has a dot or a port in its
// name. An error says that there is no such file, and that the argument cannot be a reference.
func namesImage(args []string) (ref transport.Reference, ok bool, err error) {
	if len(args) != 1 {
		return ref, false, nil
	}
	if _, err := os.Lstat(args[0]); err == nil {
		return ref, false, nil
	}
	host, _, more := strings.Cut(args[0], "/")
	remote := more && strings.ContainsAny(host, ".:") && !strings.HasPrefix(host, ".")
	ref, err = transport.ParseReference(args[0])
	switch {
	case err == nil:
		return ref, remote || !ref.Remote(), nil
	case remote:
		return ref, false, fmt.Errorf("there is no file %q, and %w", args[0], err)
	}
	return ref, false, nil
}

// inspectedReference is the output of inspect for an image in a registry.
type inspectedReference struct {
	Reference string `json:"reference"`
	Digest    string `json:"digest"`
	// PlatformDigest is that of this machine's image, if the reference names a list of images.
	PlatformDigest string `json:"platform_digest,omitempty"`

	MediaType string   `json:"media_type"`
	Platforms []string `json:"platforms,omitempty"` // of a list of images
	Size      int64    `json:"size,omitempty"`      // of the file at an address, bytes

	// Disks are those that a machine of this platform gets. Streamed tells whether serve streams
	// them at once. If not, Fetched gives the reason why all of the image is fetched first, and
	// Disks has only the first one found. Disks and Streamed are nil if the image is an address, or
	// is not admitted.
	Disks    []image.Info `json:"disks,omitempty"`
	Streamed *bool        `json:"streamed,omitempty"`
	Fetched  string       `json:"fetched,omitempty"`

	Signatures []signature.Found `json:"signatures"`
	// Admitted tells whether the given keys or policy admit the image. nil: none were given.
	Admitted *bool  `json:"admitted,omitempty"`
	Reason   string `json:"reason,omitempty"` // why it is not
}

func (a *app) inspectReference(cmd *cobra.Command, ref transport.Reference, asJSON bool) error {
	if cmd.Flags().Changed(keyFormat) {
		return fmt.Errorf("--%s is for files, and %q is not a file", keyFormat, ref)
	}
	var opt reach
	l := load(cmd.Flags(), opt.withAddresses())
	l.forAddress(ref)
	asked := opt.Signatures
	if asked.Enabled() && l.Problems.Err() == nil {
		if err := asked.Check(); err != nil {
			l.Problems.AddError(err)
		}
	}
	opt.Signatures = signature.Options{} // images that are refused are shown, too
	work := func(ctx context.Context, c *registry.Client) error {
		src, err := c.Source(ref, "")
		if err != nil {
			return err
		}
		defer src.Close()
		content, mediaType, _, err := transport.Named(ctx, src, ref)
		if err != nil {
			return err
		}
		found, refused, err := signature.List(ctx, src, ref, content, asked)
		if err != nil {
			return fmt.Errorf("%s: its signatures: %w", ref, err)
		}
		shown := inspectedReference{Reference: ref.String(), Digest: transport.DigestOf(content),
			MediaType:  string(transport.ManifestKind(content, mediaType)),
			Signatures: append([]signature.Found{}, found...)}
		if transport.ManifestKind(content, mediaType).IsIndex() {
			desc, err := transport.OfPlatform(content, ref)
			if err == nil { // a list can be looked at where none of its images runs
				shown.PlatformDigest = desc.Digest.String()
			}
			shown.Platforms = transport.Platforms(content)
		}
		if ref.IsAddress() {
			if err := shown.describe(content); err != nil {
				return err
			}
		}
		if asked.Enabled() {
			shown.Admitted = new(refused == nil)
		}
		if refused != nil {
			shown.Reason = refused.Error()
		} else if !ref.IsAddress() {
			err = shown.lookInside(ctx, c, ref)
		}
		if shown := a.showReference(&shown, asJSON); shown != nil || err != nil {
			return cmp.Or(shown, err)
		}
		if refused != nil || shown.unservable() {
			return errSilent
		}
		return nil
	}
	return a.withRegistryOf(cmd, l, opt, ref, work)
}

// lookInside finds the disks of the image whose digest is shown, also if its tag has moved since.
func (i *inspectedReference) lookInside(ctx context.Context, c *registry.Client,
	ref transport.Reference) (err error) {
	if ref.Remote() {
		if ref, err = transport.ParseReference(ref.RepositoryText() + "@" + i.Digest); err != nil {
			return err
		}
	}
	dir, err := flock.TemporaryDir()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dir.Remove()) }()
	inside, err := c.Inside(ctx, ref, dir.Path)
	if err != nil {
		return err
	}
	i.Disks, i.Streamed, i.Fetched = inside.Disks, new(inside.Whole == ""), inside.Whole
	return nil
}

// unservable reports whether one of the disks was opened and would be refused.
func (i *inspectedReference) unservable() bool {
	return i.Fetched == "" &&
		slices.ContainsFunc(i.Disks, func(d image.Info) bool { return !d.Servable })
}

// showInside shows the disks.
func (i *inspectedReference) showInside(row func(name, format string, args ...any)) {
	if i.Streamed == nil {
		return
	}
	for _, d := range i.Disks {
		size := "virtual size " + console.ShortSize(d.VirtualSize)
		switch {
		case i.Fetched == "" && !d.Servable:
			row("disk", "%q would not be served: %s", d.Name, d.Reason)
			continue
		case d.VirtualSize == 0:
			size = "its size is known when it is fetched"
		}
		row("disk", "%q, %s, %s", d.Name, formatText(d.Format, d.Version), size)
		for _, b := range d.BackingChain {
			row("  backing file", "%q, %s, virtual size %s", b.Name,
				formatText(b.Format, b.Version), console.ShortSize(b.VirtualSize))
		}
	}
	if i.Fetched == "" {
		row("streamed", "yes: serve --image reads it while it is fetched")
		return
	}
	if len(i.Disks) == 0 {
		row("disk", "none was found at the beginnings of its layers")
	} else {
		row("", "this is the first one; it was not verified, and there may be others")
	}
	row("streamed", "no: serve --image fetches all of it first, because %s", i.Fetched)
}

// describe shows the file at an address, of which a manifest was made.
func (i *inspectedReference) describe(manifest []byte) error {
	m, err := transport.ParseManifest(manifest)
	if err != nil {
		return err
	}
	i.Digest, i.Size, i.MediaType = transport.ContentDigest(m), m.Layers[0].Size, "a file"
	return nil
}

func (a *app) showReference(shown *inspectedReference, asJSON bool) error {
	if asJSON {
		return console.WriteJSON(a.stdout, shown)
	}
	t := tabwriter.NewWriter(a.stdout, 0, 8, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(t, "%s\t%s\n", name, console.OneLine(fmt.Sprintf(format, args...)))
	}
	row("reference", "%s", shown.Reference)
	row("digest", "%s", cmp.Or(shown.Digest, "not known before the file is fetched"))
	if shown.PlatformDigest != "" {
		row("for linux/"+runtime.GOARCH, "%s", shown.PlatformDigest)
	}
	row("type", "%s", shown.MediaType)
	if len(shown.Platforms) > 0 {
		row("platforms", "%s", strings.Join(shown.Platforms, ", "))
	}
	if shown.Size > 0 {
		row("size", "%d bytes", shown.Size)
	}
	shown.showInside(row)
	if len(shown.Signatures) == 0 {
		row("signature", "none")
	}
	for _, s := range shown.Signatures {
		key, how := cmp.Or(s.Key, "unknown key"), "verified"
		if s.Problem != "" {
			how = s.Problem
		}
		row("signature", "%s (%s): %s", key, cmp.Or(string(s.Format), "unknown format"), how)
	}
	switch {
	case shown.Admitted == nil:
		row("admitted", "not asked: give keys with --%s or --%s", keyVerifyKey, keySignaturePolicy)
	case *shown.Admitted:
		row("admitted", "yes")
	default:
		row("admitted", "no: %s", shown.Reason)
	}
	return t.Flush()
}
