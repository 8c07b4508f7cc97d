package registry

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"

	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// fetchedDisks are the disks of an image that was fetched as a whole. The digests of their chunks
// were taken when the image was verified, so they tell whether storage, or somebody, has changed a
// file since. A chunk is as long as one of an index.
//
// The file is the digest of what follows and a line feed, the disks as JSON and a line feed, and
// the digests of all chunks. Those of large disks take hundreds of MiB, so they stay there.
type fetchedDisks struct {
	Disks []fetchedDisk `json:"disks"`

	file *os.File
}

type fetchedDisk struct {
	Name string `json:"name"` // of the raw file
	Size int64  `json:"size"` // bytes

	digests *io.SectionReader // of its chunks
}

const (
	digestsSuffix = ".digests"
	lockSuffix    = ".lock"
	// maxFetchedDisks bounds the JSON. Bytes.
	maxFetchedDisks = 16 << 20
)

func digestsLength(size int64) int64 {
	return (size + layer.IndexChunk - 1) / layer.IndexChunk * layer.DigestSize
}

func (d *fetchedDisks) names() (names []string) {
	for _, one := range d.Disks {
		names = append(names, one.Name)
	}
	slices.Sort(names)
	return names
}

func (d *fetchedDisks) find(name string) *fetchedDisk {
	i := slices.IndexFunc(d.Disks, func(one fetchedDisk) bool { return one.Name == name })
	if i < 0 {
		return nil
	}
	return &d.Disks[i]
}

func (d *fetchedDisks) close() error {
	if d == nil {
		return nil
	}
	return d.file.Close()
}

// loadFetchedDisks reads such a file. It copies it to a file without a name in own, because
// somebody may change it later.
func loadFetchedDisks(root *osfile.Shared, name string, own *os.Root) (*fetchedDisks, error) {
	f, err := root.OpenFile(name, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	d := new(fetchedDisks)
	if d.file, err = osfile.NamelessIn(own); err != nil {
		return nil, err
	}
	if err := d.load(io.TeeReader(f, d.file)); err != nil {
		return nil, errors.Join(fmt.Errorf("%s %w", name, err), d.close())
	}
	return d, nil
}

// load reads what comes into the file. Its errors complete the sentence "<file> ...".
func (d *fetchedDisks) load(in io.Reader) error {
	digest, h := make([]byte, len(transport.DigestOf(nil))+1), sha256.New()
	_, err := io.ReadFull(in, digest)
	if err == nil {
		_, err = io.Copy(h, in)
	}
	if err != nil || transport.DigestIn(h)+"\n" != string(digest) {
		return errors.Join(errors.New("is damaged"), err)
	}
	rest := io.NewSectionReader(d.file, int64(len(digest)), maxFetchedDisks)
	text, err := bufio.NewReader(rest).ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(text, d)
	}
	if err != nil {
		return fmt.Errorf("cannot be read: %w", err)
	}
	at := int64(len(digest) + len(text))
	for i := range d.Disks {
		one := &d.Disks[i]
		if one.Size < 0 || one.Name != path.Base(path.Clean("/"+one.Name)) || one.Name == "/" {
			return fmt.Errorf("has a disk %.100q of %d bytes", one.Name, one.Size)
		}
		one.digests = io.NewSectionReader(d.file, at, digestsLength(one.Size))
		at += one.digests.Size()
	}
	if info, err := d.file.Stat(); err != nil || info.Size() != at {
		return errors.Join(errors.New("does not have a digest for each chunk"), err)
	}
	return nil
}

// save takes the digests of files that were just made, and stores them. partial ends the names of
// all these files.
func (f *fetchedImage) save(ctx context.Context, made []Pulled, partial string) (err error) {
	d := new(fetchedDisks)
	for _, one := range made {
		d.Disks = append(d.Disks, fetchedDisk{Name: path.Base(one.To), Size: one.Size})
	}
	text, err := json.Marshal(d)
	if err != nil {
		return err
	}
	to, err := f.root.OpenFile(f.dir+digestsSuffix+partial, os.O_RDWR|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	f.root.Share(to)
	begin := int64(len(transport.DigestOf(nil)) + 1)
	if _, err := to.WriteAt(append(text, '\n'), begin); err != nil {
		return err
	}
	at := begin + int64(len(text)) + 1
	for _, one := range made {
		file, err := f.root.OpenFile(one.To+partial, os.O_RDONLY)
		if err != nil {
			return err
		}
		err = digestsOfFile(ctx, file, one.Size, io.NewOffsetWriter(to, at))
		if err = errors.Join(err, file.Close()); err != nil {
			return err
		}
		at += digestsLength(one.Size)
	}
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(to, begin, math.MaxInt64-begin)); err != nil {
		return err
	}
	if _, err := to.WriteAt([]byte(transport.DigestIn(h)+"\n"), 0); err != nil {
		return err
	}
	return to.Sync()
}

// digestsOfFile reads a file once, except for its holes, and writes the digests of its chunks.
func digestsOfFile(ctx context.Context, f *os.File, size int64, to io.WriterAt) error {
	hole := sha256.Sum256(make([]byte, layer.IndexChunk))
	group, ctx := errgroup.WithContext(ctx)
	free := make(chan []byte, runtime.GOMAXPROCS(0))
	for range cap(free) {
		free <- make([]byte, layer.IndexChunk)
	}
	const chunks = 64
	const part = chunks * layer.IndexChunk
	for from := int64(0); from < size; from += part {
		buffer := <-free
		group.Go(func() error {
			defer func() { free <- buffer }()
			sums := make([]byte, 0, chunks*layer.DigestSize)
			var extents osfile.Extents
			end := min(from+part, size)
			for off := from; off < end && ctx.Err() == nil; off += layer.IndexChunk {
				p := buffer[:min(layer.IndexChunk, size-off)]
				sum := hole
				n, data, err := extents.Seek(f, off, int64(len(p)))
				if err == nil && (data || n < layer.IndexChunk) {
					err = osfile.ReadFull(f, p, off)
					sum = sha256.Sum256(p)
				}
				if err != nil {
					return err
				}
				sums = append(sums, sum[:]...)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			_, err := to.WriteAt(sums, from/layer.IndexChunk*layer.DigestSize)
			return err
		})
	}
	return group.Wait()
}
