package filetest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"kubevirt.io/disk/disk"
)

var ErrCrashed = errors.New("the machine has crashed")

// Machine is a computer that can crash: a countdown of calls to storage, shared by its files.
type Machine struct {
	mu      sync.Mutex
	Random  *rand.Rand
	CrashIn int          // calls until it crashes; negative: never
	Fail    func() error // called with every call that changes something; nil: no fault
}

// step counts a call. torn is set for the one in which the machine crashes.
func (m *Machine) step() (torn bool, err error) {
	if m.CrashIn == 0 {
		return false, ErrCrashed
	}
	if m.CrashIn > 0 {
		m.CrashIn--
		torn = m.CrashIn == 0
	}
	if m.Fail != nil && !torn {
		err = m.Fail()
	}
	return torn, err
}

// SimFile is a file with a volatile cache. A crash keeps, sector by sector and independently of each other, anything that was
// written since the last sync, or nothing of it. It implements blockFile and storage.
type SimFile struct {
	m        *Machine
	Cache    []byte
	platter  []byte
	versions map[int64][][]byte // sectors as they were written since the last sync
	Lies     bool               // its sync does nothing
	failed   bool
}

func NewSimFile(m *Machine, content []byte) *SimFile {
	return &SimFile{m: m, Cache: bytes.Clone(content), platter: bytes.Clone(content), versions: map[int64][][]byte{}}
}

func (f *SimFile) Size() int64 { return int64(len(f.Cache)) }

func (f *SimFile) Close() error { return nil }

func (f *SimFile) Zero(off, length int64) error { return f.Discard(off, length) }

func (f *SimFile) ReadAt(p []byte, off int64) (int, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if off+int64(len(p)) > int64(len(f.Cache)) {
		return 0, errors.New("read past the end")
	}
	return copy(p, f.Cache[off:]), nil
}

func (f *SimFile) WriteAt(p []byte, off int64) (int, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	torn, err := f.m.step()
	if err != nil {
		return 0, err
	}
	if f.failed {
		return 0, disk.ErrFailed
	}
	copy(f.Cache[off:], p)
	for sector := off / disk.SectorSize; sector*disk.SectorSize < off+int64(len(p)); sector++ {
		if !torn || f.m.Random.IntN(2) == 0 {
			f.versions[sector] = append(f.versions[sector], bytes.Clone(f.Cache[sector*disk.SectorSize:min(int64(len(f.Cache)), (sector+1)*disk.SectorSize)]))
		}
	}
	if torn {
		return 0, ErrCrashed
	}
	return len(p), nil
}

func (f *SimFile) Sync() error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	torn, err := f.m.step()
	switch {
	case err != nil:
		return err
	case torn:
		return ErrCrashed
	case f.Lies:
		return nil
	}
	copy(f.platter, f.Cache)
	clear(f.versions)
	return nil
}

func (f *SimFile) Flush() error {
	if f.failed {
		return disk.ErrFailed
	}
	err := f.Sync()
	if err != nil && !errors.Is(err, ErrCrashed) {
		f.failed = true
		return fmt.Errorf("%w: %w", disk.ErrFailed, err)
	}
	return err
}

func (f *SimFile) Discard(off, length int64) error {
	_, err := f.WriteAt(make([]byte, length), off)
	return err
}

func (f *SimFile) Extent(off, length int64) (disk.Extent, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	zero, n := zeroRun(f.Cache[off:off+length], off)
	return disk.Extent{Length: int64(n), Data: !zero}, nil
}

// Crash is what the file holds when the machine starts again.
func (f *SimFile) Crash(m *Machine) *SimFile {
	for sector, versions := range f.versions {
		if i := f.m.Random.IntN(len(versions) + 1); i > 0 {
			copy(f.platter[sector*disk.SectorSize:], versions[i-1])
		}
	}
	return NewSimFile(m, f.platter)
}

// SimImage is an image in memory with holes.
type SimImage struct{ Content []byte }

func (s SimImage) Size() int64 { return int64(len(s.Content)) }

func (s SimImage) ReadAt(p []byte, off int64) (int, error) {
	return copy(p, s.Content[min(off, s.Size()):]), nil
}

func (s SimImage) Extent(off, length int64) (disk.Extent, error) {
	zero, n := zeroRun(s.Content[off:off+length], off)
	return disk.Extent{Length: int64(n), Data: !zero}, nil
}

// zeroRun tells whether p, which is at off, begins with blocks of zeros or of data, and how many bytes those are.
func zeroRun(p []byte, off int64) (zero bool, n int) {
	const block = 4 << 10
	for n < len(p) {
		end := min(n+block-int((off+int64(n))%block), len(p))
		z := len(bytes.Trim(p[n:end], "\x00")) == 0
		if n == 0 {
			zero = z
		} else if z != zero {
			break
		}
		n = end
	}
	return zero, n
}
