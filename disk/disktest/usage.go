package disktest

import (
	"errors"
	"math"

	"kubevirt.io/disk/disk"
)

var (
	_ disk.Accountant = (*Memory)(nil)
	_ disk.Accountant = (*Fault)(nil)
)

// Usage counts pages. Without a limit on what can be allocated, as much is available as the disk is
// large.
func (m *Memory) Usage() (disk.Usage, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	available := m.size
	if m.budget >= 0 {
		available = min(m.budget, math.MaxInt64/pageSize) * pageSize
	}
	return disk.Usage{Used: int64(len(m.pages)) * pageSize, Available: available}, nil
}

// Usage is that of the disk inside. No fault is injected into it.
func (f *Fault) Usage() (disk.Usage, error) {
	if a, ok := f.inner.(disk.Accountant); ok {
		return a.Usage()
	}
	return disk.Usage{}, errors.ErrUnsupported
}
