package fill

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/status"
)

// TestPageThatHangs: while a pod does not say how far it is, Reconcile returns, so that other
// claims are filled. Claims are as far as they were until it answers.
func TestPageThatHangs(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls))
	w.held = true
	w.settle()
	pod := w.pod(w.job())
	pod.Status.Phase, pod.Status.PodIP = corev1.PodRunning, "192.0.2.7"
	require.NoError(t, w.Status().Update(t.Context(), pod))
	answered, answers := make(chan types.NamespacedName, 10), make(chan int64)
	w.r.aside.Answered = func(image types.NamespacedName) { answered <- image }
	w.r.Ask = func(context.Context, string) (status.Progress, error) {
		return status.Progress{Done: <-answers, Total: 100}, nil
	}
	for _, done := range []int64{20, 60} {
		before := w.image().Status.Claims[0].Progress
		for range 3 {
			w.reconcile() // it would not return
			require.Equal(t, before, w.image().Status.Claims[0].Progress)
		}
		answers <- done
		require.Equal(t, types.NamespacedName{Namespace: ns, Name: "fedora"}, <-answered)
		w.reconcile()
		require.Equal(t, fmt.Sprintf("%d%%", done), w.image().Status.Claims[0].Progress)
	}
}
