package service

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
)

// What a cache does not know yet.
const (
	servers  = "Services and Deployments"
	claims   = "claims"
	machines = "the pods of machines"
)

// late makes the cache one that knows nothing of some kinds yet. It returns what makes it as it
// was.
func (w *world) late(kind string) (again func()) {
	w.t.Helper()
	was, cache := w.r.Client, w.r.Client.(client.WithWatch)
	if kind == servers {
		cache = controllertest.Labelled(cache, "none", &corev1.Service{}, &appsv1.Deployment{})
	}
	w.r.Client = interceptor.NewClient(cache, interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, l client.ObjectList,
			opts ...client.ListOption) error {
			if _, is := l.(*corev1.PersistentVolumeClaimList); is && kind == claims {
				return nil
			}
			if _, is := l.(*corev1.PodList); is && kind == machines {
				opts = append(opts, client.HasLabels{v1alpha1.LabelServer})
			}
			return c.List(ctx, l, opts...)
		},
	})
	return func() { w.r.Client = was }
}

// TestCacheIsLate: what the cache does not know yet is not taken for that of somebody else, which a
// person should delete. The certificates that the server may have are not made again.
func TestCacheIsLate(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), nil)
	_, err := w.reconcile() // the finalizer
	require.NoError(t, err)
	again := w.late(servers)
	require.NoError(t, testtool.Err(w.reconcile()))
	first := &corev1.Secret{}
	require.NoError(t, w.Get(t.Context(), certificates, first))
	// Somebody else's write may have kept that of the status.
	id := w.identity()
	id.Status.Portal = ""
	require.NoError(t, w.Status().Update(t.Context(), id))
	_, err = w.reconcile()
	require.True(t, apierrors.IsConflict(err), "it passes: %v", err)
	require.Equal(t, v1alpha1.ReasonStarting, w.condition(v1alpha1.ConditionServed).Reason)
	again()
	w.converge()
	require.Equal(t, metav1.ConditionTrue, w.condition(v1alpha1.ConditionServed).Status)
	has := &corev1.Secret{}
	require.NoError(t, w.Get(t.Context(), certificates, has))
	require.Equal(t, first.Data, has.Data)
}

// TestCacheIsLateWithVolume: the same for the claim of a volume.
func TestCacheIsLateWithVolume(t *testing.T) {
	w := converged(t, withVolume)
	again := w.late(claims)
	_, err := w.reconcile()
	require.True(t, apierrors.IsConflict(err), "it passes: %v", err)
	again()
	w.converge()
	require.Equal(t, v1alpha1.ReasonClaimPending, w.condition(v1alpha1.ConditionVolumeReady).Reason)
}

// TestMachineThatTheCacheDoesNotKnow: a disk is served while a pod uses it that the cache does not
// know yet.
func TestMachineThatTheCacheDoesNotKnow(t *testing.T) {
	w := converged(t, nil)
	machine := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: "machine",
		Labels: map[string]string{v1alpha1.LabelIdentity: name.Name}}}
	require.NoError(t, w.Create(t.Context(), machine))
	require.NoError(t, w.Delete(t.Context(), w.identity()))
	again := w.late(machines)
	require.NoError(t, testtool.Err(w.reconcile()))
	again()
	w.deployment()
	require.Contains(t, w.condition(v1alpha1.ConditionServed).Message, "pod machine")
	require.NoError(t, w.Delete(t.Context(), machine))
	w.converge()
	w.missing(made, &appsv1.Deployment{})
}

// goes deletes the identity while the cache knows nothing of a kind, and looks whether all goes.
func (w *world) goes(unknown string) {
	w.t.Helper()
	again := w.late(unknown)
	require.NoError(w.t, w.Delete(w.t.Context(), w.identity()))
	for range 5 {
		require.NoError(w.t, testtool.Err(w.reconcile()))
		if unknown == claims {
			w.kubernetes() // the server's pod goes with its Deployment
		}
	}
	again()
	w.converge()
	w.missing(made, &appsv1.Deployment{}, &corev1.Service{})
	w.missing(claim, &corev1.PersistentVolumeClaim{})
	require.Equal(w.t, []string{v1alpha1.Finalizer}, w.identity().Finalizers)
}

