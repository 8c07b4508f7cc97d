package service

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

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
