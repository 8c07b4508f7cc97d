package registry

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/signature"
	"kubevirt.io/disk/registry/transport"
)

// BaseNone is the base of an image that has only disks, like a containerDisk of KubeVirt.
const BaseNone = "none"

// PushOptions say how to make the image.
type PushOptions struct {
	// Base is the reference of the image whose layers come first, or BaseNone.
	Base string
	// Onto is another version of the disk. The new image then has the layers of that version, and a
	// layer with the differences. If nothing is the same, the disk is pushed onto Base.
	Onto Onto
	// Artifact stores the files as an artifact and not as a container image: each is a layer as it
	// is. Base and Onto must not be set.
	Artifact bool
	// Compress says how to store files other than raw ones that are not compressed, as qcow2, by
	// way of a temporary file. CompressRaw is the same for raw files. "": as they are.
	Compress, CompressRaw qcow2.Compression
	// Boot is the order of guests' first reads of these disks. It is stored with the image, and
	// these blocks are fetched first whenever the image is served from the registry. nil: unknown.
	Boot *BootOrder
	// Open replaces image.Open for the files. They are stored as new qcow2 files. May be nil.
	Open func(name string) (*image.Image, error)
	// Image limits what is accepted as an image.
	Image image.Options
	// UnpackMemory is how far back compressed files may refer: see unpack.Options. Bytes.
	UnpackMemory int64
	// Uploads is a directory for notes on unfinished uploads. With them, a repeated push goes on
	// inside a blob. It is made if it is missing. "": only complete blobs are not sent again.
	Uploads string
	// Sign signs the image, before its tag names it. nil: it is not signed.
	Sign *signature.PrivateKey
	// Progress notes how far the push is. May be nil.
	Progress *Progress
}

// Push stores disk images as a container image: the layers of the base image, a layer with an
// index, and a layer of plain tar for each file and each of its backing files. It returns the
// digest that the tag names.
//
// Every image is validated before anything is sent. The same files on the same base give the same
// digest, on every machine. Blobs that the registry has are not sent again, so an interrupted push
// goes on when it is repeated. The tag is set last, when everything is there.
func (c *Client) Push(ctx context.Context, files []string, ref transport.Reference,
	opt PushOptions) (digest string, err error) {
	opt.Progress = cmp.Or(opt.Progress, new(Progress))
	if !ref.Remote() {
		return "", fmt.Errorf("%s is not in a registry: images are only stored there, as "+
			"REGISTRY/NAME:TAG", ref)
	}
	if _, isDigest := ref.Digest(); isDigest {
		return "", fmt.Errorf("%s has a digest, which is the result of a push: name a tag", ref)
	}
	if opt.Artifact {
		opt.Base = BaseNone
	}
	p := &pusher{client: c, ref: ref, opt: opt}
	defer func() { err = errors.Join(err, p.close()) }()
	if err := p.validate(ctx, files); err != nil {
		return "", err
	}
	onto := opt.Onto.Image != ""
	if onto {
		var err error
		if onto, err = p.onto(ctx); err != nil {
			return "", err
		}
	}
	if !onto {
		if err := p.whole(ctx); err != nil {
			return "", err
		}
	}
	if err := p.index(ctx); err != nil {
		return "", err
	}
	return p.send(ctx)
}

// whole lays out the layers of an image with all of the files.
func (p *pusher) whole(ctx context.Context) error {
	for _, f := range p.planned {
		if f.compress != "" {
			p.opt.Progress.total.Add(f.data)
		}
	}
	if err := p.findBase(ctx, p.opt.Base); err != nil {
		return err
	}
	if err := p.prepare(ctx); err != nil {
		return err
	}
	if p.base != nil {
		return p.findDisks(ctx)
	}
	return nil
}

type pusher struct {
	client *Client
	ref    transport.Reference
	opt    PushOptions

	planned []planned
	wrapped map[string]unwrapped // by path
	layers  []*layer.Disk
	needs   map[*layer.Disk]needs
	base    *baseImage
	old     *oldDisk // nil: the new image is not pushed onto another version of its disk
	indexed []byte   // the layer of the index
}

