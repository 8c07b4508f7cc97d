package pod

import (
	"maps"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/disk/kubernetes/controller/objects"
)

// seen is what was last done about each waiting pod of each identity: the reason that people were
// told, or opened. So people are told once, and a gate that the cache still has is not opened
// again. Nothing else depends on it, and after a restart it is empty. The zero value is ready.
type seen struct {
	mu  sync.Mutex
	ids map[types.NamespacedName]map[types.UID]string // guarded by mu
}

// opened is noted for a pod once its gate was removed.
const opened = "opened"

// waiting returns the pods of an identity that are held. It forgets the others.
func (s *seen) waiting(id types.NamespacedName, pods []*corev1.Pod) (waiting []*corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	known, gated := s.ids[id], make(map[types.UID]bool)
	for _, p := range pods {
		if !objects.Gated(p, id.Name) || !p.DeletionTimestamp.IsZero() {
			continue
		}
		if gated[p.UID] = true; known[p.UID] != opened {
			waiting = append(waiting, p)
		}
	}
	maps.DeleteFunc(known, func(u types.UID, _ string) bool { return !gated[u] })
	if len(known) == 0 {
		delete(s.ids, id)
	}
	return waiting
}

// note notes what is done about a pod, and reports whether that is new.
func (s *seen) note(id types.NamespacedName, pod types.UID, what string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ids == nil {
		s.ids = make(map[types.NamespacedName]map[types.UID]string)
	}
	if s.ids[id] == nil {
		s.ids[id] = make(map[types.UID]string)
	}
	before := s.ids[id][pod]
	s.ids[id][pod] = what
	return before != what
}
