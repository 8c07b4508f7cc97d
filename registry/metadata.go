package registry

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
)

// metadataOf opens an image once more, and notes what is read of each of its files: what has to be
// at hand before the image can be served. open gives each file, which is closed.
func metadataOf(
	ctx context.Context,
	name string,
	opt image.Options,
	open func(name string) (*os.File, error),
) (map[string][][2]int64, error) {
	noted := make(map[string]*noting)
	source := func(_ context.Context, name string) (image.Source, error) {
		f, err := open(name)
		if err != nil {
			return nil, err
		}
		info, err := f.Stat()
		if err == nil && !info.Mode().IsRegular() {
			err = fmt.Errorf("%q is not a regular file", name)
		}
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		s := &noting{file: f, size: info.Size()}
		noted[name] = s
		return s, nil
	}
	// What it is was decided when it was opened by its path; here only the reads count.
	img, err := image.OpenSource(ctx, name, source, opt)
	if err != nil {
		return nil, err
	}
	all := make(map[string][][2]int64)
	for name, s := range noted {
		all[name] = s.ranges()
	}
	return all, img.Close()
}

// noting is a file that notes what is read of it.
type noting struct {
	file *os.File
	size int64

	mu    sync.Mutex
	reads [][2]int64 // guarded by mu
}

func (s *noting) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	s.mu.Lock()
	s.reads = append(s.reads, [2]int64{off, off + int64(len(p))})
	s.mu.Unlock()
	return s.file.ReadAt(p, off)
}

// ranges are what was read, in order, without overlaps, as offset and length. Reads that are nearly
// neighbours are one, so that there are not more of them than are accepted.
func (s *noting) ranges() (all [][2]int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.SortFunc(s.reads, func(a, b [2]int64) int { return int(min(max(a[0]-b[0], -1), 1)) })
	for gap := int64(4 << 10); ; gap *= 4 {
		all = nil
		for _, r := range s.reads {
			begin, end := r[0], min(r[1], s.size)
			switch last := len(all) - 1; {
			case begin >= end:
			case last >= 0 && begin <= all[last][0]+all[last][1]+gap:
				all[last][1] = max(all[last][1], end-all[last][0])
			default:
				all = append(all, [2]int64{begin, end - begin})
			}
		}
		if len(all) <= maxRanges/maxIndexFiles {
			return all
		}
	}
}

func (s *noting) Size() int64                { return s.size }
func (s *noting) Identity() image.Identity   { return image.Identity{} }
func (s *noting) Parallel() int              { return 1 }
func (s *noting) WillRead(off, length int64) {}
func (s *noting) Check() error               { return nil }
func (s *noting) Close() error               { return s.file.Close() }

func (s *noting) Extent(off, length int64) (disk.Extent, error) {
	if off < 0 || off >= s.size {
		return disk.Extent{}, errors.New("an extent outside of the file")
	}
	return disk.Extent{Length: min(length, s.size-off), Data: true}, nil
}
