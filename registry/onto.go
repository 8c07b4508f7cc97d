package registry

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/bitset"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// Onto is another version of a disk that is pushed.
type Onto struct {
	Image string // reference of the image with that version
	// File is a copy of that disk's file on this machine. Content in it is not fetched. "": there
	// is none.
	File string
	// Squash leaves out the layers of the versions between the oldest one and the new one. Their
	// content goes into the new layer. This makes the chain short again.
	Squash bool
	// Origins say where the content of the new disk comes from. They must not leave out changes. If
	// none is for Image, all of the disk is read.
	Origins []Origin
}

// Origin says that a disk has the content of an image, except for changes.
type Origin struct {
	Files  []string // image.Contents of the image; nil: see Digest
	Digest string   // of the image's manifest
	// Changed reports whether the run of the disk at off may differ, and its length, at most length
	// bytes. Behind the end of the image, zeros are no difference.
	Changed func(off, length int64) (changed bool, n int64, err error)
}

// annotationRetired marks the index of an image that a later one was pushed onto, or that is the
// base of the later one. The index of the later image, if it has one, describes all visible disks.
const annotationRetired = layer.AnnotationIndex + ".retired"

// retired returns the annotations of a layer when other layers are pushed above it.
func retired(annotations map[string]string) map[string]string {
	version, ok := annotations[layer.AnnotationIndex]
	if !ok {
		return annotations
	}
	annotations = maps.Clone(annotations)
	delete(annotations, layer.AnnotationIndex)
	annotations[annotationRetired] = version
	return annotations
}

// onto makes the layer with the differences from the old disk. It returns false if everything
// differs: then the disk is better pushed as a whole.
func (p *pusher) onto(ctx context.Context) (bool, error) {
	if len(p.planned) != 1 {
		return false, fmt.Errorf("%d files: push one disk onto %s, and then the next one onto the "+
			"result", len(p.planned), p.opt.Onto.Image)
	}
	f := p.planned[0]
	img, err := p.open(f.path)
	if err != nil {
		return false, err
	}
	here, err := newLocalCopy(img, p.opt.Onto.File)
	if err != nil {
		return false, err
	}
	if err := p.findBase(ctx, p.opt.Onto.Image); err != nil {
		return false, errors.Join(err, here.close())
	}
	old, err := p.findOld(ctx, f, here)
	if err != nil {
		return false, fmt.Errorf("%s: %w", p.opt.Onto.Image, err)
	}
	p.old = old
	if err := p.old.checkChain(p.opt.Onto.Squash); err != nil {
		return false, fmt.Errorf("%s: %w", p.opt.Onto.Image, err)
	}
	different, shared, err := p.compare(ctx, img)
	if err != nil {
		return false, fmt.Errorf("comparing %q with %s: %w", f.path, p.opt.Onto.Image, err)
	}
	p.sayRead()
	if p.opt.Onto.Squash {
		if err := p.squash(ctx, different, shared); err != nil {
			return false, err
		}
	}
	if shared.Len() == 0 && different.Len() > 0 {
		return false, p.notOnto()
	}
	if !p.opt.Onto.Squash && len(p.old.chain) == maxChain {
		p.client.Warn(fmt.Sprintf("the disk has %d backing files now, which is the most: push the "+
			"next version with --squash", maxChain))
	}
	return true, p.makeDelta(ctx, f, img, different)
}

// notOnto drops the old image, which has no content of the new disk.
func (p *pusher) notOnto() error {
	const what = "nothing of %s is in the new disk"
	if p.opt.Base == "" {
		return fmt.Errorf(what+": say with --base onto which image it is stored as a whole",
			p.opt.Onto.Image)
	}
	p.client.Warn(fmt.Sprintf(what+", so it is pushed as a whole, onto %s", p.opt.Onto.Image,
		p.opt.Base))
	err := errors.Join(p.old.close(), p.base.source.Close())
	p.old, p.base = nil, nil
	return err
}

// sayRead says how much of the old image was fetched, if that is much.
func (p *pusher) sayRead() {
	came, all := int64(0), int64(0)
	for _, o := range p.old.chain {
		came += o.came.Load()
		all += o.entry.Size
	}
	if came > all/2 && came > 1<<20 {
		p.client.Warn(fmt.Sprintf("%d of the %d bytes of the old disk in %s had to be fetched to "+
			"compare it: --onto-file with a copy of its file saves that", came, all,
			p.opt.Onto.Image))
	}
}

// clusters is a set of clusters of a disk. Several goroutines may add some.
type clusters struct{ bitset.Set }

func newClusters(size int64) clusters {
	return clusters{bitset.New((size-1)/qcow2.DeltaUnit + 1)}
}

// add adds the clusters that have bytes from begin to end.
func (c clusters) add(begin, end int64) {
	for n := begin / qcow2.DeltaUnit; n*qcow2.DeltaUnit < end; n++ {
		c.AddShared(n)
	}
}

