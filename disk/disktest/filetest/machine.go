package filetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"kubevirt.io/disk/disk"
)

var ErrCrashed = errors.New("the machine has crashed")

// Machine is a computer that can crash, in the midst of any call that changes its storage, or whose
// process can be killed there. Its files and stores share a countdown of such calls. After it, none
// succeeds; SimFile.Crash or SimFile.Killed has what the next start finds.
type Machine struct {
	mu      sync.Mutex
	Random  *rand.Rand
	CrashIn int          // calls until it crashes; 0: it has; negative: never
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

// SimFile is a file with a volatile cache, and a disk with every optional interface but Accountant.
// A crash keeps, sector by sector and independently of each other, anything that was written since
// the last sync, or nothing of it. The write in which it happens has come to some sector.
type SimFile struct {
	m        *Machine
	Cache    []byte
	platter  []byte
	versions map[int64][][]byte // sectors as they were written since the last sync
	Lies     bool               // its sync does nothing
	failed   bool
}

func NewSimFile(m *Machine, content []byte) *SimFile {
	return &SimFile{m: m, Cache: bytes.Clone(content), platter: bytes.Clone(content),
		versions: map[int64][][]byte{}}
}

func (f *SimFile) Size() int64 { return int64(len(f.Cache)) }

func (f *SimFile) Close() error { return nil }

// Grow enlarges the file by zeros. A crash does not undo that.
func (f *SimFile) Grow(size int64) error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	torn, err := f.m.step()
	if err != nil {
		return err
	}
	f.Cache = append(f.Cache, make([]byte, size-int64(len(f.Cache)))...)
	f.platter = append(f.platter, make([]byte, size-int64(len(f.platter)))...)
	if torn {
		return ErrCrashed
	}
	return nil
}

func (f *SimFile) Zero(ctx context.Context, off, length int64) error {
	return f.Discard(ctx, off, length)
}

func (f *SimFile) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if off+int64(len(p)) > int64(len(f.Cache)) {
		return 0, errors.New("read past the end")
	}
	return copy(p, f.Cache[off:]), nil
}

func (f *SimFile) WriteAt(_ context.Context, p []byte, off int64) (int, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	torn, err := f.m.step()
	if err != nil {
		return 0, err
	}
	if f.failed {
		return 0, disk.ErrFailed
	}
	first := off / disk.SectorSize
	if torn {
		sectors := (off+int64(len(p))+disk.SectorSize-1)/disk.SectorSize - first
		cut := (first+f.m.Random.Int64N(sectors+1))*disk.SectorSize - off
		p = p[:max(0, min(int64(len(p)), cut))]
	}
	copy(f.Cache[off:], p)
	for sector := first; sector*disk.SectorSize < off+int64(len(p)); sector++ {
		end := min(int64(len(f.Cache)), (sector+1)*disk.SectorSize)
		f.versions[sector] = append(f.versions[sector],
			bytes.Clone(f.Cache[sector*disk.SectorSize:end]))
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

func (f *SimFile) Discard(_ context.Context, off, length int64) error {
	_, err := f.WriteAt(context.Background(), make([]byte, length), off)
	return err
}

func (f *SimFile) Extent(_ context.Context, off, length int64) (disk.Extent, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	zero, n := zeroRun(f.Cache[off:off+length], off)
	return disk.Extent{Length: int64(n), Data: !zero}, nil
}

// Killed is the file that the next process finds, on the machine m, where only the process has
// ended: all that was written is there, and may be lost in a crash as before.
func (f *SimFile) Killed(m *Machine) *SimFile {
	return &SimFile{m: m, Cache: f.Cache, platter: f.platter, versions: f.versions}
}

// Crash is the file that m finds, which is the machine that starts again.
func (f *SimFile) Crash(m *Machine) *SimFile {
	for sector, versions := range f.versions {
		if i := f.m.Random.IntN(len(versions) + 1); i > 0 {
			copy(f.platter[sector*disk.SectorSize:], versions[i-1])
		}
	}
	return NewSimFile(m, f.platter)
}

// SimStore is the store of a logical unit. Saved data survives a crash once Save has returned. A
// crash during Save keeps all of its data, or nothing.
type SimStore struct {
	m    *Machine
	kept map[string][]byte

	KeepsNothing bool // it fails: it does not save the data
	KeepsForever bool // it fails: it does not forget the data
}

func NewSimStore(m *Machine) *SimStore { return &SimStore{m: m, kept: map[string][]byte{}} }

func (s *SimStore) Load(name string) ([]byte, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	return s.kept[name], nil
}

func (s *SimStore) Where(name string) string { return name }

// Save keeps data under a name. Without data nothing is kept there any more.
func (s *SimStore) Save(name string, data []byte) error {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	torn, err := s.m.step()
	if err != nil {
		return err
	}
	wrong := s.KeepsNothing
	if len(data) == 0 {
		wrong = s.KeepsForever
	}
	if !wrong && !(torn && s.m.Random.IntN(2) == 0) {
		s.kept[name] = bytes.Clone(data)
	}
	if torn {
		return ErrCrashed
	}
	return nil
}

// SimImage is an image in memory with holes.
type SimImage struct{ Content []byte }

func (s SimImage) Size() int64 { return int64(len(s.Content)) }

func (s SimImage) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	return copy(p, s.Content[min(off, s.Size()):]), nil
}

func (s SimImage) Parallel() int { return 1 }

func (s SimImage) Extent(_ context.Context, off, length int64) (disk.Extent, error) {
	zero, n := zeroRun(s.Content[off:off+length], off)
	return disk.Extent{Length: int64(n), Data: !zero}, nil
}

// zeroRun tells whether p, which is at off, begins with blocks of zeros or of data, and how many
// bytes those are.
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
