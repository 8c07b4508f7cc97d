package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"kubevirt.io/disk/disk/image"
)

// BaseNone is the base of an image that has nothing but disks, as a containerDisk of KubeVirt.
const BaseNone = "none"

// PushOptions say what is made of the files.
type PushOptions struct {
	// Base is the reference of the image whose layers come first, or BaseNone.
	Base string
	// Image limits what is accepted as an image.
	Image image.Options
	// Progress is told how far it is. May be nil.
	Progress *Progress
}

// Push stores disk images as a container image: the base image's layers, a layer with an index, and a layer
// of plain tar for each file and each of its backing files. It returns the digest of what the tag names.
//
// Every image is validated before anything is sent. The same files on the same base give the same digest, on
// every machine. What the registry has is not sent again, so that a push that was interrupted goes on when it
// is made again. The tag is set last, when everything is there.
func (c *Client) Push(ctx context.Context, files []string, ref Reference, opt PushOptions) (digest string, err error) {
	if opt.Progress == nil {
		opt.Progress = new(Progress)
	}
	if ref.remote == nil {
		return "", fmt.Errorf("%s is not in a registry: push to REGISTRY/NAME:TAG", ref)
	}
	if _, isDigest := ref.digest(); isDigest {
		return "", fmt.Errorf("%s has a digest, which is the result of a push: name a tag", ref)
	}
	p := &pusher{client: c, ref: ref, opt: opt}
	defer func() { err = errors.Join(err, p.close()) }()
	if err := p.open(files); err != nil {
		return "", err
	}
	if err := p.findBase(ctx); err != nil {
		return "", err
	}
	if err := p.index(ctx); err != nil {
		return "", err
	}
	return p.send(ctx)
}

// pusher is one Push.
type pusher struct {
	client *Client
	ref    Reference
	opt    PushOptions

	layers   []*diskLayer
	metadata map[*diskLayer][][2]int64
	base     *baseImage
	indexed  []byte // the layer of the index
}

func (p *pusher) close() (err error) {
	for _, l := range p.layers {
		err = errors.Join(err, l.file.Close())
	}
	if p.base != nil {
		err = errors.Join(err, p.base.source.Close())
	}
	return err
}

// open validates the files as serving them would, and lays out a layer for each, and for what is below it.
func (p *pusher) open(files []string) error {
	p.metadata = make(map[*diskLayer][][2]int64)
	from := make(map[string]string)
	for _, name := range files {
		img, err := image.Open(name, p.opt.Image)
		if err != nil {
			return err
		}
		info := img.Info()
		if err := img.Close(); err != nil {
			return err
		}
		reads, err := metadataOf(name, p.opt.Image)
		if err != nil {
			return err
		}
		names := []string{filepath.Base(name)}
		for _, below := range info.BackingChain {
			names = append(names, below.Name)
		}
		for _, n := range names {
			file := filepath.Join(filepath.Dir(name), n)
			inImage := path.Join(diskDir, filepath.ToSlash(n))
			switch other, there := from[inImage]; {
			case there && same(other, file):
				continue
			case there:
				return fmt.Errorf("%q and %q would have the same name in the image: rename one", other, file)
			}
			from[inImage] = file
			f, err := os.Open(file)
			if err != nil {
				return err
			}
			l, err := newDiskLayer(inImage, f)
			if err != nil {
				return errors.Join(err, f.Close())
			}
			p.layers = append(p.layers, l)
			p.metadata[l] = reads[n]
		}
	}
	// In any order of arguments the same image: LUNs are in the order of the names.
	slices.SortFunc(p.layers, func(a, b *diskLayer) int { return bytes.Compare([]byte(a.name), []byte(b.name)) })
	return nil
}

func same(a, b string) bool {
	x, err := os.Stat(a)
	y, err2 := os.Stat(b)
	return err == nil && err2 == nil && os.SameFile(x, y)
}

