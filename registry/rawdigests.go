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
	"strings"

	"golang.org/x/sync/errgroup"

	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// rawDigests are the digests of the chunks of raw files that were made from an image. A chunk is as
// long as one of an index. The digests were taken when the image was verified, so they tell whether
// storage, or somebody, has changed a file since.
//
// The file is the digest of what follows and a line feed, the disks as JSON and a line feed, and
// the digests of all chunks. Those of large disks take hundreds of MiB, so they stay there.
type rawDigests struct {
	Disks []rawDigestsOf `json:"disks"`

	file *os.File
}

type rawDigestsOf struct {
	Name string `json:"name"` // of the raw file
	Size int64  `json:"size"` // bytes

	chunks *io.SectionReader // the digests
}

const (
	digestsSuffix = ".digests"
	// maxRawDisks bounds the JSON. Bytes.
	maxRawDisks = 16 << 20
)

func (d *rawDigests) names() (names []string) {
	for _, one := range d.Disks {
		names = append(names, one.Name)
	}
	slices.Sort(names)
	return names
}

func (d *rawDigests) find(name string) *rawDigestsOf {
	i := slices.IndexFunc(d.Disks, func(one rawDigestsOf) bool { return one.Name == name })
	if i < 0 {
		return nil
	}
	return &d.Disks[i]
}

func (d *rawDigests) close() error {
	if d == nil {
		return nil
	}
	return d.file.Close()
}

// loadRawDigests reads such a file. It copies it to a file without a name in own, because somebody
// may change it later.
func loadRawDigests(root *osfile.Shared, name string, own *os.Root) (*rawDigests, error) {
	f, err := root.OpenFile(name, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	d := new(rawDigests)
	if d.file, err = unnamed(own); err != nil {
		return nil, err
	}
	if err := d.load(io.TeeReader(f, d.file)); err != nil {
		return nil, errors.Join(fmt.Errorf("%s %w", name, err), d.close())
	}
	return d, nil
}

// load reads what comes into the file. Its errors complete the sentence "<file> ...".
func (d *rawDigests) load(in io.Reader) error {
	digest, h := make([]byte, len(transport.DigestOf(nil))+1), sha256.New()
	_, err := io.ReadFull(in, digest)
	if err == nil {
		_, err = io.Copy(h, in)
	}
	if err != nil || transport.DigestIn(h)+"\n" != string(digest) {
		return errors.Join(errors.New("is damaged"), err)
	}
	rest := io.NewSectionReader(d.file, int64(len(digest)), maxRawDisks)
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
		chunks := (one.Size + layer.IndexChunk - 1) / layer.IndexChunk
		one.chunks = io.NewSectionReader(d.file, at, chunks*layer.DigestSize)
		at += one.chunks.Size()
	}
	if info, err := d.file.Stat(); err != nil || info.Size() != at {
		return errors.Join(errors.New("does not have a digest for each chunk"), err)
	}
	return nil
}

// saveRawDigests takes the digests of files that were just made, and stores them.
func saveRawDigests(ctx context.Context, root *osfile.Shared, name string, made []Pulled) error {
	d := new(rawDigests)
	for _, one := range made {
		d.Disks = append(d.Disks, rawDigestsOf{Name: path.Base(one.To), Size: one.Size})
	}
	text, err := json.Marshal(d)
	if err != nil {
		return err
	}
	err = writeDigested(root, name+partialSuffix, func(to *os.File, at int64) error {
		if _, err := to.WriteAt(append(text, '\n'), at); err != nil {
			return err
		}
		at += int64(len(text)) + 1
		for _, one := range made {
			f, err := root.OpenFile(one.To, os.O_RDONLY)
			if err != nil {
				return err
			}
			err = digestsOfFile(ctx, f, one.Size, io.NewOffsetWriter(to, at))
			if err = errors.Join(err, f.Close()); err != nil {
				return err
			}
			at += (one.Size + layer.IndexChunk - 1) / layer.IndexChunk * layer.DigestSize
		}
		return nil
	})
	if err == nil {
		err = root.Rename(name+partialSuffix, name)
	}
	return err
}

// digestsOfFile reads a file once, except for its holes, and writes the digests of its chunks.
func digestsOfFile(ctx context.Context, f *os.File, size int64, to io.WriterAt) error {
	zeros, err := layer.NewZeros(size, layer.IndexChunk, nil)
	if err != nil {
		return err
	}
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
				sum := zeros.Of(off / layer.IndexChunk)
				n, data, err := extents.Seek(f, off, int64(len(p)))
				if err == nil && (data || n < int64(len(p))) {
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

// writeDigested makes a new file that begins with the digest of the rest. write writes that, from
// an offset on.
func writeDigested(root *osfile.Shared, name string,
	write func(to *os.File, at int64) error) (err error) {
	if err := root.RemoveAll(name); err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	root.Share(f)
	begin := int64(len(transport.DigestOf(nil)) + 1)
	if err := write(f, begin); err != nil {
		return err
	}
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(f, begin, math.MaxInt64-begin)); err != nil {
		return err
	}
	if _, err := f.WriteAt([]byte(transport.DigestIn(h)+"\n"), 0); err != nil {
		return err
	}
	return f.Sync()
}

// parseDigested reads the JSON in such a file. Its errors complete the sentence "<file> ...".
func parseDigested(content []byte, into any) error {
	digest, rest, _ := strings.Cut(string(content), "\n")
	if transport.DigestOf([]byte(rest)) != digest {
		return errors.New("is damaged")
	}
	if err := json.Unmarshal([]byte(rest), into); err != nil {
		return fmt.Errorf("cannot be read: %w", err)
	}
	return nil
}