func (p *pusher) close() (err error) {
	for _, l := range p.layers {
		err = errors.Join(err, l.File.Close())
	}
	for _, u := range p.wrapped {
		err = errors.Join(err, u.file.Close())
	}
	err = errors.Join(err, p.old.close())
	if p.base != nil {
		err = errors.Join(err, p.base.source.Close())
	}
	return err
}

// planned is a validated file.
type planned struct {
	path     string
	name     string   // in the image; without disk/
	below    []string // its backing files, relative to its own place
	compress qcow2.Compression
	data     int64 // stored bytes
	size     int64 // of the disk, bytes
	qcow2    bool  // it is stored as qcow2
	boot     []BootRun
}

// validate checks the files as serving them would, and decides how to store each.
func (p *pusher) validate(ctx context.Context, files []string) error {
	for _, file := range files {
		img, err := p.open(file)
		if err != nil {
			img, err = p.unwrap(ctx, file, err)
		}
		if err != nil {
			return err
		}
		info := img.Info()
		if err := img.Close(); err != nil {
			return err
		}
		f := planned{path: file, name: p.nameOf(file), data: info.AllocatedSize,
			size: info.VirtualSize}
		if info.Compression == "" {
			f.compress = p.opt.Compress
		}
		// Such a file is never served unchanged.
		foreign := image.IsForeign(info.Format) || info.LooksLike != ""
		if info.Format == image.FormatRaw || foreign {
			f.compress = cmp.Or(f.compress, p.opt.CompressRaw)
		}
		if p.opt.Open != nil || foreign {
			f.compress = cmp.Or(f.compress, qcow2.CompressionNone)
		}
		f.qcow2 = f.compress != "" || info.Format == image.FormatQcow2
		if f.compress != "" {
			f.name = strings.TrimSuffix(f.name, path.Ext(f.name)) + ".qcow2"
		} else {
			if len(info.BackingChain) > 0 && p.opt.Artifact {
				return fmt.Errorf("%q needs the backing file %q, and a file of an artifact stands "+
					"alone: flatten it with \"kubevirt-disk convert\", or push it without "+
					"--artifact", file, info.BackingChain[0].Name)
			}
			for _, below := range info.BackingChain {
				f.below = append(f.below, below.Name)
			}
		}
		p.planned = append(p.planned, f)
	}
	if err := p.checkNames(); err != nil {
		return err
	}
	return p.matchBoot()
}

func (p *pusher) open(file string) (*image.Image, error) {
	if p.opt.Open != nil {
		return p.opt.Open(file)
	}
	if u, ok := p.wrapped[file]; ok {
		return image.OpenUnnamed(context.Background(), u.name, u.file, p.opt.Image)
	}
	return image.Open(file, p.opt.Image)
}

// checkNames refuses two different files of one name, one file that is named twice, and names that
// an index cannot have. But the backing file of another file may be named, too.
func (p *pusher) checkNames() error {
	from, named := make(map[string]string), make(map[string]bool)
	for _, f := range p.planned {
		if other := from[f.name]; named[f.name] && sameFile(other, f.path) {
			return fmt.Errorf("%q is named twice: leave one out", f.path)
		}
		named[f.name] = true
		names, files := []string{f.name}, []string{f.path}
		for _, below := range f.below {
			names, files = append(names,
				below), append(files, filepath.Join(filepath.Dir(f.path), below))
		}
		for i, name := range names {
			if !utf8.ValidString(name) {
				return fmt.Errorf("%q is no UTF-8, and could not be served: rename it", name)
			}
			if other, there := from[name]; there && !sameFile(other, files[i]) {
				return fmt.Errorf("%q and %q would have the same name in the image: rename one",
					other, files[i])
			}
			from[name] = files[i]
		}
	}
	return nil
}

