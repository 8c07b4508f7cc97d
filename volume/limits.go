package volume

import (
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

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
