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

// Usage counts pages. Without a limit, the size of the disk is available.
func (m *Memory) Usage() (disk.Usage, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	available := m.size
	if m.budget >= 0 {
		available = min(m.budget, math.MaxInt64/pageSize) * pageSize
	}
	return disk.Usage{Used: int64(len(m.pages)) * pageSize, Available: available}, nil
}

// Usage returns the inner disk's usage. No rule applies to it.
func (f *Fault) Usage() (disk.Usage, error) {
	if a, ok := f.inner.(disk.Accountant); ok {
		return a.Usage()
	}
	return disk.Usage{}, errors.ErrUnsupported
}