// compareUnit is how much of both disks is compared at once. Bytes.
const compareUnit = 4 * qcow2.DeltaUnit

// compare finds the clusters of a disk that differ from the old one, and those that are the same
// and not only zeros.
func (p *pusher) compare(ctx context.Context, img *image.Image) (different, shared clusters,
	err error) {
	old, progress := p.old.image, p.opt.Progress
	different, shared = newClusters(img.Size()), newClusters(img.Size())
	progress.total.Add(img.Size())
	suspects, err := p.mayDiffer(ctx, img.Size())
	if err != nil {
		return clusters{}, clusters{}, err
	}
	outer := ctx
	group, ctx := errgroup.WithContext(outer)
	group.SetLimit(max(runtime.GOMAXPROCS(0), transport.Reads))
	// hole is how much from off on neither disk stores.
	hole := func(off int64) (int64, error) {
		n := img.Size() - off
		for _, one := range []*image.Image{img, old} {
			if off >= one.Size() {
				continue
			}
			e, err := one.Extent(ctx, off, min(n, one.Size()-off))
			if err != nil || e.Data {
				return 0, err
			}
			if off+e.Length < one.Size() {
				n = min(n, e.Length)
			}
		}
		return n, nil
	}
	for off := int64(0); off < img.Size() && ctx.Err() == nil; {
		suspect, n := suspects.run(off, img.Size())
		if !suspect {
			if err := p.old.stored(ctx, off, off+n, shared); err != nil {
				return clusters{}, clusters{}, errors.Join(group.Wait(), err)
			}
			progress.done.Add(n)
			off += n
			continue
		}
		end := off + n
		n, err := hole(off)
		if err != nil {
			return clusters{}, clusters{}, errors.Join(group.Wait(), err)
		}
		if n = min(n, end-off) / compareUnit * compareUnit; n > 0 {
			progress.done.Add(n)
			off += n
			continue
		}
		begin := off
		n = min(compareUnit, end-begin)
		group.Go(func() error {
			a, b := make([]byte, n), make([]byte, n)
			if err := errors.Join(readDisk(ctx, img, a, begin),
				readDisk(ctx, old, b, begin)); err != nil {
				return err
			}
			for at := int64(0); at < n; at += qcow2.DeltaUnit {
				end := min(at+qcow2.DeltaUnit, n)
				switch mine := a[at:end]; {
				case !bytes.Equal(mine, b[at:end]):
					different.add(begin+at, begin+end)
				case !allZeros(mine):
					shared.add(begin+at, begin+end)
				}
			}
			progress.done.Add(n)
			return nil
		})
		off += n
	}
	err = errors.Join(group.Wait(), outer.Err())
	return different, shared, err
}

// mayDiffer returns the clusters that may differ from the old disk, if both disks come from one
// image: those that changed in either disk since. If that is unknown, the Set is nil.
func (p *pusher) mayDiffer(ctx context.Context, size int64) (clusters, error) {
	chain, have := p.old.chain, image.Contents(p.old.image.Unhashed())
	var from *Origin
	var above []*oldFile
	for i, o := range p.opt.Onto.Origins {
		known := len(chain) - len(o.Files)
		switch {
		case len(chain) == 0 || len(have) != len(chain): // the image was fetched
		case o.Files == nil && o.Digest == p.base.digest:
			from, above = &p.opt.Onto.Origins[i], nil
		case len(o.Files) > 0 && known >= 0 && slices.Equal(have[known:], o.Files) && from == nil:
			from, above = &p.opt.Onto.Origins[i], chain[:known]
		}
	}
	if from == nil {
		return clusters{}, nil
	}
	all := newClusters(size)
	for off := int64(0); off < size; {
		changed, n, err := from.Changed(off, size-off)
		if err != nil {
			return clusters{}, err
		}
		if changed {
			all.add(off, off+n)
		}
		off += n
	}
	for _, f := range above {
		if f.content == nil || f.content.Info().ExtendedL2 {
			return clusters{}, nil // its own content is unknown
		}
		if err := f.owns(ctx, chain[len(above)], all, size); err != nil {
			return clusters{}, err
		}
	}
	return all, nil
}

// run reports whether the clusters from off on may differ, and for how many bytes, up to end, the
// answer is the same. Without a Set, all may differ.
func (c clusters) run(off, end int64) (has bool, n int64) {
	if c.Set == nil {
		return true, end - off
	}
	first := off / qcow2.DeltaUnit
	has, n = c.Run(first, (end-1)/qcow2.DeltaUnit+1)
	return has, min((first+n)*qcow2.DeltaUnit, end) - off
}

// stored adds the clusters of which the old disk stores data.
func (o *oldDisk) stored(ctx context.Context, off, end int64, to clusters) error {
	for end = min(end, o.image.Size()); off < end; {
		e, err := o.image.Extent(ctx, off, end-off)
		if err != nil {
			return err
		}
		if e.Data {
			to.add(off, off+e.Length)
		}
		off += e.Length
	}
	return nil
}

