package pod

import (
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/disk/kubernetes/controller/objects"
)

// memory saves requests to the API server. Nothing depends on it, and after a restart it is empty.
// The zero value is ready.
type memory struct {
	mu  sync.Mutex
	ids map[types.NamespacedName]*remembered // guarded by mu
}

// remembered is what the controller knows about an identity and its pods before the cache does.
type remembered struct {
	told   map[types.UID]string // the reasons that people were last told, by waiting pod
	opened []types.UID          // pods whose gates are gone, but not yet in the cache
	made   bool                 // the identity was made, and the cache may not have it yet
}

// waiting returns the pods of an identity that are held.
func (m *memory) waiting(id types.NamespacedName, pods []*corev1.Pod) []*corev1.Pod {
	m.mu.Lock()
	defer m.mu.Unlock()
	gated := make(map[types.UID]bool)
	var waiting []*corev1.Pod
	known := m.ids[id]
	for _, p := range pods {
		if !objects.Gated(p) || !p.DeletionTimestamp.IsZero() {
			continue
		}
		gated[p.UID] = true
		if known == nil || !slices.Contains(known.opened, p.UID) {
			waiting = append(waiting, p)
		}
	}
	if known != nil {
		maps.DeleteFunc(known.told, func(u types.UID, _ string) bool { return !gated[u] })
		known.opened = slices.DeleteFunc(known.opened, func(u types.UID) bool { return !gated[u] })
		if len(pods) == 0 {
			delete(m.ids, id)
		}
	}
	return waiting
}

// tell reports whether people must be told about a held pod, and remembers that they were.
func (m *memory) tell(id types.NamespacedName, h *held) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	known := m.getLocked(id)
	if known.told[h.pod] == h.reason {
		return false
	}
	if known.told == nil {
		known.told = make(map[types.UID]string)
	}
	known.told[h.pod] = h.reason
	return true
}

// open remembers that the gate of a pod is gone.
func (m *memory) open(id types.NamespacedName, pod types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	known := m.getLocked(id)
	known.opened = append(known.opened, pod)
}

// make remembers that an identity was made.
func (m *memory) make(id types.NamespacedName) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.getLocked(id).made = true
}

// made reports, once, that an identity was made and is not in the cache yet.
func (m *memory) made(id types.NamespacedName) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	known := m.ids[id]
	if known == nil || !known.made {
		return false
	}
	known.made = false
	return true
}

// found remembers that the cache has an identity.
func (m *memory) found(id types.NamespacedName) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if known := m.ids[id]; known != nil {
		known.made = false
	}
}

func (m *memory) getLocked(id types.NamespacedName) *remembered {
	if m.ids == nil {
		m.ids = make(map[types.NamespacedName]*remembered)
	}
	if m.ids[id] == nil {
		m.ids[id] = &remembered{}
	}
	return m.ids[id]
}
