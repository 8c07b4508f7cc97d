package metrics_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/metrics"
)

// lists is a reader of its own objects.
type lists struct {
	identities []api.VMIdentity
	pods       []corev1.Pod
	err        error
}

func (l lists) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errors.New("not here")
}

func (l lists) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	switch list := list.(type) {
	case *api.VMIdentityList:
		list.Items = l.identities
	case *corev1.PodList:
		list.Items = l.pods
	}
	return l.err
}

func identity(namespace string, conditions ...metav1.Condition) api.VMIdentity {
	return api.VMIdentity{ObjectMeta: metav1.ObjectMeta{Namespace: namespace,
		CreationTimestamp: metav1.Unix(50, 0)},
		Status: api.VMIdentityStatus{Conditions: conditions}}
}

func condition(kind string, status metav1.ConditionStatus, reason string,
	since int64) metav1.Condition {
	return metav1.Condition{Type: kind, Status: status, Reason: reason,
		LastTransitionTime: metav1.NewTime(time.Unix(since, 0))}
}

func TestSeries(t *testing.T) {
	gated := corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: api.Gate}}}
	further := corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: api.Gate + ".9"}}}
	foreign := corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: api.Gate + "s"}}}
	at := func(seconds int64) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "a", CreationTimestamp: metav1.Unix(seconds, 0)}
	}
	going := at(1)
	going.DeletionTimestamp = &metav1.Time{}
	all := lists{
		identities: []api.VMIdentity{
			identity("a", condition("Ready", "True", "Ready", 30),
				condition("Hydrated", "False", "Hydrating", 31)),
			identity("a", condition("Ready", "True", "Ready", 20)),
			identity("b", condition("Ready", "False", "ClaimLost", 40)),
			identity("b"),
		},
		pods: []corev1.Pod{{ObjectMeta: at(70), Spec: gated}, {ObjectMeta: at(60), Spec: further},
			{ObjectMeta: at(2)}, {ObjectMeta: at(3), Spec: foreign},
			{ObjectMeta: going, Spec: gated}},
	}
	want, err := os.Open("testdata/metrics.txt")
	require.NoError(t, err)
	defer want.Close()
	require.NoError(t, testutil.CollectAndCompare(metrics.New(all), want))
	all.err = errors.New("no cache")
	require.Zero(t, testutil.CollectAndCount(metrics.New(all)))
}
