package volume

import (
	"errors"
	"fmt"

	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// failed is the error for an operation that failed. A refusal that caused it keeps its code.
func failed(format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	f := &failure{api.Error{Code: api.CodeFailed}, err}
	if refused := new(api.Error); errors.As(err, &refused) {
		f.refusal = *refused
	}
	if osfile.IsFull(err) && f.refusal.Code == api.CodeFailed {
		f.refusal.Code = api.CodeLimit
	}
	f.refusal.Message = err.Error()
	return f
}

// failure is an error with the refusal that caused it.
type failure struct {
	refusal api.Error
	cause   error
}

func (f *failure) Error() string { return f.refusal.Message }

func (f *failure) Unwrap() []error { return []error{&f.refusal, f.cause} }

// enter counts a new volume and its size, which may be 0 while it is unknown. It refuses if there
// are too many volumes or too many bytes.
func (m *Manager) enter(v *volume, r store.Record) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	count := 0
	for _, o := range m.volumes {
		if o != v && o.record.State != "" {
			count++
		}
	}
	if m.opt.Max > 0 && count >= m.opt.Max {
		return api.Errorf(api.CodeLimit, "there are %d volumes, and there may be no more "+
			"(--volumes-max): delete one first", count)
	}
	if err := m.roomLocked(v, r.Size); err != nil {
		return err
	}
	v.record = r
	return nil
}

// size counts a volume with a new size.
func (m *Manager) size(v *volume, size int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.roomLocked(v, size); err != nil {
		return err
	}
	v.record.Size = size
	return nil
}

func (m *Manager) roomLocked(v *volume, size int64) error {
	if m.opt.MaxBytes == 0 {
		return nil
	}
	var others int64
	for _, o := range m.volumes {
		if o != v {
			others += o.bytesLocked()
		}
	}
	if size > m.opt.MaxBytes-others {
		return api.Errorf(api.CodeLimit, "a volume of %d bytes is too large: the others have %d, "+
			"and all together may have %d (--volumes-max-bytes)", size, others, m.opt.MaxBytes)
	}
	return nil
}

// bytesLocked is how many bytes the volume counts for.
func (v *volume) bytesLocked() int64 { return max(v.record.Size, v.reserved) }

// Holder returns the volume that has a name, or a number, or whose number is the name, or whose
// name is the number. "": none. A volume has its name from before it is made.
func (m *Manager) Holder(name string, lun uint16) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.volumes[name] != nil {
		return name
	}
	for _, o := range m.volumes {
		for _, n := range []uint16{lun, m.opt.Disks.Number(name)} {
			if n != 0 && (o.record.LUN == n || o.chosen == n || m.opt.Disks.Number(o.name) == n) {
				return o.name
			}
		}
	}
	return ""
}

// mayBeCalled refuses the name of a new volume that somebody else has, or that is another volume's
// number. The volume is known already, so nobody else gets its name from now on.
func (m *Manager) mayBeCalled(v *volume) error {
	holder := m.opt.Disks.Holder(v.name)
	m.mu.Lock()
	for _, o := range m.volumes {
		n := m.opt.Disks.Number(v.name)
		if n != 0 && o != v && (o.record.LUN == n || o.chosen == n) {
			holder = fmt.Sprintf("the volume %q", o.name)
		}
	}
	m.mu.Unlock()
	switch {
	case holder != "":
		return api.Errorf(api.CodeInUse, "the name %q is taken by %s: disks are found by their "+
			"names "+
			"and by the numbers of their LUNs, so use another name", v.name, holder)
	case store.Private(v.name):
		return api.Errorf(api.CodeInvalid, "%q is the name of a file that the server keeps beside "+
			"the "+
			"volumes: use another one", v.name)
	}
	return nil
}

// chooseLUN chooses a number for a new volume, which is reserved until unchoose, and checks its
// name. It chooses none for a volume on a claim.
func (m *Manager) chooseLUN(v *volume, claim bool) (uint16, error) {
	m.choosing.Lock()
	defer m.choosing.Unlock()
	if err := m.mayBeCalled(v); err != nil || claim {
		return 0, err
	}
	m.mu.Lock()
	taken := make(map[uint16]bool, len(m.volumes))
	for _, o := range m.volumes {
		taken[o.record.LUN], taken[o.chosen] = true, true
		if o != v {
			taken[m.opt.Disks.Number(o.name)] = true
		}
	}
	m.mu.Unlock()
	lun, err := m.store.NextLUN(func(lun uint16) bool {
		return taken[lun] || m.opt.Disks.Taken(lun)
	})
	m.mu.Lock()
	defer m.mu.Unlock()
	v.chosen = lun
	return lun, err
}

// unchoose ends the reservation: now the record has the number, or there is no volume.
func (m *Manager) unchoose(v *volume) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v.chosen = 0
}