// prepare compresses files where needed, and lays out a layer for each file and each of its backing
// files.
func (p *pusher) prepare(ctx context.Context) error {
	p.needs = make(map[*layer.Disk]needs)
	there := make(map[string]bool)
	for _, f := range p.planned { // another file may need it, too
		there[f.name] = f.compress != ""
	}
	add := func(name string, f *os.File, n needs) error {
		lay := layer.NewDisk
		if p.opt.Artifact {
			lay = layer.NewFile
		}
		l, err := lay(path.Join(layer.DiskDir, filepath.ToSlash(name)), f)
		if err != nil {
			return errors.Join(err, f.Close())
		}
		p.layers = append(p.layers, l)
		p.needs[l] = n
		return nil
	}
	for _, f := range p.planned {
		if f.compress != "" {
			made, err := p.compressed(ctx, f)
			if err != nil {
				return err
			}
			// By its descriptor, because it has no name.
			again := func(string) (image.Source, error) {
				return sourceOf(osfile.Reopen(made))
			}
			all, err := needsOf(ctx, f.name, image.Options{}, f.boot, again)
			if err != nil {
				return errors.Join(err, made.Close())
			}
			if err := add(f.name, made, all[f.name]); err != nil {
				return err
			}
			continue
		}
		if u, ok := p.wrapped[f.path]; ok {
			if !there[f.name] {
				if err := p.addUnwrapped(ctx, f, u, add); err != nil {
					return err
				}
			}
			there[f.name] = true
			continue
		}
		if len(f.below) > maxChain {
			return fmt.Errorf("%q has more than %d backing files, and could not be pulled: "+
				"flatten it with \"kubevirt-disk convert\"", f.path, maxChain)
		}
		root, err := osfile.OpenRoot(filepath.Dir(f.path))
		if err != nil {
			return err
		}
		all, err := needsOf(ctx, f.name, p.opt.Image, f.boot,
			func(name string) (image.Source, error) {
				return sourceOf(osfile.OpenRegularIn(root, name))
			})
		for _, name := range append([]string{f.name}, f.below...) {
			if there[name] || err != nil {
				continue
			}
			there[name] = true
			var file *os.File
			if file, err = osfile.OpenRegularIn(root, name); err == nil {
				err = add(name, file, all[name])
			}
		}
		if err = errors.Join(err, root.Close()); err != nil {
			return err
		}
	}
	// The order of the arguments must not change the image: LUNs are in the order of the names.
	slices.SortFunc(p.layers, func(a, b *layer.Disk) int { return strings.Compare(a.Name, b.Name) })
	return nil
}

// compressed stores an image as a compressed one, in a file without a name.
func (p *pusher) compressed(ctx context.Context, f planned) (*os.File, error) {
	img, err := p.open(f.path)
	if err != nil {
		return nil, err
	}
	defer img.Close()
	to, err := nameless()
	if err != nil {
		return nil, err
	}
	progress := new(image.Progress)
	p.opt.Progress.making.Store(progress)
	_, err = image.Store(ctx, img, to, f.compress, progress)
	p.opt.Progress.making.Store(nil)
	p.opt.Progress.done.Add(f.data)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("compressing %q into %q: %w", f.path, os.TempDir(), err),
			to.Close())
	}
	return to, nil
}

func sameFile(a, b string) bool {
	x, err := os.Stat(a)
	y, err2 := os.Stat(b)
	return err == nil && err2 == nil && os.SameFile(x, y)
}

// index hashes every file, and makes the layer of the index.
func (p *pusher) index(ctx context.Context) error {
	for _, l := range p.layers {
		p.opt.Progress.total.Add(l.Length + l.Size()) // it is read, and it is sent
	}
	all, err := p.old.indexed(ctx, p.base)
	if err != nil {
		return err
	}
	for _, l := range p.layers {
		chunks, err := l.Hash(ctx, &p.opt.Progress.done)
		if err != nil {
			return fmt.Errorf("%q: %w", l.File.Name(), err)
		}
		all = append(all, indexedFile{
			entry: layer.IndexFile{Name: l.Name, Size: l.Length, Layer: l.Digest,
				Offset: int64(len(l.Header)), Metadata: p.needs[l].metadata,
				Boot: p.needs[l].boot},
			digests: layer.SectionOf(chunks), from: l.File})
	}
	x, err := newIndex(ctx, all)
	if err != nil {
		return err
	}
	p.indexed, err = x.Layer(p.base == nil)
	return err
}

