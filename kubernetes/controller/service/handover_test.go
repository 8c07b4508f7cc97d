package service

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
)

// TestHandoverIsDoneOnce: a new pod of the server does not get a step again that is done.
func TestHandoverIsDoneOnce(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), nil)
	w.converge()
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
	w := newWorld(t, new(controllertest.Calls), nil)
	w.converge()
	w.stale = true
	w.annotate(v1alpha1.AnnotationHandoverTo, "iqn.2020-01.test:nobody")
	result, err := w.reconcile()
	require.NoError(t, err)
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
	result, err = w.reconcile()
	require.NoError(t, err)
	require.NotZero(t, result.RequeueAfter)
	require.Contains(t, w.condition(v1alpha1.ConditionHandedOver).Message, "does not answer")
	var pod corev1.Pod
	require.NoError(t, w.Get(t.Context(), made, &pod))
	pod.Status.Conditions = nil
	require.NoError(t, w.Status().Update(t.Context(), &pod))
	_, err = w.reconcile()
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(w.condition(v1alpha1.ConditionHandedOver).Message,
		"the disk is not served"))
}
