package registry

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/disk/unpack"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// PullOptions are the options of Pull. The zero value works.
type PullOptions struct {
	// Path is the file to fetch: a name in /disk, or a path in the image. "": the only disk, or all
	// disks into a directory.
	Path string
	// Original keeps the file as it is. Otherwise it becomes a raw disk.
	Original bool
	// Replace replaces an existing file. The new file is on storage then.
	Replace bool
	// Size is the smallest size of the raw disk in a file, in bytes.
	Size int64
	// Image limits what is accepted as an image.
	Image image.Options
	// UnpackMemory is how far back compressed data may refer: see unpack.Options. Bytes.
	UnpackMemory int64
	// Progress notes how far the pull is. May be nil.
	Progress *Progress
	// Stdout is the destination "-".
	Stdout io.Writer
}

// Pulled is a disk that was fetched.
type Pulled struct {
	Name   string // in the image
	To     string
	Format image.Format // of the file in the image
	Size   int64        // of the disk, bytes
	// Platform is the digest of this machine's image in a list. "": the reference named no list.
	Platform string
}

// Pull fetches the disks of an image, and returns them with the digest of what the reference names:
// an image, a list of images for several platforms, or the file at an address. dest is a file, a
// block device, a directory for any number of disks, or "-". A file under its final name is
// complete and has the digest in the manifest. For a block device and standard output, only the
// error says whether that is so. Each layer is read once if the disk needs one pass: see
// image.Arrival.
func (c *Client) Pull(ctx context.Context, ref transport.Reference, dest string,
	opt PullOptions) (done []Pulled, digest string, err error) {
	if err := writable(dest, opt.Replace); err != nil {
		return nil, "", err
	}
	r, err := c.Resolve(ctx, ref)
	if err != nil {
		return nil, "", err
	}
	defer r.Source.Close()
	p := newPuller(r, dest, opt)
	if err := p.prepare(); err != nil {
		return nil, r.Named, err
	}
	done, err = p.run(ctx)
	return done, r.Content(), err
}

type puller struct {
	opt    PullOptions
	image  *transport.Image
	dest   string
	many   bool   // dest is a directory
	dir    string // of the disks in the image
	path   string // of the wanted disk; "": any
	shadow *layer.Shadow
	files  []*file
	lone   []*file // disks in archives that are no layers: see loneFile
	// names are the disks of the files that were begun in a directory
	names map[string]string
	index *layer.Index // describes the files; nil: there is none
	// create begins a file. nil: the destination is a path.
	create func(name string) (*image.Destination, error)
}

func newPuller(r *transport.Image, dest string, opt PullOptions) *puller {
	opt.Progress = cmp.Or(opt.Progress, new(Progress))
	return &puller{opt: opt, image: r, dest: dest, dir: layer.DiskDir, shadow: layer.NewShadow(),
		names: make(map[string]string)}
}

// file is a visible file of the image.
type file struct {
	name    string
	layer   int            // its index in the manifest
	ordinal int            // of the tar entry that has its content; -1: the whole layer is the file
	size    int64          // bytes; -1: not known
	refused string         // its kind, if it is no file
	packed  []image.Format // how its content is compressed, the outermost first
	isQcow2 bool
	foreign bool   // an image that image.Options.Foreign accepts
	backing string // its backing file
	below   int    // how many files it needs below it, as far as is known
	passed  bool   // it need not be a disk

	// The files that are written while the layer is read.
	to      *image.Destination
	arrival *image.Arrival
	label   string // the name of to in messages
}

// drop removes the written part of the file.
func (p *puller) drop(f *file) error {
	if f.to == nil {
		return nil
	}
	to := f.to
	delete(p.names, f.label)
	f.to, f.arrival = nil, nil
	if err := to.Finish(errDropped); !errors.Is(err, errDropped) {
		return err
	}
	return nil
}

var errDropped = errors.New("not wanted after all")

