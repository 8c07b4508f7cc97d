package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/signature"
	"kubevirt.io/disk/registry/transport"
)

// namesImage reports whether the arguments are one reference of an image. A file of that name comes
// first, and so does what can only be a path: a registry has a dot or a port in its name.
func namesImage(args []string) (ref transport.Reference, ok bool) {
	if len(args) != 1 {
		return ref, false
	}
	if _, err := os.Lstat(args[0]); err == nil {
		return ref, false
	}
	ref, err := transport.ParseReference(args[0])
	if err != nil {
		return ref, false
	}
	host, _, more := strings.Cut(args[0], "/")
	remote := more && strings.ContainsAny(host, ".:") && !strings.HasPrefix(host, ".")
	return ref, remote || !ref.Remote()
}

// inspectedReference is what inspect shows of an image in a registry.
type inspectedReference struct {
	Reference string `json:"reference"`
	Digest    string `json:"digest"`
	// PlatformDigest is that of this machine's image, if the reference names a list of images.
	PlatformDigest string `json:"platform_digest,omitempty"`

	MediaType string   `json:"media_type"`
	Platforms []string `json:"platforms,omitempty"` // of a list of images
	Size      int64    `json:"size,omitempty"`      // of the file at an address, bytes

	// Disks are those that a machine of this platform gets. Streamed says whether serve streams
	// them at once. If not, Fetched says why it fetches all of the image first, and there is only
	// the disk that was found first. nil and nil: the image is an address, or is not admitted.
	Disks    []image.Info `json:"disks,omitempty"`
	Streamed *bool        `json:"streamed,omitempty"`
	Fetched  string       `json:"fetched,omitempty"`

	Signatures []signature.Found `json:"signatures"`
	// Admitted says whether the given keys or policy admit the image. nil: none were given.
	Admitted *bool  `json:"admitted,omitempty"`
	Reason   string `json:"reason,omitempty"` // why it is not
}

func (a *app) inspectReference(cmd *cobra.Command, ref transport.Reference, asJSON bool) error {
	var opt reach
	l := load(cmd.Flags(), opt.withAddresses())
	asked := opt.Signatures
	if asked.Enabled() && l.Problems.Err() == nil {
		if err := asked.Check(); err != nil {
			l.Problems.AddError(err)
		}
	}
	opt.Signatures = signature.Options{} // what is refused is shown, too
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
		found, refused, err := signature.List(ctx, c.Client, ref, content, asked)
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
			admitted := refused == nil
			shown.Admitted = &admitted
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
	dir, err := os.MkdirTemp("", "kubevirt-disk-inspect-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	inside, err := c.Inside(ctx, ref, dir)
	if err != nil {
		return err
	}
	streamed := inside.Whole == ""
	i.Disks, i.Streamed, i.Fetched = inside.Disks, &streamed, inside.Whole
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
