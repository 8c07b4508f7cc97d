package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"sync/atomic"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/registry/internal/bounded"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// baseImage is the image whose layers come first, for each of its platforms.
type baseImage struct {
	source    transport.Source
	ref       transport.Reference
	platforms []basePlatform
	index     bool   // it is a list for several platforms
	digest    string // of the manifest that the reference names
}

type basePlatform struct {
	platform *v1.Platform
	manifest *v1.Manifest
	config   []byte
	disks    bool // it has disks of its own, which our index does not describe
}

// findBase reads the manifests and configurations of the base.
func (p *pusher) findBase(ctx context.Context, base string) error {
	if base == BaseNone {
		return nil
	}
	what := "base image"
	if base == p.opt.Onto.Image {
		what = "the image to push onto"
	}
	ref, err := transport.ParseReference(base)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	src, err := p.client.Source(ref, "")
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	p.base = &baseImage{source: src, ref: ref}
	if err := p.base.read(ctx); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

func (b *baseImage) read(ctx context.Context) error {
	text, mediaType, _, err := transport.Named(ctx, b.source, b.ref)
	if err != nil {
		return err
	}
	b.digest = transport.DigestOf(text)
	switch kind := transport.ManifestKind(text, mediaType); {
	case kind.IsImage():
		return b.add(ctx, text, nil)
	case !kind.IsIndex():
		return fmt.Errorf("%s is not a container image: its manifest is of the type %q",
			b.ref, kind)
	}
	b.index = true
	var index v1.IndexManifest
	err = bounded.Check(text)
	if err == nil {
		err = json.Unmarshal(text, &index)
	}
	if err != nil {
		return fmt.Errorf("the index of %s cannot be read: %w", b.ref, err)
	}
	for _, m := range index.Manifests {
		if m.Platform == nil || m.Platform.OS != "linux" || !m.MediaType.IsImage() ||
			m.Digest.Algorithm != "sha256" {
			continue // an attestation, or an image that cannot serve disks
		}
		if len(b.platforms) == 16 {
			return fmt.Errorf("%s has too many platforms", b.ref)
		}
		text, _, err := b.source.Manifest(ctx, m.Digest.String())
		if err == nil {
			err = transport.CheckDigest(text, m.Digest.String())
		}
		if err == nil {
			err = b.add(ctx, text, m.Platform)
		}
		if err != nil {
			return err
		}
	}
	if len(b.platforms) == 0 {
		return fmt.Errorf("%s has no image for Linux", b.ref)
	}
	return nil
}

// add adds one platform's image.
func (b *baseImage) add(ctx context.Context, text []byte, platform *v1.Platform) error {
	m, err := transport.ParseManifest(text)
	if err != nil {
		return err
	}
	r := &transport.Image{Source: b.source, Ref: b.ref, Manifest: m}
	config, err := r.Small(ctx, m.Config, transport.MaxManifest)
	if err != nil {
		return err
	}
	if _, err := readConfig(config, len(m.Layers)); err != nil {
		return fmt.Errorf("%s is no container image, but an artifact or the like (%w): "+
			"name another image, or store the disk as a whole", b.ref, err)
	}
	b.platforms = append(b.platforms, basePlatform{platform: platform, manifest: m, config: config})
	return nil
}

// errDisk ends reading a layer that has a disk.
var errDisk = errors.New("it has a disk")

// findDisks finds out which images of the base have visible disks of their own. Readers take an
// index for the list of all disks of the image. If it lacked some, the others would have other LUNs
// than in a container of the image.
func (p *pusher) findDisks(ctx context.Context) error {
	lists := make(map[string]*layer.List) // of layers that were read to their ends, by digest
	for i := range p.base.platforms {
		b := &p.base.platforms[i]
		shade := layer.NewShadow()
		for _, l := range p.layers {
			shade.Names[l.Name], shade.Trees[l.Name] = true, true
		}
		for n := len(b.manifest.Layers) - 1; n >= 0 && !b.disks; n-- {
			desc := b.manifest.Layers[n]
			list, err := lists[desc.Digest.String()], error(nil)
			if list == nil {
				list, err = listLayer(ctx, p.base.source, b.manifest.Layers, n, shade)
			}
			if errors.Is(err, errDisk) {
				b.disks = true
				continue
			}
			if err != nil {
				return fmt.Errorf("base image: layer %s: %w", desc.Digest, err)
			}
			lists[desc.Digest.String()] = list
			for name, e := range list.Entries {
				b.disks = b.disks || e.Kind != layer.EntryDirectory && shade.Shows(name)
			}
			if err := shade.Add(list); err != nil {
				return fmt.Errorf("base image: %w", err)
			}
		}
		if b.disks {
			p.client.Warn(fmt.Sprintf("%s has disks of its own, so the image gets no index: "+
				"serve --image fetches it before it serves it; leave these disks out of the base "+
				"and push them as files, if that takes too long", p.base.ref))
		}
	}
	return nil
}

// listLayer lists the files of a layer in the directory of the disks. If a visible one of them is
// no directory, the error is errDisk. After a visible disk it stops reading.
func listLayer(ctx context.Context, src transport.Source, layers []descriptor, i int,
	shade *layer.Shadow) (list *layer.List, err error) {
	desc := layers[i]
	switch {
	case strings.HasPrefix(string(desc.MediaType), layer.MediaDisk):
		return nil, errDisk
	case desc.MediaType == layer.MediaEmpty:
		return new(layer.List), nil
	}
	for try := 1; ; try++ {
		from, err := src.Blob(desc)
		if err != nil {
			return nil, err
		}
		list, err := listOf(ctx, from, layers, i, shade)
		if errors.Is(err, errDisk) || !from.Again(err, try) {
			return list, err
		}
	}
}

func listOf(ctx context.Context, from *transport.Blob, layers []descriptor, i int,
	shade *layer.Shadow) (_ *layer.List, err error) {
	in, err := layer.Open(ctx, from, new(atomic.Int64), 0)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(in.Explain(err), in.Close()) }()
	head, err := in.Peek()
	if err != nil {
		return nil, err
	}
	if plain, err := layer.IsPlain(from.Desc, head); err != nil {
		return nil, err
	} else if plain {
		name := layer.PlainName(layers, i, layer.DiskDir)
		if in.Format == "" && image.PassOver(name, from.Desc.Size, qcow2.IsQcow2(head)) {
			return layer.PlainContents(layers, i).List, in.Finish()
		}
		return nil, errDisk
	}
	list, err := layer.ReadTar(in, layer.DiskDir, func(e *layer.Entry, _ io.Reader) error {
		if layer.Under(layer.DiskDir, e.Name) && shade.Shows(e.Name) {
			return errDisk
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for name, e := range list.Entries {
		if e.Kind != layer.EntryDirectory && shade.Shows(name) {
			return nil, errDisk
		}
	}
	return list, in.Finish()
}

// madeImage is a manifest that is ready to be stored.
type madeImage struct {
	desc       v1.Descriptor
	text       []byte
	config     v1.Descriptor
	configText []byte
}

// madeImages is everything that a push stores in addition to layers.
type madeImages struct {
	images  []madeImage
	top     v1.Descriptor // the manifest that the tag names
	topText []byte
}

// images makes a manifest for each platform of the base. Without a base, it makes one for each
// platform on which KubeVirt's disks are used; they differ in nothing else.
func (p *pusher) images() (*madeImages, error) {
	platforms, index := []basePlatform{}, true
	if p.base != nil {
		platforms, index = p.base.platforms, p.base.index
	} else {
		for _, arch := range []string{"amd64", "arm64"} {
			config, err := json.Marshal(map[string]any{"architecture": arch, "os": "linux",
				"config": map[string]any{},
				"rootfs": map[string]any{"type": "layers", "diff_ids": []string{}}})
			if err != nil {
				return nil, err
			}
			platforms = append(platforms,
				basePlatform{platform: &v1.Platform{OS: "linux", Architecture: arch},
					manifest: &v1.Manifest{}, config: config})
		}
	}
	made := new(madeImages)
	list := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex}
	for _, base := range platforms {
		m, err := p.image(base)
		if err != nil {
			return nil, err
		}
		made.images = append(made.images, m)
		list.Manifests = append(list.Manifests, m.desc)
	}
	if !index {
		made.top, made.topText = made.images[0].desc, made.images[0].text
		return made, nil
	}
	text, err := json.Marshal(list)
	if err != nil {
		return nil, err
	}
	made.top, made.topText = blobOf(text, types.OCIImageIndex), text
	return made, nil
}

// image adds the new layers to a platform's image of the base.
func (p *pusher) image(base basePlatform) (m madeImage, err error) {
	ours := p.ours(!base.disks)
	if m.configText, err = extendConfig(base.config, ours, len(base.manifest.Layers)); err != nil {
		return m, err
	}
	m.config = blobOf(m.configText, types.OCIConfigJSON)
	manifest := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Config: m.config}
	for _, l := range base.manifest.Layers {
		l.MediaType, l.Annotations = ociType(l.MediaType), retired(l.Annotations)
		manifest.Layers = append(manifest.Layers, l)
	}
	manifest.Layers = append(manifest.Layers, ours...)
	if m.text, err = json.Marshal(manifest); err != nil {
		return m, err
	}
	m.desc = blobOf(m.text, types.OCIManifestSchema1)
	m.desc.Platform = base.platform
	return m, nil
}

// ociType is the OCI's name for a media type of docker. The bytes are the same.
func ociType(t types.MediaType) types.MediaType {
	switch t {
	case types.DockerLayer:
		return types.OCILayer
	case types.DockerUncompressedLayer:
		return types.OCIUncompressedLayer
	}
	return t
}

// imageConfig is the configuration of an image. Unknown parts of it stay as they are.
type imageConfig struct {
	all  map[string]json.RawMessage
	root struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"` // the lowest first
	}
	history []json.RawMessage // nil: there is none
}

