package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// firstLook is how much of each end of a disk counts as needed to open it: an initiator that finds
// a disk looks for partitions there. Bytes.
const firstLook = 64 << 10

// needs are the ranges of a file that are read to open the image, and the runs of chunks that a
// booting guest reads.
type needs struct {
	metadata [][2]int64
	boot     [][2]int64
}

// needsOf opens an image once more, and records the reads of each of its files: first those that
// open the image, then those of the blocks of a recorded boot. open returns each file; needsOf
// closes it.
func needsOf(ctx context.Context, name string, opt image.Options, boot []BootRun,
	open func(name string) (image.Source, error)) (map[string]needs, error) {
	noted := make(map[string]*readRecorder)
	source := func(_ context.Context, name string) (image.Source, error) {
		f, err := open(name)
		if err != nil {
			return nil, err
		}
		s := &readRecorder{Source: f}
		noted[name] = s
		return s, nil
	}
	// The format was decided when the image was opened by its path. Here only the reads matter.
	img, err := image.OpenSource(ctx, name, source, opt)
	if err != nil {
		return nil, err
	}
	defer img.Close()
	buf := make([]byte, BootBlock)
	read := func(off int64) error {
		if _, err := img.ReadAt(ctx, buf, off); err != nil && err != io.EOF {
			return err
		}
		return nil
	}
	if err := errors.Join(read(0), read(max(0, img.Size()-firstLook))); err != nil {
		return nil, err
	}
	all := make(map[string]needs)
	for name, s := range noted {
		all[name] = needs{metadata: s.ranges()}
		s.reads = nil
	}
	for _, r := range boot {
		for block := r.First; block < r.First+r.Count; block++ {
			if err := read(block * BootBlock); err != nil {
				return nil, err
			}
		}
	}
	for name, s := range noted {
		n := all[name]
		n.boot = s.chunks(n.metadata)
		all[name] = n
	}
	return all, nil
}

// readRecorder is a file that records its reads. It has no holes, so that all of it is read.
type readRecorder struct {
	image.Source

	mu    sync.Mutex
	reads [][2]int64 // guarded by mu
}

func (s *readRecorder) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	s.mu.Lock()
	s.reads = append(s.reads, [2]int64{off, off + int64(len(p))})
	s.mu.Unlock()
	return s.Source.ReadAt(ctx, p, off)
}

// ranges are the reads, in order, without overlaps, as offset and length. Close reads are joined,
// so that there are not more ranges than an index may have.
func (s *readRecorder) ranges() (all [][2]int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.SortFunc(s.reads, func(a, b [2]int64) int { return int(min(max(a[0]-b[0], -1), 1)) })
	for gap := int64(4 << 10); ; gap *= 4 {
		all = nil
		for _, r := range s.reads {
			begin, end := r[0], min(r[1], s.Size())
			switch last := len(all) - 1; {
			case begin >= end:
			case last >= 0 && begin <= all[last][0]+all[last][1]+gap:
				all[last][1] = max(all[last][1], end-all[last][0])
			default:
				all = append(all, [2]int64{begin, end - begin})
			}
		}
		if len(all) <= layer.MaxRanges/layer.MaxIndexFiles {
			return all
		}
	}
}

// chunks are the chunks that were read, each once, in the order of their first reads. Metadata does
// not count.
func (s *readRecorder) chunks(metadata [][2]int64) (runs [][2]int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	known := layer.Tables{Ranges: metadata}
	seen := make(map[int64]bool)
	for _, r := range s.reads {
		end := min(r[1], s.Size())
		if r[0] >= end || known.Has(r[0], end-r[0]) >= 0 {
			continue
		}
		for chunk := r[0] / layer.IndexChunk; chunk <= (end-1)/layer.IndexChunk; chunk++ {
			last := len(runs) - 1
			switch {
			case seen[chunk]:
				continue
			case last >= 0 && runs[last][0]+runs[last][1] == chunk:
				runs[last][1]++
			default:
				runs = append(runs, [2]int64{chunk, 1})
			}
			seen[chunk] = true
		}
	}
	return runs
}

