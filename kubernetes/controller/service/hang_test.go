package service

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
)

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
	w := newWorld(t, new(controllertest.Calls), nil)
	w.converge()
	w.noRoute()
	require.NoError(t, w.Delete(t.Context(), w.identity()))
	for range 2 {
		result, err := w.reconcile()
		require.NoError(t, err)
		require.Equal(t, 10*pollInterval, result.RequeueAfter)
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
	w := newWorld(t, new(controllertest.Calls), nil)
	w.converge()
	w.noRoute()
	w.annotate(v1alpha1.AnnotationHandoverTo, there)
	said := func() string {
		result, err := w.reconcile()
		require.NoError(t, err)
		require.NotZero(t, result.RequeueAfter)
		return w.condition(v1alpha1.ConditionHandedOver).Message
	}
	first := said()
	require.Contains(t, first, "does not answer")
	require.Equal(t, first, said())
}