// index hashes every file, and makes the layer of the index.
func (p *pusher) index(ctx context.Context) error {
	for _, l := range p.layers {
		p.opt.Progress.total.Add(l.size + l.Size()) // it is read, and it is sent
	}
	x := &index{Version: indexVersion, ChunkSize: indexChunk}
	for _, l := range p.layers {
		chunks, err := l.hash(ctx, &p.opt.Progress.done)
		if err != nil {
			return fmt.Errorf("%q: %w", l.file.Name(), err)
		}
		x.Files = append(x.Files, indexFile{Name: l.name, Size: l.size, Layer: l.digest, Offset: int64(len(l.header)),
			FirstChunk: int64(len(x.chunks) / digestSize), Metadata: p.metadata[l]})
		x.chunks = append(x.chunks, chunks...)
	}
	var err error
	p.indexed, err = x.layer(p.base == nil)
	return err
}

// blobOf describes content of our own.
func blobOf(text []byte, mediaType types.MediaType) v1.Descriptor {
	h, _ := v1.NewHash(digestOf(text))
	return v1.Descriptor{MediaType: mediaType, Digest: h, Size: int64(len(text))}
}

// ours are the layers that come above those of the base.
func (p *pusher) ours() []v1.Descriptor {
	x := blobOf(p.indexed, types.OCIUncompressedLayer)
	x.Annotations = map[string]string{annotationIndex: fmt.Sprint(indexVersion)}
	all := []v1.Descriptor{x}
	for _, l := range p.layers {
		h, _ := v1.NewHash(l.digest)
		all = append(all, v1.Descriptor{MediaType: types.OCIUncompressedLayer, Digest: h, Size: l.Size()})
	}
	return all
}

// send brings everything to the registry: blobs, then manifests, the tag last.
func (p *pusher) send(ctx context.Context) (string, error) {
	endpoints, err := p.client.endpoints(p.ref.remote.Context(), false)
	if err != nil {
		return "", err
	}
	e := endpoints[0]
	u := &uploader{endpoint: e, scopes: []string{e.repo.Scope("pull,push")}, sent: &p.opt.Progress.done}
	if p.base != nil && p.base.ref.Host() == p.ref.Host() {
		u.from = p.base.ref.remote.Context().RepositoryStr()
		if u.from == e.repo.RepositoryStr() {
			u.from = ""
		} else {
			u.scopes = append(u.scopes, p.base.ref.remote.Context().Scope("pull"))
		}
	}
	made, err := p.images()
	if err != nil {
		return "", err
	}
	ours := p.ours()
	p.opt.Progress.total.Add(ours[0].Size)
	if err := u.blob(ctx, ours[0], bytes.NewReader(p.indexed)); err != nil {
		return "", err
	}
	for i, l := range p.layers {
		if err := u.blob(ctx, ours[i+1], l); err != nil {
			return "", fmt.Errorf("%q: %w", l.file.Name(), err)
		}
		if err := p.unchanged(l); err != nil {
			return "", err
		}
	}
	if p.base != nil {
		if err := p.sendBase(ctx, u); err != nil {
			return "", err
		}
	}
	for _, m := range made.images {
		if err := u.blob(ctx, m.config, bytes.NewReader(m.configText)); err != nil {
			return "", err
		}
		if err := u.manifest(ctx, m.desc.Digest.String(), string(m.desc.MediaType), m.text); err != nil {
			return "", err
		}
	}
	if err := u.manifest(ctx, p.ref.remote.Identifier(), string(made.top.MediaType), made.topText); err != nil {
		return "", err
	}
	return made.top.Digest.String(), nil
}

// unchanged fails if a file was written to while it was sent.
func (p *pusher) unchanged(l *diskLayer) error {
	info, err := l.file.Stat()
	if err == nil && info.Size() != l.size {
		err = fmt.Errorf("%q was changed while it was sent; push it again when nothing writes to it", l.file.Name())
	}
	return err
}
