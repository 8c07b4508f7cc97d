package transfer

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"

	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
)

// version is the format of the stream.
const version = 1

// begin is the first line of a stream.
type begin struct {
	Version int `json:"version"`
	// Bytes is how much storage the files take.
	Bytes int64 `json:"bytes"`
}

// entry is the line before a file, or for a directory. The last line has only End.
type entry struct {
	Name string      `json:"name,omitempty"` // below the directory
	Dir  bool        `json:"dir,omitempty"`
	Mode fs.FileMode `json:"mode,omitempty"`
	Size int64       `json:"size,omitempty"`
	End  bool        `json:"end,omitempty"`
}

// After the line of a file come its blocks: place (8 bytes) and length (4 bytes), both big-endian,
// and the content. A block of length 0 ends them; then the digest follows.
const blockHeader = 12

const (
	diskName = "disk.img"
	lockName = durable.PersistentLockName
	// receiving is the subdirectory into which a disk is received.
	receiving = ".receiving"
	// lostFound is made with every ext4 file system, and is not sent.
	lostFound = "lost+found"
)

// Progress is how far a transfer is, in bytes of storage.
type Progress struct{ done atomic.Int64 }

// Done is how many bytes were transferred.
func (p *Progress) Done() int64 { return p.done.Load() }

// Source is a directory that is sent. Nobody else uses its disks until Close.
type Source struct {
	dir string
	locks
}

// OpenSource locks the disks of a directory. If a daemon uses one, the error says which.
func OpenSource(dir string) (*Source, error) {
	dir, err := osfile.Resolved(dir)
	if err != nil {
		return nil, err
	}
	s := &Source{dir: dir}
	disks, err := s.take(dir)
	if err == nil && disks == 0 {
		err = fmt.Errorf("%q has no %s: name the directory of a persistent disk", dir, diskName)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Send writes all files of the directory. It can be called again.
func (s *Source) Send(ctx context.Context, w io.Writer, p *Progress) error {
	files, err := list(s.dir)
	if err != nil {
		return err
	}
	out := bufio.NewWriterSize(w, 4*blockSize)
	head := begin{Version: version}
	for _, f := range files {
		head.Bytes += f.stored
	}
	p.done.Store(0)
	if err := line(out, head); err != nil {
		return err
	}
	for _, f := range files {
		if err := line(out, f.entry); err != nil {
			return err
		}
		if !f.Dir {
			if err := s.file(ctx, out, f, p); err != nil {
				return fmt.Errorf("%s: %w", f.Name, err)
			}
		}
	}
	if err := line(out, entry{End: true}); err != nil {
		return err
	}
	return out.Flush()
}

func (s *Source) file(ctx context.Context, out io.Writer, e listed, p *Progress) error {
	f, err := osfile.OpenFile(filepath.Join(s.dir, e.Name), os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	digest := newSum(e.Size)
	header := make([]byte, blockHeader)
	err = blocks(f, e.Size, func(off int64, block []byte) error {
		binary.BigEndian.PutUint64(header, uint64(off))
		binary.BigEndian.PutUint32(header[8:], uint32(len(block)))
		digest.add(off, block)
		if _, err := out.Write(header); err != nil {
			return err
		}
		if _, err := out.Write(block); err != nil {
			return err
		}
		p.done.Add(int64(len(block)))
		return ctx.Err()
	})
	if err != nil {
		return err
	}
	_, err = out.Write(append(make([]byte, blockHeader), digest.Sum(nil)...))
	return err
}

func line(out io.Writer, v any) error {
	text, err := json.Marshal(v)
	if err == nil {
		_, err = out.Write(append(text, '\n'))
	}
	return err
}

// listed is a file or a directory of the source.
type listed struct {
	entry
	stored int64 // bytes
}

// skipped reports whether a name is not sent: it does not belong to a disk, or the file is half
// made.
func skipped(name string, dir bool) bool {
	if dir {
		return name == receiving || name == lostFound || name == rawfile.MarksDir
	}
	return name == durable.LockName || name == lockName ||
		strings.HasSuffix(name, durable.PartialSuffix)
}

// list finds all that is sent. Anything but a file or a directory is an error.
func list(dir string) (all []listed, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if d == nil {
			return err // error of the directory itself
		}
		name := d.Name()
		switch {
		case err == nil && path == dir:
			return nil
		case d.IsDir() && skipped(name, true):
			return fs.SkipDir
		case err != nil:
			return err
		case !d.IsDir() && skipped(name, false):
			return nil
		case !d.IsDir() && !d.Type().IsRegular():
			return fmt.Errorf("%q is not a regular file: remove it", path)
		}
		below, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		e := listed{entry: entry{Name: below, Dir: d.IsDir(), Mode: info.Mode().Perm()}}
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			e.stored = st.Blocks * osfile.StatBlock
		}
		if !e.Dir {
			e.Size = info.Size()
		}
		all = append(all, e)
		return nil
	})
	// The disks come last, so that they get their names last.
	slices.SortStableFunc(all, func(a, b listed) int { return order(a.entry) - order(b.entry) })
	return all, err
}

func order(e entry) int {
	if filepath.Base(e.Name) == diskName && !e.Dir {
		return 1
	}
	return 0
}

// blockSize is the granularity in bytes at which zeros stay holes.
const blockSize = 64 << 10

// blocks calls do for each block of a file that is not all zeros, in order. Blocks are aligned, and
// only the last one of a file may be short.
func blocks(f *os.File, size int64, do func(off int64, block []byte) error) error {
	buf := make([]byte, blockSize)
	for off := int64(0); off < size; {
		// A smaller hole than a block does not matter.
		n, data, err := osfile.SeekExtent(f, off, size-off)
		switch {
		case err != nil:
			return err
		case !data && n >= blockSize:
			off += n &^ (blockSize - 1)
			continue
		case !data && off+n == size:
			return nil
		case !data:
			n = blockSize
		}
		for end := off + n; off < end && off < size; off += blockSize {
			block := buf[:min(blockSize, size-off)]
			if err := osfile.ReadFull(f, block, off); err != nil {
				return err
			}
			if rawfile.AllZero(block) {
				continue
			}
			if err := do(off, block); err != nil {
				return err
			}
		}
	}
	return nil
}

// sum is the digest of a file's content: its size, and its blocks with their places. Holes and
// zeros give the same digest.
type sum struct{ hash.Hash }

func newSum(size int64) sum {
	s := sum{sha256.New()}
	s.number(size)
	return s
}

func (s sum) add(off int64, block []byte) {
	s.number(off)
	_, _ = s.Write(block) // it never fails
}

func (s sum) number(n int64) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(n))
	_, _ = s.Write(b[:])
}
