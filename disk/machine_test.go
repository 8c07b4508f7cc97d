package disk

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
)

var errCrashed = errors.New("the machine has crashed")

// machine is a computer that can crash: a countdown of calls to storage, shared by its files.
type machine struct {
	mu      sync.Mutex
	random  *rand.Rand
	crashIn int          // calls until it crashes; negative: never
	fail    func() error // called with every call that changes something; nil: no fault
}

// step counts a call. torn is set for the one in which the machine crashes.
func (m *machine) step() (torn bool, err error) {
	if m.crashIn == 0 {
		return false, errCrashed
	}
	if m.crashIn > 0 {
		m.crashIn--
		torn = m.crashIn == 0
	}
	if m.fail != nil && !torn {
		err = m.fail()
	}
	return torn, err
}

// simFile is a file with a volatile cache. A crash keeps, sector by sector and independently of each other, anything that was
// written since the last sync, or nothing of it. It implements blockFile and storage.
type simFile struct {
	m        *machine
	cache    []byte
	platter  []byte
	versions map[int64][][]byte // sectors as they were written since the last sync
	lies     bool               // its sync does nothing
	failed   bool
}

func newSimFile(m *machine, content []byte) *simFile {
	return &simFile{m: m, cache: bytes.Clone(content), platter: bytes.Clone(content), versions: map[int64][][]byte{}}
}

func (f *simFile) Size() int64 { return int64(len(f.cache)) }

func (f *simFile) Close() error { return nil }

func (f *simFile) Zero(off, length int64) error { return f.Discard(off, length) }

func (f *simFile) ReadAt(p []byte, off int64) (int, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if off+int64(len(p)) > int64(len(f.cache)) {
		return 0, errors.New("read past the end")
	}
	return copy(p, f.cache[off:]), nil
}

func (f *simFile) WriteAt(p []byte, off int64) (int, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	torn, err := f.m.step()
	if err != nil {
		return 0, err
	}
	if f.failed {
		return 0, ErrFailed
	}
	copy(f.cache[off:], p)
	for sector := off / SectorSize; sector*SectorSize < off+int64(len(p)); sector++ {
		if !torn || f.m.random.IntN(2) == 0 {
			f.versions[sector] = append(f.versions[sector], bytes.Clone(f.cache[sector*SectorSize:min(int64(len(f.cache)), (sector+1)*SectorSize)]))
		}
	}
	if torn {
		return 0, errCrashed
	}
	return len(p), nil
}

func (f *simFile) Sync() error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	torn, err := f.m.step()
	switch {
	case err != nil:
		return err
	case torn:
		return errCrashed
	case f.lies:
		return nil
	}
	copy(f.platter, f.cache)
	clear(f.versions)
	return nil
}

func (f *simFile) Flush() error {
	if f.failed {
		return ErrFailed
	}
	err := f.Sync()
	if err != nil && !errors.Is(err, errCrashed) {
		f.failed = true
		return fmt.Errorf("%w: %w", ErrFailed, err)
	}
	return err
}

func (f *simFile) Discard(off, length int64) error {
	_, err := f.WriteAt(make([]byte, length), off)
	return err
}

func (f *simFile) Extent(off, length int64) (Extent, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	zero, n := zeroRun(f.cache[off:off+length], off)
	return Extent{Length: int64(n), Data: !zero}, nil
}

// crash is what the file holds when the machine starts again.
func (f *simFile) crash(m *machine) *simFile {
	for sector, versions := range f.versions {
		if i := f.m.random.IntN(len(versions) + 1); i > 0 {
			copy(f.platter[sector*SectorSize:], versions[i-1])
		}
	}
	return newSimFile(m, f.platter)
}

// simImage is an image in memory with holes.
type simImage struct{ content []byte }

func (s simImage) Size() int64 { return int64(len(s.content)) }

func (s simImage) ReadAt(p []byte, off int64) (int, error) {
	return copy(p, s.content[min(off, s.Size()):]), nil
}

func (s simImage) Extent(off, length int64) (Extent, error) {
	zero, n := zeroRun(s.content[off:off+length], off)
	return Extent{Length: int64(n), Data: !zero}, nil
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