// blobOf describes a blob that this program makes.
func blobOf(text []byte, mediaType types.MediaType) v1.Descriptor {
	h, _ := v1.NewHash(transport.DigestOf(text))
	return v1.Descriptor{MediaType: mediaType, Digest: h, Size: int64(len(text))}
}

// ours are the layers above those of the base. all says that the index describes all disks of the
// image.
func (p *pusher) ours(all bool) []v1.Descriptor {
	x := blobOf(p.indexed, types.OCIUncompressedLayer)
	if all {
		x.Annotations = map[string]string{layer.AnnotationIndex: fmt.Sprint(layer.IndexVersion)}
	}
	list := []v1.Descriptor{x}
	for _, l := range p.layers {
		h, _ := v1.NewHash(l.Digest)
		desc := v1.Descriptor{MediaType: types.OCIUncompressedLayer, Digest: h, Size: l.Size()}
		if p.opt.Artifact {
			p.describe(&desc, path.Base(l.Name))
		}
		list = append(list, desc)
	}
	return list
}

// send brings everything to the registry: blobs, then manifests, the tag last.
func (p *pusher) send(ctx context.Context) (string, error) {
	var from transport.Reference // none
	if p.base != nil {
		from = p.base.ref
	}
	u, err := p.client.Uploader(p.ref, from, &p.opt.Progress.done, p.opt.Uploads)
	if err != nil {
		return "", err
	}
	made, err := p.made()
	if err != nil {
		return "", err
	}
	ours := p.ours(true)
	p.opt.Progress.total.Add(ours[0].Size)
	for _, m := range made.images {
		p.opt.Progress.total.Add(m.config.Size)
		p.opt.Progress.stored.Add(m.config.Size)
	}
	for _, l := range ours {
		p.opt.Progress.stored.Add(l.Size)
	}
	if err := u.Blob(ctx, ours[0], bytes.NewReader(p.indexed)); err != nil {
		return "", err
	}
	for i, l := range p.layers {
		err := u.Blob(ctx, ours[i+1], l)
		// The registry may only have seen that the digest is wrong.
		if changed := unchanged(l); changed != nil && ctx.Err() == nil {
			return "", changed
		}
		if err != nil {
			return "", fmt.Errorf("%q: %w", l.File.Name(), err)
		}
	}
	if p.base != nil {
		if err := p.sendBase(ctx, u); err != nil {
			return "", err
		}
	}
	for _, m := range made.images {
		if err := u.Blob(ctx, m.config, bytes.NewReader(m.configText)); err != nil {
			return "", err
		}
		digest := m.desc.Digest.String()
		if err := u.Manifest(ctx, digest, string(m.desc.MediaType), m.text); err != nil {
			return "", err
		}
	}
	// Before the tag is set: a client that requires signatures must not find the image without one.
	if p.opt.Sign != nil {
		if err := p.sign(ctx, u, made); err != nil {
			return "", err
		}
	}
	tag := p.ref.Identifier()
	if err := u.Manifest(ctx, tag, string(made.top.MediaType), made.topText); err != nil {
		return "", err
	}
	return made.top.Digest.String(), nil
}

// sign signs what the tag will name. If that is a list, each of its images is signed, too, as
// "cosign sign --recursive" does: nothing leads from an image to the lists that have it, so an
// image named by its own digest needs a signature of its own.
func (p *pusher) sign(ctx context.Context, u *transport.Uploader, made *madeImages) error {
	all := []string{made.top.Digest.String()}
	for _, m := range made.images {
		if digest := m.desc.Digest.String(); !slices.Contains(all, digest) {
			all = append(all, digest)
		}
	}
	for _, digest := range all {
		if err := signature.Sign(ctx, p.client.Client, u, p.ref, digest, p.opt.Sign); err != nil {
			return err
		}
	}
	return nil
}

// unchanged fails if a file was written to since its layer was laid out.
func unchanged(l *layer.Disk) error {
	info, err := l.File.Stat()
	if err == nil && (info.Size() != l.Length || !info.ModTime().Equal(l.Changed)) {
		err = fmt.Errorf("%q was changed while it was sent; push it again when nothing writes to "+
			"it", l.File.Name())
	}
	return err
}