// prepare checks the options and the destination.
func (p *puller) prepare() error {
	if p.opt.Path != "" {
		p.path = strings.TrimPrefix(path.Clean("/"+p.opt.Path), "/")
		if !strings.Contains(strings.Trim(p.opt.Path, "/"), "/") {
			p.path = path.Join(layer.DiskDir, p.path)
		}
		p.dir = path.Dir(p.path)
	}
	if p.dest == "-" {
		return nil
	}
	info, err := os.Stat(p.dest)
	switch {
	case err == nil:
		p.many = info.IsDir()
	case !errors.Is(err, fs.ErrNotExist):
		return err
	case strings.HasSuffix(p.dest, "/"):
		return fmt.Errorf("there is no directory %q: make it first", p.dest)
	}
	return nil
}

func (p *puller) run(ctx context.Context) (done []Pulled, err error) {
	defer func() {
		for _, f := range slices.Concat(p.files, p.lone) {
			err = errors.Join(err, p.drop(f))
		}
		err = errors.Join(err, p.index.Close())
	}()
	layers := p.image.Manifest.Layers
	if len(layers) == 0 {
		return nil, fmt.Errorf("%s has no layers", p.image.Ref)
	}
	for _, l := range layers {
		p.opt.Progress.total.Add(l.Size)
	}
	if err := p.readIndex(ctx); err != nil {
		return nil, err
	}
	if err := p.scan(ctx); err != nil {
		return nil, err
	}
	if err := p.agreed(); err != nil {
		return nil, err
	}
	if err := p.takeLone(); err != nil {
		return nil, err
	}
	chosen, err := p.choose()
	if err != nil {
		return nil, err
	}
	for _, f := range chosen {
		if p.dest == "-" {
			return p.stdout(ctx, f)
		}
		if err := p.complete(ctx, f); err != nil {
			return nil, fmt.Errorf("%s of %s: %w", f.name, p.image.Ref, err)
		}
	}
	// Only now: either all disks get their names, or none does.
	for _, f := range chosen {
		if err := f.to.Grow(p.opt.Size); err != nil {
			return done, err
		}
		to := f.to
		f.to = nil
		if err := to.Finish(nil); err != nil {
			return done, err
		}
		done = append(done, Pulled{Name: f.name, To: f.label, Format: f.arrival.Format(),
			Size: f.arrival.VirtualSize(), Platform: p.image.Platform()})
	}
	return done, nil
}

// scan reads the layers from the top until everything is known. If the index of the image says
// which layer has the wanted file, only that layer is read.
func (p *puller) scan(ctx context.Context) error {
	layers := p.image.Manifest.Layers
	read := func(i int) error {
		for try := 1; ; try++ {
			b, err := p.image.Source.Blob(layers[i])
			if err == nil {
				err = p.layer(ctx, i)
			}
			if err == nil {
				return nil
			}
			if b == nil || !b.Again(err, try) {
				return fmt.Errorf("%s: %w", p.image.LayerText(i), err)
			}
			if err := p.dropLayer(i); err != nil {
				return err
			}
		}
	}
	if i := p.indexed(); i >= 0 {
		if err := read(i); err != nil || p.found() {
			return err
		}
		// The file needs another one, which may be anywhere.
		for _, f := range p.files {
			if err := p.drop(f); err != nil {
				return err
			}
		}
		p.files, p.shadow = nil, layer.NewShadow()
	}
	for i := len(layers) - 1; i >= 0 && !p.found(); i-- {
		if err := read(i); err != nil {
			return err
		}
	}
	return nil
}

// indexed is the layer that has the wanted file, by the index; -1: unknown.
func (p *puller) indexed() int {
	return slices.IndexFunc(p.image.Manifest.Layers, func(l v1.Descriptor) bool {
		return p.index != nil && slices.ContainsFunc(p.index.Files, func(f layer.IndexFile) bool {
			return f.Name == p.path && f.Layer == l.Digest.String()
		})
	})
}

