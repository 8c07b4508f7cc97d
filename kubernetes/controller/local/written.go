package local

import (
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// written has the version of each identity that was last written, until the cache has it. A move
// deletes what its status does not know, so by an older status it would delete what it has just
// made. After a restart, the cache begins with the newest version. The zero value is ready.
type written struct {
	mu       sync.Mutex
	versions map[types.NamespacedName]string // guarded by mu
}

// note remembers an identity as the API server returned it.
func (w *written) note(id *v1alpha1.VMIdentity) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.versions == nil {
		w.versions = make(map[types.NamespacedName]string)
	}
	w.versions[client.ObjectKeyFromObject(id)] = id.ResourceVersion
}

// late reports whether the cache returned an identity from before the last note. When the cache has
// the new one, there is an event, so there is nothing to do now.
func (w *written) late(cached *v1alpha1.VMIdentity) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	key := client.ObjectKeyFromObject(cached)
	noted, ok := w.versions[key]
	if !ok {
		return false
	}
	order, err := resourceversion.CompareResourceVersion(cached.ResourceVersion, noted)
	if err == nil && order < 0 {
		return true
	}
	delete(w.versions, key)
	return false
}

// forget is for an identity that is gone.
func (w *written) forget(key types.NamespacedName) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.versions, key)
}
