package objects

import (
	"context"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// Aside asks pods for their pages beside the reconciles of a controller, so that a page that hangs
// delays only its own object, which is an identity in most controllers. There is one question at a
// time for each object. The zero value asks within the reconcile.
type Aside[T any] struct {
	// Answered requests an identity again when its pod has answered. nil: Ask waits for the answer.
	Answered func(types.NamespacedName)

	mu      sync.Mutex
	answers map[types.NamespacedName]answer[T] // guarded by mu
}

// answer is the answer of a pod, or that it was asked for one.
type answer[T any] struct {
	pod  types.UID
	at   time.Time // zero: there is none yet
	said T
	err  error
}

// freshFor is how long an answer counts. It is asked for again if the reconcile comes later.
const freshFor = 5 * time.Second

// Source lets a controller handle an identity again when its pod has answered.
func (a *Aside[T]) Source() source.Source {
	answered := make(chan event.GenericEvent, 1) // of an object, of which only the name counts
	a.Answered = func(id types.NamespacedName) {
		answered <- event.GenericEvent{Object: &v1alpha1.VMIdentity{
			ObjectMeta: metav1.ObjectMeta{Namespace: id.Namespace, Name: id.Name}}}
	}
	return source.Channel(answered, &handler.EnqueueRequestForObject{})
}

// Ask asks the pod of an identity, and returns its answer if it is there already. Otherwise known
// is false, and the answer makes another request. Each answer is returned once. ask has to end by
// itself, soon.
func (a *Aside[T]) Ask(ctx context.Context, id types.NamespacedName, pod types.UID,
	ask func(context.Context) (T, error)) (said T, known bool, err error) {
	if a.Answered == nil {
		said, err = ask(ctx)
		return said, true, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if got, asked := a.answers[id]; asked && got.pod == pod {
		if got.at.IsZero() {
			return said, false, nil
		}
		delete(a.answers, id)
		if time.Since(got.at) < freshFor {
			return got.said, true, got.err
		}
	}
	if a.answers == nil {
		a.answers = make(map[types.NamespacedName]answer[T])
	}
	a.answers[id] = answer[T]{pod: pod}
	go func() {
		said, err := ask(context.WithoutCancel(ctx))
		a.mu.Lock()
		if a.answers[id].pod == pod {
			a.answers[id] = answer[T]{pod: pod, at: time.Now(), said: said, err: err}
		}
		a.mu.Unlock()
		a.Answered(id)
	}()
	return said, false, nil
}

// Forget is for an identity whose pod is not asked any more.
func (a *Aside[T]) Forget(id types.NamespacedName) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.answers, id)
}
