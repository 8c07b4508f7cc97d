package signature

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync/atomic"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"kubevirt.io/disk/registry/internal/bounded"
	"kubevirt.io/disk/registry/transport"
)

// maxKept is how many signatures the manifest of an image's signatures may have before another one
// is added.
const maxKept = 1000

// SignNamed signs what a reference names in its registry and, if that is a list, each of its
// images, so that the list and the images are admitted by their digests. It returns the digest of
// what the reference names.
func SignNamed(ctx context.Context, c *transport.Client, ref transport.Reference,
	key *PrivateKey) (digest string, err error) {
	at, err := beside(c, ref)
	if err != nil {
		return "", err
	}
	read, name := at.Tagged, ref.Identifier()
	if want, ok := ref.Digest(); ok {
		read, name = at.Manifest, want
	}
	content, err := read(ctx, name)
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("%s does not exist: %w", ref, err)
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w", ref, err)
	}
	u, err := c.Uploader(ref, transport.Reference{}, new(atomic.Int64), "")
	if err != nil {
		return "", err
	}
	digest = transport.DigestOf(content)
	all, err := imagesOf(content)
	if err != nil {
		return "", fmt.Errorf("%s: %w", ref, err)
	}
	for _, one := range append(all, digest) {
		if err := Sign(ctx, c, u, ref, one, key); err != nil {
			return "", err
		}
	}
	return digest, nil
}

// beside is the place for signatures of an image in its own registry. No mirror is asked: its
// answer would be signed.
func beside(c *transport.Client, ref transport.Reference) (transport.Place, error) {
	if !ref.Remote() {
		return nil, fmt.Errorf("%s: only images in registries are signed", ref)
	}
	src, err := c.Source(ref, "") // of a registry, it has nothing to close
	if err != nil {
		return nil, err
	}
	places := transport.PlacesOf(src)
	return places[len(places)-1], nil
}

// imagesOf returns the digests of the images that a manifest lists: none if it is no list.
func imagesOf(content []byte) (all []string, err error) {
	if !transport.ManifestKind(content, "").IsIndex() {
		return nil, nil
	}
	images, err := transport.ImagesIn(content)
	for _, m := range images {
		if m.MediaType.IsImage() && !slices.Contains(all, m.Digest.String()) {
			all = append(all, m.Digest.String())
		}
	}
	return all, err
}

// Sign stores a signature of a manifest or an index, which the repository of ref has or will have,
// as cosign does: in the manifest with the tag sha256-HEX.sig, in addition to existing signatures.
// A valid one by the same key stays. If another program signs the same image at the same time, one
// of the two signatures may be lost.
func Sign(ctx context.Context, c *transport.Client, u *transport.Uploader,
	ref transport.Reference, digest string, key *PrivateKey) error {
	at, err := beside(c, ref)
	if err != nil {
		return err
	}
	m, layers, err := stored(ctx, at, digest)
	if err != nil {
		return fmt.Errorf("the signatures of %s in its registry: %w", digest, err)
	}
	var p payload
	p.Critical.Identity.Reference = ref.RepositoryText()
	p.Critical.Image.Digest = digest
	p.Critical.Type = typeCosign
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	layer := descriptor(text, mediaSimple)
	for _, l := range m.Layers {
		sig, err := signatureOf(l.Annotations[annotationSignature])
		if err == nil && l.Digest == layer.Digest && key.signed(text, sig) {
			return u.Blob(ctx, layer, bytes.NewReader(text)) // somebody may have removed it
		}
	}
	sig, err := key.sign(text)
	if err != nil {
		return fmt.Errorf("signing: %w", err)
	}
	layer.Annotations = map[string]string{
		annotationSignature: base64.StdEncoding.EncodeToString(sig)}
	m.Layers, layers = append(m.Layers, layer), append(layers, layer.Digest)
	return store(ctx, u, digest, m, layers, layer, text)
}

// stored reads the manifest of the signatures, and the layers in its configuration. Both are empty
// if there is none.
func stored(ctx context.Context, at transport.Place, digest string) (*v1.Manifest, []v1.Hash,
	error) {
	m := &v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1}
	text, err := at.Tagged(ctx, sigTag(digest))
	if errors.Is(err, fs.ErrNotExist) {
		return m, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	if m, err = transport.ParseManifest(text); err != nil {
		return nil, nil, err
	}
	if len(m.Layers) >= maxKept {
		return nil, nil, fmt.Errorf("there are %d of them already, and no more than %d are "+
			"kept: remove the tag %s to begin anew", len(m.Layers), maxKept, sigTag(digest))
	}
	var layers []v1.Hash
	for _, l := range m.Layers {
		layers = append(layers, l.Digest)
	}
	return m, layers, nil
}

// store sends the payload, the configuration and the manifest.
func store(ctx context.Context, u *transport.Uploader, digest string, m *v1.Manifest,
	layers []v1.Hash, layer v1.Descriptor, text []byte) error {
	config, err := json.Marshal(v1.ConfigFile{
		RootFS: v1.RootFS{Type: "layers", DiffIDs: layers}})
	if err != nil {
		return err
	}
	m.Config = descriptor(config, types.OCIConfigJSON)
	made, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if err := bounded.Check(made); err != nil {
		return err
	}
	plain := layer
	plain.Annotations = nil
	if err := u.Blob(ctx, plain, bytes.NewReader(text)); err != nil {
		return err
	}
	if err := u.Blob(ctx, m.Config, bytes.NewReader(config)); err != nil {
		return err
	}
	return u.Manifest(ctx, sigTag(digest), string(m.MediaType), made)
}

func descriptor(text []byte, mediaType types.MediaType) v1.Descriptor {
	h, _ := v1.NewHash(transport.DigestOf(text))
	return v1.Descriptor{MediaType: mediaType, Digest: h, Size: int64(len(text))}
}