// readConfig parses the configuration of an image with that many layers.
func readConfig(text []byte, layers int) (c imageConfig, err error) {
	if err = bounded.Check(text); err == nil {
		err = json.Unmarshal(text, &c.all)
	}
	if err == nil && c.all["rootfs"] == nil {
		err = errors.New("it has no layers")
	}
	if err == nil {
		err = json.Unmarshal(c.all["rootfs"], &c.root)
	}
	if err == nil && c.all["history"] != nil {
		err = json.Unmarshal(c.all["history"], &c.history)
	}
	if err == nil && len(c.root.DiffIDs) != layers {
		err = fmt.Errorf("it names %d layers, and the manifest %d", len(c.root.DiffIDs), layers)
	}
	if err != nil {
		err = fmt.Errorf("its configuration cannot be read: %w", err)
	}
	return c, err
}

func (c *imageConfig) text() ([]byte, error) {
	var err, err2 error
	c.all["rootfs"], err = json.Marshal(c.root)
	if c.history != nil {
		c.all["history"], err2 = json.Marshal(c.history)
	}
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}
	return json.Marshal(c.all)
}

// extendConfig adds layers, which are not compressed, to a configuration.
func extendConfig(text []byte, layers []v1.Descriptor, below int) ([]byte, error) {
	c, err := readConfig(text, below)
	if err != nil {
		return nil, err
	}
	story := c.history != nil || below == 0
	for _, l := range layers {
		c.root.DiffIDs = append(c.root.DiffIDs, l.Digest.String())
		if story {
			c.history = append(c.history, json.RawMessage(
				`{"created":"1970-01-01T00:00:00Z","created_by":"kubevirt-disk push"}`))
		}
	}
	return c.text()
}

