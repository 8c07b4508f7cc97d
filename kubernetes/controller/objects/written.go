package objects

import (
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Written remembers what a controller wrote until the cache has it, so that an older version does
// not make it do the same again. It saves requests, and nothing depends on it. The zero value is
// ready.
type Written struct {
	mu       sync.Mutex
	versions map[types.NamespacedName]string // guarded by mu
}

// Note remembers an object as the API server returned it.
func (w *Written) Note(o client.Object) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.versions == nil {
		w.versions = make(map[types.NamespacedName]string)
	}
	w.versions[client.ObjectKeyFromObject(o)] = o.GetResourceVersion()
}

// Late reports whether the cache returned an object from before the last Note. When the cache has
// the new one, there is an event, so there is nothing to do now.
func (w *Written) Late(cached client.Object) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	key := client.ObjectKeyFromObject(cached)
	noted, ok := w.versions[key]
	if !ok {
		return false
	}
	order, err := resourceversion.CompareResourceVersion(cached.GetResourceVersion(), noted)
	if err == nil && order < 0 {
		return true
	}
	delete(w.versions, key)
	return false
}

// Forget is for an object that is gone.
func (w *Written) Forget(key types.NamespacedName) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.versions, key)
}

// Result returns the result of a reconcile. A conflict is not a failure: somebody else was faster,
// and the cache will have that change in a moment.
func Result(r ctrl.Result, err error) (ctrl.Result, error) {
	if apierrors.IsConflict(err) {
		return ctrl.Result{RequeueAfter: afterConflict}, nil
	}
	return r, err
}