// found reports that no further layer needs to be read: the wanted file is there, and needs no
// other.
func (p *puller) found() bool {
	if p.path == "" {
		return false
	}
	for _, f := range p.files {
		if f.name == p.path {
			return f.backing == ""
		}
	}
	return false
}

// layer reads a layer. Files that may be wanted are written as they come.
func (p *puller) layer(ctx context.Context, i int) error {
	desc := p.image.Manifest.Layers[i]
	b, err := p.image.Source.Blob(desc)
	if err != nil {
		return err
	}
	if desc.MediaType == layer.MediaEmpty {
		return nil
	}
	in, err := layer.Open(ctx, b, &p.opt.Progress.done, p.opt.UnpackMemory)
	if err != nil {
		return err
	}
	defer in.Close()
	head, err := in.Peek()
	if err != nil {
		return in.Explain(err)
	}
	plain, err := layer.IsPlain(desc, head)
	if err != nil {
		return in.Explain(err)
	}
	toc, err := p.comparison(ctx, b)
	switch {
	case err != nil:
		return err
	case plain && toc != nil:
		return cmp.Or(in.Explain(in.Finish()), tocDiffers(desc, layer.NoArchive))
	case plain:
		return p.plain(ctx, i, in)
	}
	here := make(map[string]*file)
	list, err := layer.ReadTar(in, p.dir, func(e *layer.Entry, content io.Reader) error {
		if !layer.Under(p.dir, e.Name) && layer.IsFile(desc) {
			return p.loneFile(ctx, i, in, e, content)
		}
		if !layer.Under(p.dir, e.Name) || !p.shadow.Shows(e.Name) {
			return nil
		}
		if old := here[e.Name]; old != nil { // a later entry of the same name replaces it
			if err := p.drop(old); err != nil {
				return err
			}
		}
		f := &file{name: e.Name, layer: i, ordinal: e.Ordinal, size: e.Size}
		here[e.Name] = f
		return p.checked(i, e, toc.Content(e, content), func(content io.Reader) error {
			return p.pass(ctx, f, content)
		})
	})
	if err == nil {
		err = in.Finish()
	}
	if err = in.Doubt(err); err == nil {
		err = tocDiffers(desc, toc.Differs(list))
	}
	if err == nil {
		err = p.collect(ctx, list, i, here)
	}
	if err != nil {
		for _, f := range here {
			err = errors.Join(err, p.drop(f))
		}
		return err
	}
	return p.shadow.Add(list)
}

// collect collects the visible files of a layer, its hard links, and the refused files.
func (p *puller) collect(ctx context.Context, list *layer.List, i int,
	here map[string]*file) error {
	linked := make(map[string][]*file) // links to other files of the layer
	for _, name := range slices.Sorted(maps.Keys(list.Entries)) {
		e := list.Entries[name]
		if e.Kind == layer.EntryDirectory || !p.shadow.Shows(name) {
			continue
		}
		f := here[name]
		switch {
		case e.Kind == layer.EntryRefused:
			f = &file{name: name, layer: i, refused: e.What}
		case name == p.dir && e.Kind == layer.EntryFile:
			f = &file{name: name, layer: i, refused: "a file in place of the directory"}
		case e.Kind == layer.EntryLink:
			f = &file{name: name, layer: i}
			if target := list.Target(e); target != nil {
				f.ordinal, f.size = target.Ordinal, target.Size
			} else {
				f.refused = fmt.Sprintf("a hard link to %q, which its layer does not have", e.Link)
				linked[e.Link] = append(linked[e.Link], f)
			}
		}
		if p.files = append(p.files, f); here[name] == f {
			delete(here, name)
		}
	}
	for _, f := range here { // files that a later entry of the same name has replaced
		if err := p.drop(f); err != nil {
			return err
		}
	}
	if len(p.files) > layer.MaxShown {
		return fmt.Errorf("there are more than %d files under %s/", layer.MaxShown, p.dir)
	}
	if len(linked) == 0 {
		return nil
	}
	return p.read(ctx, i, func(e *layer.Entry, _ io.Reader) error {
		for _, f := range linked[e.Name] {
			f.ordinal, f.size, f.refused = e.Ordinal, e.Size, ""
		}
		return nil
	})
}