// typeArtifact is the type of artifacts with disks.
const typeArtifact = "application/vnd.kubevirt.disk"

// made returns what is stored in addition to layers.
func (p *pusher) made() (*madeImages, error) {
	if p.opt.Artifact {
		return p.artifact()
	}
	return p.images()
}

// artifact makes the manifest of an artifact in the form of "oras push": no configuration, and a
// layer for each file with its name. The layer of the index comes last: clients of artifacts take
// the layers with a name or a known type, and leave others out.
func (p *pusher) artifact() (*madeImages, error) {
	m := madeImage{configText: []byte("{}")}
	m.config = blobOf(m.configText, layer.MediaEmpty)
	ours := p.ours(true)
	var err error
	if m.text, err = json.Marshal(v1.Manifest{SchemaVersion: 2,
		MediaType: types.OCIManifestSchema1, ArtifactType: typeArtifact, Config: m.config,
		Layers: append(slices.Clone(ours[1:]), ours[0])}); err != nil {
		return nil, err
	}
	m.desc = blobOf(m.text, types.OCIManifestSchema1)
	return &madeImages{images: []madeImage{m}, top: m.desc, topText: m.text}, nil
}

// describe gives the layer of a file the type and the names by which clients of artifacts know it.
func (p *pusher) describe(desc *v1.Descriptor, name string) {
	stem := strings.TrimSuffix(name, path.Ext(name))
	desc.Annotations = map[string]string{layer.AnnotationTitle: name, layer.AnnotationDisk: stem}
	desc.MediaType = layer.MediaDisk + "raw"
	for _, f := range p.planned {
		if path.Base(f.name) == name {
			desc.Annotations[layer.AnnotationSize] = fmt.Sprint(f.size)
			if f.qcow2 {
				desc.MediaType = layer.MediaDisk + "qcow2"
			}
		}
	}
}