// zeros is a cluster of zeros.
var zeros [qcow2.DeltaUnit]byte

// allZeros reports whether a cluster, or less, is zeros.
func allZeros(p []byte) bool { return bytes.Equal(p, zeros[:len(p)]) }

// delta is a disk of which only the differences are stored.
type delta struct {
	*image.Image
	different clusters
}

func (d delta) Data(ctx context.Context, f func(off, n int64) error) error {
	for off := int64(0); off < d.Size(); {
		has, n := d.different.run(off, d.Size())
		if has {
			if err := f(off, n); err != nil {
				return err
			}
		}
		off += n
	}
	return ctx.Err()
}

// makeDelta writes the image with the differences, and lays out its layer.
func (p *pusher) makeDelta(ctx context.Context, f planned, img *image.Image,
	different clusters) error {
	name, err := p.old.deltaName(f.name)
	if err != nil {
		return err
	}
	file, err := nameless()
	if err != nil {
		return err
	}
	p.opt.Progress.total.Add(different.Len() * qcow2.DeltaUnit)
	left := different.Len() * qcow2.DeltaUnit
	compress := cmp.Or(f.compress, p.opt.CompressRaw, qcow2.CompressionNone)
	_, err = qcow2.Write(ctx, file, delta{img, different}, qcow2.WriteOptions{
		Compression: compress,
		ReadUnit:    img.CopyUnit(),
		Backing:     qcow2.Backing{Name: p.old.backing, Format: string(p.old.backingFormat)},
		Progress: func(_, data int64) {
			left -= data
			p.opt.Progress.done.Add(data)
		},
	})
	p.opt.Progress.done.Add(left) // the disk may end within its last cluster
	if err == nil {
		err = img.CheckUntouched()
	}
	if err != nil {
		return errors.Join(fmt.Errorf("writing what differs in %q into %q: %w", f.path,
			os.TempDir(), err), file.Close())
	}
	l, err := layer.NewDisk(path.Join(layer.DiskDir, name), file)
	if err != nil {
		return errors.Join(err, file.Close())
	}
	p.layers = []*layer.Disk{l}
	return p.needsOfDelta(ctx, f, name, file, different)
}

// needsOfDelta finds out which parts of the new layer are read to open the disk, and when a guest
// boots. If no boot was recorded with the new disk, that of the old one counts.
func (p *pusher) needsOfDelta(ctx context.Context, f planned, name string, file *os.File,
	different clusters) error {
	p.needs = make(map[*layer.Disk]needs)
	if p.old.index == nil {
		return nil // the new image has no index, either
	}
	boot, err := f.boot, error(nil)
	if p.opt.Boot == nil {
		if boot, err = p.old.bootOf(ctx, different, f.size); err != nil {
			return err
		}
	}
	all, err := needsOf(ctx, name, image.Options{}, boot, func(n string) (image.Source, error) {
		if n == name {
			return sourceOf(osfile.Reopen(file))
		}
		return p.old.chainFile(n)
	})
	if err != nil {
		return err
	}
	p.needs[p.layers[0]] = all[name]
	if p.opt.Boot != nil {
		p.old.boot = make(map[string][][2]int64)
		for n, need := range all {
			p.old.boot[path.Join(layer.DiskDir, n)] = need.boot
		}
	}
	return nil
}

// deltaName is the name of the new file. The old file keeps its name, and stays below the new one.
func (o *oldDisk) deltaName(wish string) (string, error) {
	stem := strings.TrimSuffix(wish, filepath.Ext(wish))
	name := stem + ".qcow2"
	taken := func(have string) bool {
		return have == name && !slices.Contains(o.left, path.Join(layer.DiskDir, have))
	}
	for n := 1; slices.ContainsFunc(o.names, taken); n++ {
		name = fmt.Sprintf("%s.%d.qcow2", stem, n)
	}
	was, now := slices.Clone(o.disks), slices.Clone(o.disks)
	slices.SortFunc(was, image.NaturalCompare)
	now[slices.Index(now, o.top)] = name
	slices.SortFunc(now, image.NaturalCompare)
	if slices.Index(was, o.top) != slices.Index(now, name) {
		return "", fmt.Errorf("as %q, the disk would have another LUN than %q has: rename the file",
			name, o.top)
	}
	return name, nil
}

// version is a name without its extension, and without the suffix of deltaName.
func version(name string) string {
	stem := strings.TrimSuffix(name, filepath.Ext(name))
	if n := filepath.Ext(stem); len(n) > 1 && strings.Trim(n[1:], "0123456789") == "" {
		stem = strings.TrimSuffix(stem, n)
	}
	return stem
}

func sourceOf(f *os.File, err error) (image.Source, error) {
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%q is not a regular file", f.Name())
	}
	var s image.Source
	if err == nil {
		s, err = image.NewFileSource(f, "")
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return s, nil
}