// candidate reports whether the file may be the wanted one.
func (p *puller) candidate(name string) bool {
	return p.path == name || p.path == "" && path.Dir(name) == p.dir
}

// pass gets the content of a visible file. It writes the content at once, unless another file may
// be the wanted one, or must come first.
func (p *puller) pass(ctx context.Context, f *file, content io.Reader) error {
	head, content, err := p.look(ctx, f, content)
	if err != nil {
		return err
	}
	content, done := p.unpacked(ctx, f, content)
	defer done()
	if err := p.peek(f, &content); err != nil {
		return err
	}
	f.passed = p.path == "" && (image.PassOver(f.name, f.size, f.isQcow2) ||
		f.ordinal == layer.WholeLayer && !slices.Contains(f.packed, unpack.VMDK) &&
			layer.IsBeside(p.image.Manifest.Layers, f.diskName(), head, f.contentSize()))
	if !p.candidate(f.name) || f.backing != "" || f.passed || p.dest == "-" ||
		!p.many && len(p.names) > 0 {
		return nil
	}
	if err := p.open(f); err != nil {
		return &layer.DestinationError{Err: err}
	}
	if err := f.arrival.Pass(ctx, content); err != nil || len(f.packed) == 0 {
		return err
	}
	return p.rest(content)
}

// peek finds out whether the file has a backing file.
func (p *puller) peek(f *file, content *io.Reader) error {
	head, err := detectable(*content)
	if err != nil {
		return err
	}
	n := len(head)
	f.foreign = image.IsForeign(image.FormatOf(head))
	if f.isQcow2 = qcow2.IsQcow2(head); f.isQcow2 {
		size := f.contentSize()
		all := make([]byte, qcow2.HeadSize)
		if size >= 0 {
			all = all[:min(size, qcow2.HeadSize)]
		}
		copy(all, head)
		more, err := io.ReadFull(*content, all[n:])
		if err != nil && (size >= 0 || err != io.ErrUnexpectedEOF && err != io.EOF) {
			return err
		}
		head = all[:n+more]
		f.backing = image.BackingOf(f.name, head, size)
	}
	*content = io.MultiReader(bytes.NewReader(head), *content)
	return nil
}

// open makes the destination of a file.
func (p *puller) open(f *file) (err error) {
	f.label = p.dest
	if p.many {
		f.label = filepath.Join(p.dest, p.fileName(f.diskName()))
	}
	if other := p.names[f.label]; other != "" {
		return fmt.Errorf("%q and %q would both be %q: pull each by its name (--path), to a file "+
			"of its own", other, f.name, f.label)
	}
	info, statErr := os.Stat(f.label)
	switch {
	case p.create != nil:
		f.to, err = p.create(f.label)
	case statErr == nil && info.Mode()&(fs.ModeDevice|fs.ModeCharDevice) == fs.ModeDevice:
		f.to, err = image.OpenDevice(f.label)
	default:
		f.to, err = image.CreateDestination(f.label, p.opt.Replace)
	}
	if err != nil {
		return err
	}
	p.names[f.label] = f.name
	f.arrival = image.NewArrival(f.diskName(), f.contentSize(), f.to,
		image.ArrivalOptions{Options: p.opt.Image, Original: p.opt.Original})
	return nil
}

// fileName is the name of a disk in a directory. A raw disk does not keep the extension of qcow2.
func (p *puller) fileName(name string) string {
	base := path.Base(name)
	if p.opt.Original {
		return base
	}
	switch ext := path.Ext(base); strings.ToLower(ext) {
	case ".qcow2", ".qcow", ".qc2", ".vhdx", ".vhd", ".vpc", ".vdi", ".vmdk", "":
		return strings.TrimSuffix(base, ext) + ".raw"
	}
	return base
}
