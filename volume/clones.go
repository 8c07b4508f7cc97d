package volume

import (
	"cmp"
	"slices"
	"strings"

	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// Clones returns the volumes that still need a snapshot of a disk ("": any of them), by name. A
// volume needs it from before it is made until it has copied everything, also while it is not open.
func (m *Manager) Clones(disk, snapshot string) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.clonesLocked(disk, snapshot)
}

func (m *Manager) clonesLocked(disk, snapshot string) (names []string) {
	for _, v := range m.volumes {
		d, s := v.record.Spec.From.Cloned()
		if v.record.State != "" && d == disk && (snapshot == "" || s == snapshot) &&
			(v.opened == nil || !v.opened.Copied()) {
			names = append(names, v.name)
		}
	}
	slices.Sort(names)
	return names
}

// leave says that a volume will be deleted: from now on, no clone can be made of it. It refuses if
// clones need it.
func (m *Manager) leave(v *volume) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if clones := m.clonesLocked(v.name, ""); len(clones) > 0 {
		return api.Errorf(api.CodeInUse, "the volume %q is needed by the volumes that were cloned "+
			"from it, %s: delete those first, or wait until they are copied (copy mode %s)",
			v.name, strings.Join(clones, ", "), api.CopyClone)
	}
	v.leaving = true
	return nil
}

// stay takes back leave.
func (m *Manager) stay(v *volume) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v.leaving = false
}

// mayClone refuses to clone a volume that will be deleted. The clone has its record already.
func (m *Manager) mayClone(r store.Record) error {
	disk, _ := r.Spec.From.Cloned()
	m.mu.Lock()
	defer m.mu.Unlock()
	if v := m.volumes[disk]; disk != "" && v != nil && v.leaving {
		return api.Errorf(api.CodeInvalid, "from.snapshot: the volume %q is being deleted", disk)
	}
	return nil
}

// inOrder sorts volumes so that a clone comes after what it was cloned from.
func (m *Manager) inOrder(clones []*volume) {
	m.mu.Lock()
	defer m.mu.Unlock()
	depth := func(v *volume) (n int) {
		for v != nil && n <= len(m.volumes) { // a record by hand may name itself
			disk, _ := v.record.Spec.From.Cloned()
			v = m.volumes[disk]
			n++
		}
		return n
	}
	slices.SortFunc(clones, func(a, b *volume) int {
		return cmp.Or(cmp.Compare(depth(a), depth(b)), strings.Compare(a.name, b.name))
	})
}
