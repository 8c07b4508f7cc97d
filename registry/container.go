package registry

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"kubevirt.io/disk/registry/internal/bounded"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// Container is a whole container image: its configuration, and layers that can be read one after
// the other. Close ends its use.
type Container struct {
	image  *transport.Image
	config []byte
	layers []ContainerLayer
}

// ContainerLayer is a layer of a container image.
type ContainerLayer struct {
	Digest string // of the blob
	DiffID string // of the tar archive in it, which may be compressed
	Size   int64  // of the blob, bytes
}

// Container reads the manifest and the configuration of a container image. If the image is a list
// for several platforms, it takes this machine's. It reads no layer yet.
//
// keepDir is a directory that lives as long as the disk made from the image, like that of
// StreamOptions. A tag is resolved once, and files that are kept there are not requested again. "":
// there is none.
func (c *Client) Container(ctx context.Context, ref transport.Reference, keepDir string) (
	*Container, error) {
	src, err := c.Source(ref, "")
	if err != nil {
		return nil, err
	}
	image := new(Container)
	if keepDir == "" {
		image.image, err = transport.Resolve(ctx, src, ref)
	} else {
		src, err = image.resolveKept(ctx, c.Gated(), src, ref, keepDir)
	}
	if err != nil {
		return nil, errors.Join(err, src.Close())
	}
	if err := image.readConfig(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", ref, err), image.Close())
	}
	return image, nil
}

// resolveKept reads the manifest that the reference named at first, and returns the source to read
// from.
func (c *Container) resolveKept(ctx context.Context, gated bool, src transport.Source,
	ref transport.Reference, dir string) (transport.Source, error) {
	kept, err := newKeptSource(src, dir)
	if err != nil {
		return src, err
	}
	r, err := kept.loadRecord(ref)
	if err != nil {
		return kept, err
	}
	if c.image, err = kept.resolve(ctx, gated, ref, r); err != nil || r.Digest != "" {
		return kept, err
	}
	return kept, kept.saveRecord(record{Reference: ref.String(), Digest: c.image.Digest,
		Named: c.image.Named})
}

// readConfig reads the configuration, and its list of layers.
func (c *Container) readConfig(ctx context.Context) (err error) {
	m := c.image.Manifest
	if c.config, err = c.image.Small(ctx, m.Config, transport.MaxManifest); err != nil {
		return fmt.Errorf("its configuration: %w", err)
	}
	if kept, ok := c.image.Source.(*keptSource); ok {
		if err := kept.saveBlob(m.Config, bytes.NewReader(c.config)); err != nil {
			return err
		}
	}
	var config v1.ConfigFile
	if err = bounded.Check(c.config); err == nil {
		err = json.Unmarshal(c.config, &config)
	}
	if err != nil {
		return fmt.Errorf("its configuration cannot be read: %w", err)
	}
	if config.OS != "" && config.OS != "linux" {
		return fmt.Errorf("it is made for %q, not for linux", config.OS)
	}
	diffIDs := config.RootFS.DiffIDs
	if len(diffIDs) != len(m.Layers) {
		return fmt.Errorf("it has %d layers, and its configuration names %d: it is not a "+
			"container image, or it is damaged", len(m.Layers), len(diffIDs))
	}
	for i, desc := range m.Layers {
		if diffIDs[i].Algorithm != "sha256" {
			return fmt.Errorf("its configuration names the layer %q: only sha256 is supported",
				diffIDs[i])
		}
		c.layers = append(c.layers, ContainerLayer{Digest: desc.Digest.String(),
			DiffID: diffIDs[i].String(), Size: desc.Size})
	}
	return nil
}

// Digests returns the digest of what the reference names and, if that is a list, the digest of this
// machine's image in it; otherwise platform is "".
func (c *Container) Digests() (digest, platform string) {
	return c.image.Named, c.image.Platform()
}

// SignedBy is the fingerprint of the key that has signed the image. "": no signature was required.
func (c *Container) SignedBy() string { return c.image.Admitted.Key }

// Config is the configuration: the JSON whose digest the manifest has.
func (c *Container) Config() []byte { return c.config }

// Layers are the layers, the lowest first.
func (c *Container) Layers() []ContainerLayer { return c.layers }

// Again reports whether reading layers again after an error may help: a mirror that has sent wrong
// content is asked last from then on.
func (c *Container) Again(err error, tries int) bool {
	if !errors.As(err, new(*transport.DigestError)) {
		return false
	}
	b, bad := c.image.Source.Blob(c.image.Manifest.Layers[0])
	return bad == nil && b.Again(err, tries)
}

// Close ends reading. The caller has closed all layers before.
func (c *Container) Close() error { return c.image.Source.Close() }

// OpenLayer reads the tar archive of a layer. It ends with io.EOF only if the layer has the digest
// in the manifest, and the archive has the one in the configuration. p counts the bytes read of the
// blob, and may be nil.
func (c *Container) OpenLayer(ctx context.Context, i int, p *Progress) (io.ReadCloser, error) {
	p = cmp.Or(p, new(Progress))
	b, err := c.image.Source.Blob(c.image.Manifest.Layers[i])
	if err != nil {
		return nil, err
	}
	in, err := layer.Open(ctx, b, &p.done, 0)
	if err != nil {
		return nil, err
	}
	r := &tarReader{layer: in, want: c.layers[i].DiffID}
	if r.want != c.layers[i].Digest || in.Format != "" { // else the digest of the blob is enough
		r.hash = sha256.New()
	}
	// Decompressing and hashing run while the caller works on the content.
	return layer.NewReadAhead(r), nil
}

// tarReader reads the archive in a layer, and checks its digest at the end.
type tarReader struct {
	layer *layer.Reader
	hash  hash.Hash // nil: there is nothing to check
	want  string
}

func (r *tarReader) Read(p []byte) (int, error) {
	n, err := r.layer.Read(p)
	if r.hash != nil {
		r.hash.Write(p[:n])
	}
	if err == io.EOF {
		if rest := r.layer.Finish(); rest != nil {
			err = rest
		} else if r.hash != nil {
			if got := transport.DigestIn(r.hash); got != r.want {
				err = &transport.DigestError{Want: r.want, Got: got}
			}
		}
	}
	if err != nil && err != io.EOF {
		err = r.layer.Explain(err)
	}
	return n, err
}

func (r *tarReader) Close() error { return r.layer.Close() }