// TestServerThatTheCacheDoesNotKnow: what was made a moment before an identity is deleted goes with
// it. Nobody else would delete it.
func TestServerThatTheCacheDoesNotKnow(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), nil)
	for range 2 { // the finalizer, and the server, which has no pod yet
		require.NoError(t, testtool.Err(w.reconcile()))
	}
	w.deployment()
	w.goes(servers)
}

// TestVolumeThatTheCacheDoesNotKnow: the same for the claim of a volume.
func TestVolumeThatTheCacheDoesNotKnow(t *testing.T) {
	w := converged(t, withVolume)
	require.NoError(t, w.Get(t.Context(), claim, &corev1.PersistentVolumeClaim{}))
	w.goes(claims)
}

// TestHandoverOfThen: a controller that still has the identity of another time does not give the
// disk to the machine of then.
func TestHandoverOfThen(t *testing.T) {
	w := converged(t, nil)
	w.annotate(v1alpha1.AnnotationHandoverTo, there)
	then := w.identity()
	w.converge()
	w.annotate(v1alpha1.AnnotationHandoverStep, "finish")
	w.converge()
	require.Equal(t, v1alpha1.ReasonHandedOver, w.condition(v1alpha1.ConditionHandedOver).Reason)
	w.r.Client = controllertest.Late(w.r.Client.(client.WithWatch), then)
	_, err := w.reconcile()
	require.True(t, apierrors.IsConflict(err), "%v", err)
	require.Empty(t, w.asked())
}

// asked is what the daemon shall do.
func (w *world) asked() string {
	return controllertest.Get(w.t, w, made.Namespace, made.Name,
		&corev1.Pod{}).Annotations[v1alpha1.AnnotationHandoverRequest]
}

// TestHandoverIsDoneOnce: a new pod of the server does not get a step again that is done.
func TestHandoverIsDoneOnce(t *testing.T) {
	w := converged(t, nil)
	w.annotate(v1alpha1.AnnotationHandoverTo, there)
	w.annotate(v1alpha1.AnnotationHandoverStep, "cancel")
	w.converge()
	require.Equal(t, v1alpha1.ReasonHandoverCancelled,
		w.condition(v1alpha1.ConditionHandedOver).Reason)
	var pod corev1.Pod
	require.NoError(t, w.Get(t.Context(), made, &pod))
	require.NoError(t, w.Delete(t.Context(), &pod))
	w.converge()
	pod = corev1.Pod{}
	require.NoError(t, w.Get(t.Context(), made, &pod))
	require.Empty(t, pod.Annotations[v1alpha1.AnnotationHandoverRequest])
}

// TestHandoverThatNobodyWants: the condition says nothing of a step that is asked for no more, and
// the daemon does not try it any more.
func TestHandoverThatNobodyWants(t *testing.T) {
	w := converged(t, nil)
	w.annotate(v1alpha1.AnnotationHandoverTo, "iqn.2020-01.test:nobody")
	w.converge()
	require.Equal(t, v1alpha1.ReasonFailed, w.condition(v1alpha1.ConditionHandedOver).Reason)
	w.annotate(v1alpha1.AnnotationHandoverTo, "")
	w.converge()
	require.Nil(t, apimeta.FindStatusCondition(w.identity().Status.Conditions,
		v1alpha1.ConditionHandedOver))
	require.Empty(t, w.asked())

	w.annotate(v1alpha1.AnnotationHandoverTo, there)
	w.converge()
	for _, other := range []string{"open", "opne"} { // done, and no step
		w.stale = true
		w.annotate(v1alpha1.AnnotationHandoverStep, "finish")
		require.NoError(t, testtool.Err(w.reconcile()))
		require.Contains(t, w.asked(), "finish")
		w.annotate(v1alpha1.AnnotationHandoverStep, other)
		require.NoError(t, testtool.Err(w.reconcile()))
		require.Empty(t, w.asked(), other)
		w.stale = false
	}
	w.annotate(v1alpha1.AnnotationHandoverStep, "finish")
	w.converge()
	done := w.condition(v1alpha1.ConditionHandedOver).Message
	w.annotate(v1alpha1.AnnotationHandoverTo, "")
	w.converge()
	require.Equal(t, done, w.condition(v1alpha1.ConditionHandedOver).Message)
	w.annotate(v1alpha1.AnnotationHandoverTo, there)
	w.annotate(v1alpha1.AnnotationHandoverStep, "finnish")
	w.converge()
	require.Equal(t, v1alpha1.ReasonInvalid, w.condition(v1alpha1.ConditionHandedOver).Reason)
	w.annotate(v1alpha1.AnnotationHandoverStep, "finish")
	w.converge()
	require.Equal(t, metav1.ConditionTrue, w.condition(v1alpha1.ConditionHandedOver).Status)
}

