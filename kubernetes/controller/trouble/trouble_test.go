package trouble

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/status"
)

// TestTroubled: people see the worst of what a pod's disks are doing, once it begins, when it is
// another trouble, and when it is over. A disk that works has no condition.
func TestTroubled(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "vm",
		Labels: map[string]string{v1alpha1.LabelIdentity: "vm"}}}
	pod.Spec.InitContainers = []corev1.Container{{Name: v1alpha1.DiskContainer}}
	pod.Status.PodIP = "192.0.2.7"
	w := controllertest.New(t, []controllertest.Index{
		{Object: &corev1.Pod{}, Field: objects.IndexIdentity, Of: objects.ByIdentity}}, pod,
		&v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "vm"}})
	var luns []status.LUN
	var failed error
	questions := 0
	r := &Reconciler{Kit: objects.Kit{Client: w.Client, Live: w.Live, Events: w},
		Ask: func(_ context.Context, address string) (*status.Status, error) {
			require.Equal(t, "192.0.2.7:9260", address)
			questions++
			return &status.Status{LUNs: luns}, failed
		}}
	key := types.NamespacedName{Namespace: "test", Name: "vm"}
	reconcile := func() *metav1.Condition {
		t.Helper()
		_, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: key})
		require.NoError(t, err)
		id := &v1alpha1.VMIdentity{}
		require.NoError(t, w.Base.Get(t.Context(), client.ObjectKey(key), id))
		return meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionTroubled)
	}
	now := func(states ...status.DiskState) *metav1.Condition {
		t.Helper()
		luns = nil
		for i, state := range states {
			luns = append(luns, status.LUN{LUN: uint16(i + 1), Condition: status.Condition{
				State: state, Reason: "why " + strings.Repeat("é", maxText), Since: time.Now()}})
		}
		r.forget(key)
		return reconcile()
	}
	require.Nil(t, now(status.DiskReady, status.DiskStarting))
	c := now(status.DiskReady, status.DiskNoSpace, status.DiskWaiting)
	require.Equal(t, metav1.ConditionTrue, c.Status)
	require.Equal(t, v1alpha1.ReasonDiskWaits, c.Reason)
	require.Contains(t, c.Message, "LUN 3 is waiting since ")
	require.LessOrEqual(t, len(c.Message), maxText)
	first := c.Message
	require.Equal(t, first, now(status.DiskWaiting).Message, "the same trouble is told once")
	require.Equal(t, v1alpha1.ReasonDiskFull, now(status.DiskNoSpace).Reason)
	asked := questions
	require.Equal(t, v1alpha1.ReasonDiskFull, reconcile().Reason)
	require.Equal(t, asked, questions, "not asked more often than once a minute")
	failed = errors.New("no route")
	require.Equal(t, v1alpha1.ReasonDiskFull, now().Reason, "nobody knows")
	failed = nil
	require.Equal(t, v1alpha1.ReasonDiskFull, now().Reason, "the pod has just begun")
	require.Equal(t, v1alpha1.ReasonDiskFull, now(status.DiskStarting).Reason)
	c = now(status.DiskReady)
	require.Equal(t, metav1.ConditionFalse, c.Status)
	require.Equal(t, v1alpha1.ReasonDiskRecovered, c.Reason)
	require.Equal(t, v1alpha1.ReasonDiskFailed, now(status.DiskFailed).Reason)
	require.NoError(t, w.Base.Delete(t.Context(), pod))
	require.Equal(t, v1alpha1.ReasonNotInUse, reconcile().Reason)
}
