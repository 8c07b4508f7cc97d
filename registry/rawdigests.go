package registry

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"kubevirt.io/disk/internal/osfile"
)

// rawDigests are the digests of the chunks of raw files that were made from an image, each of
// indexChunk bytes. They were taken when the image was verified, so they tell whether storage, or
// somebody, has changed a file since.
type rawDigests struct {
	Disks []rawDigestsOf `json:"disks"`
}

type rawDigestsOf struct {
	Name   string `json:"name"` // of the raw file
	Size   int64  `json:"size"` // bytes
	Chunks []byte `json:"chunks"`
}

const (
	digestsSuffix = ".digests"
	maxRawDigests = 512 << 20 // for 2 TiB of disks
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

// loadRawDigests reads such a file.
func loadRawDigests(root *osfile.Shared, name string) (*rawDigests, error) {
	f, err := root.OpenFile(name, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	content, err := readBounded(f, maxRawDigests)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	d := new(rawDigests)
	if err := parseDigested(content, d); err != nil {
		return nil, fmt.Errorf("%s %w", name, err)
	}
	return d, d.check()
}

func (d *rawDigests) check() error {
	for _, one := range d.Disks {
		if one.Size < 0 || one.Name != path.Base(path.Clean("/"+one.Name)) || one.Name == "/" ||
			int64(len(one.Chunks)) != (one.Size+indexChunk-1)/indexChunk*digestSize {
			return fmt.Errorf("the digests of %.100q make no sense", one.Name)
		}
	}
	return nil
}

// saveRawDigests takes the digests of files that were just made, and stores them.
func saveRawDigests(ctx context.Context, root *osfile.Shared, name string, made []Pulled) error {
	d := new(rawDigests)
	for _, one := range made {
		f, err := root.OpenFile(one.To, os.O_RDONLY)
		if err != nil {
			return err
		}
		chunks, err := digestsOfFile(ctx, f, one.Size)
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
		d.Disks = append(d.Disks, rawDigestsOf{path.Base(one.To), one.Size, chunks})
	}
	content, err := json.Marshal(d)
	if err == nil {
		err = writeDigested(root, name+partialSuffix, content)
	}
	if err == nil {
		err = root.Rename(name+partialSuffix, name)
	}
	return err
}

// digestsOfFile reads a file once, except for its holes.
func digestsOfFile(ctx context.Context, f *os.File, size int64) ([]byte, error) {
	digests := make([]byte, (size+indexChunk-1)/indexChunk*digestSize)
	zeros := newZeroChunks(size, indexChunk, nil)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	const part = 64 * indexChunk
	for from := int64(0); from < size; from += part {
		group.Go(func() error {
			p := make([]byte, indexChunk)
			for off := from; off < min(from+part, size) && ctx.Err() == nil; off += indexChunk {
				p = p[:min(indexChunk, size-off)]
				sum := zeros.whole
				if len(p) < indexChunk {
					sum = zeros.last
				}
				n, data, err := osfile.SeekExtent(f, off, int64(len(p)))
				if err == nil && (data || n < int64(len(p))) {
					err = osfile.ReadFull(f, p, off)
					sum = sha256.Sum256(p)
				}
				if err != nil {
					return err
				}
				copy(digests[off/indexChunk*digestSize:], sum[:])
			}
			return ctx.Err()
		})
	}
	return digests, group.Wait()
}

// writeDigested writes a new file that begins with the digest of the rest.
func writeDigested(root *osfile.Shared, name string, content []byte) error {
	if err := root.RemoveAll(name); err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return err
	}
	root.Share(f)
	_, err = f.WriteString(digestOf(content) + "\n")
	if err == nil {
		_, err = f.Write(content)
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// parseDigested reads the JSON in such a file. Its errors complete the sentence "<file> ...".
func parseDigested(content []byte, into any) error {
	digest, rest, _ := strings.Cut(string(content), "\n")
	if digestOf([]byte(rest)) != digest {
		return errors.New("is damaged")
	}
	if err := json.Unmarshal([]byte(rest), into); err != nil {
		return fmt.Errorf("cannot be read: %w", err)
	}
	return nil
}