func (s *readRecorder) WillRead(off, length int64) {}

func (s *readRecorder) Extent(off, length int64) (disk.Extent, error) {
	return disk.Extent{Length: min(length, s.Size()-off), Data: true}, nil
}

// disksOf returns those files of an image that are disks: they are meant as disks, are in the
// directory of the disks, and are not the backing file of another. below has the backing files, by
// the names of the files above them. A single file is not read, because everything about it is
// known otherwise.
func disksOf(ctx context.Context, layers []descriptor, files []string,
	open func(name string) (image.Source, error)) (disks []string, below map[string]string,
	err error) {
	if len(files) == 1 {
		return files, nil, nil
	}
	backing, passed := make([]string, len(files)), make([]bool, len(files))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(transport.Reads)
	for i, name := range files {
		group.Go(func() error {
			file, err := open(name)
			if err != nil {
				return err
			}
			head, err := readHead(ctx, file)
			if err != nil {
				return errors.Join(fmt.Errorf("%s: %w", name, err), file.Close())
			}
			passed[i] = path.Dir(name) != "." ||
				image.PassOver(name, file.Size(), qcow2.IsQcow2(head)) ||
				layer.IsBeside(layers, name, head, file.Size())
			backing[i] = image.BackingOf(name, head, file.Size())
			return file.Close()
		})
	}
	if err := group.Wait(); err != nil {
		return nil, nil, err
	}
	below = make(map[string]string)
	for i, name := range files {
		if backing[i] != "" {
			below[name] = backing[i]
		}
		if !passed[i] && !slices.Contains(backing, name) {
			disks = append(disks, name)
		}
	}
	return disks, below, nil
}

// readHead reads the part of a file's head that image.BackingOf needs. The rest stays zeros, and is
// not fetched: the name of a backing file is at the beginning, which the index has.
func readHead(ctx context.Context, file image.Source) ([]byte, error) {
	head := make([]byte, min(file.Size(), qcow2.HeadSize))
	for _, n := range []int64{headRead, qcow2.HeadSize} {
		p := head[:min(n, int64(len(head)))]
		if len(p) > 0 {
			if _, err := file.ReadAt(ctx, p, 0); err != nil && err != io.EOF {
				return nil, err
			}
		}
		if qcow2.NameEnd(p) <= int64(len(p)) {
			break
		}
	}
	return head, nil
}

// headRead is how much of a file is read to find out whether it has a backing file: one cluster of
// most images. Bytes.
const headRead = 64 << 10

// indexedFile is a file of an index in the making.
type indexedFile struct {
	entry   layer.IndexFile
	digests *io.SectionReader
	from    io.ReaderAt // has the metadata; nil: it is not at hand
}

func newIndex(ctx context.Context, all []indexedFile) (*layer.Index, error) {
	slices.SortFunc(all, func(a, b indexedFile) int {
		return strings.Compare(a.entry.Name, b.entry.Name)
	})
	x := &layer.Index{Version: layer.IndexVersion, ChunkSize: layer.IndexChunk}
	var digests bytes.Buffer
	var tables []layer.Ranges
	complete := true
	for _, f := range all {
		f.entry.FirstChunk = int64(digests.Len() / layer.DigestSize)
		if _, err := io.Copy(&digests, f.digests); err != nil {
			return nil, err
		}
		x.Files = append(x.Files, f.entry)
		tables = append(tables, layer.Ranges{File: f.from, Ranges: f.entry.Metadata})
		complete = complete && (f.from != nil || len(f.entry.Metadata) == 0)
	}
	x.Digests = layer.SectionOf(digests.Bytes())
	if !complete {
		return x, nil
	}
	packed, err := layer.PackTables(ctx, tables)
	if len(packed) > 0 {
		x.Packed = layer.SectionOf(packed)
	}
	return x, err
}
