package service

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
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
	was := w.r.Client
	w.r.Client = interceptor.NewClient(was.(client.WithWatch), interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object,
			opts ...client.GetOption) error {
			_, service := o.(*corev1.Service)
			_, deployment := o.(*appsv1.Deployment)
			if kind == servers && (service || deployment) {
				return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
			}
			return c.Get(ctx, key, o, opts...)
		},
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
		_, err := w.reconcile()
		require.NoError(w.t, err)
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
	asked := func() string {
		return controllertest.Get(t, w, made.Namespace, made.Name,
			&corev1.Pod{}).Annotations[v1alpha1.AnnotationHandoverRequest]
	}
	last := asked()
	require.Contains(t, last, "finish")
	w.r.Client = interceptor.NewClient(w.r.Client.(client.WithWatch), interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object,
			opts ...client.GetOption) error {
			if id, is := o.(*v1alpha1.VMIdentity); is {
				then.DeepCopyInto(id)
				return nil
			}
			return c.Get(ctx, key, o, opts...)
		}})
	_, err := w.reconcile()
	require.True(t, apierrors.IsConflict(err), "%v", err)
	require.Equal(t, last, asked())
}