func TestHandoverSaysWhatItWaitsFor(t *testing.T) {
	w := converged(t, nil)
	w.stale = true
	w.annotate(v1alpha1.AnnotationHandoverTo, "iqn.2020-01.test:nobody")
	result := testtool.Must(w.reconcile())(t)
	require.NotZero(t, result.RequeueAfter)
	require.Contains(t, w.condition(v1alpha1.ConditionHandedOver).Message, "is asked to open")
	w.stale = false
	w.converge()
	c := w.condition(v1alpha1.ConditionHandedOver)
	require.Equal(t, v1alpha1.ReasonFailed, c.Reason)
	require.Equal(t, "wrong LUN or initiator", c.Message)

	w.annotate(v1alpha1.AnnotationHandoverStep, "go")
	w.converge()
	require.Contains(t, w.condition(v1alpha1.ConditionHandedOver).Message, `"go" is unknown`)
	w.annotate(v1alpha1.AnnotationHandoverStep, "")
	w.annotate(v1alpha1.AnnotationHandoverTo, there)
	w.silent = func() error { return errors.New("no route") }
	result = testtool.Must(w.reconcile())(t)
	require.NotZero(t, result.RequeueAfter)
	require.Contains(t, w.condition(v1alpha1.ConditionHandedOver).Message, "does not answer")
	var pod corev1.Pod
	require.NoError(t, w.Get(t.Context(), made, &pod))
	pod.Status.Conditions = nil
	require.NoError(t, w.Status().Update(t.Context(), &pod))
	require.NoError(t, testtool.Err(w.reconcile()))
	require.True(t, strings.HasPrefix(w.condition(v1alpha1.ConditionHandedOver).Message,
		"the disk is not served"))
}

// noRoute lets the daemon not answer, with another error at each try.
func (w *world) noRoute() {
	port := 40_000
	w.silent = func() error {
		port++
		return fmt.Errorf("dial tcp 192.0.2.7:%d: no route", port)
	}
}

// TestServerIsNotReached: a disk whose server does not say who uses it stays, and its condition
// says what people can do. The server is asked again after a while.
func TestServerIsNotReached(t *testing.T) {
	w := converged(t, nil)
	w.noRoute()
	require.NoError(t, w.Delete(t.Context(), w.identity()))
	for range 2 {
		require.Equal(t, 10*pollInterval, testtool.Must(w.reconcile())(t).RequeueAfter)
		is := w.condition(v1alpha1.ConditionServed)
		require.Equal(t, metav1.ConditionFalse, is.Status)
		require.Equal(t, v1alpha1.ReasonUnknown, is.Reason)
		require.Contains(t, is.Message, "pod "+made.Name+" does not say who is logged in")
		require.Contains(t, is.Message, "switch off the node node-1 if it is lost")
	}
	require.NoError(t, w.Get(t.Context(), made, &appsv1.Deployment{}))
}

// TestHandoverIsNotAnswered: nothing is written while the server of a disk that is handed over
// still does not answer, because each change of the status makes another request.
func TestHandoverIsNotAnswered(t *testing.T) {
	w := converged(t, nil)
	w.noRoute()
	w.annotate(v1alpha1.AnnotationHandoverTo, there)
	said := func() string {
		require.NotZero(t, testtool.Must(w.reconcile())(t).RequeueAfter)
		return w.condition(v1alpha1.ConditionHandedOver).Message
	}
	first := said()
	require.Contains(t, first, "does not answer")
	require.Equal(t, first, said())
}
