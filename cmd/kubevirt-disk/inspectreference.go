package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

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

	MediaType  string            `json:"media_type"`
	Size       int64             `json:"size,omitempty"` // of the file at an address, bytes
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
		}
		if err := a.showReference(&shown, asJSON); err != nil || refused == nil {
			return err
		}
		return errSilent
	}
	return a.withRegistryOf(cmd, l, opt, ref, work)
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
	if shown.Size > 0 {
		row("size", "%d bytes", shown.Size)
	}
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
