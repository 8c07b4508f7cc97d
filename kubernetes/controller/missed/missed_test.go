package missed

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
)

// TestLook: a pod that admission has missed is named by one event and by the condition of its set,
// until it is gone. Pods with their disk, finished ones, and those of others are not.
func TestLook(t *testing.T) {
	set := &v1alpha1.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Name: "set"}}
	other := &v1alpha1.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Name: "other"}}
	w := controllertest.New(t, nil, set, other)
	pod := func(name, annotation, label string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name,
			Annotations: map[string]string{annotation: "set"}}}
		if label != "" {
			p.Labels = map[string]string{v1alpha1.LabelSet: label}
		}
		w.Make(t, p)
		return p
	}
	late := pod("late", v1alpha1.AnnotationSet, "")
	legacy := pod("legacy", v1alpha1.AnnotationSetLegacy, "")
	pod("with", v1alpha1.AnnotationSet, "set")
	pod("foreign", "example.com/x", "")
	done := pod("done", v1alpha1.AnnotationSet, "")
	done.Status.Phase = corev1.PodSucceeded
	require.NoError(t, w.Base.Status().Update(t.Context(), done))

	watcher := &Watcher{Client: w.Client, Live: w.Client, Events: w}
	condition := func(name string) *metav1.Condition {
		s := controllertest.Get(t, w.Base, controllertest.Namespace, name,
			&v1alpha1.VMIdentitySet{})
		return meta.FindStatusCondition(s.Status.Conditions, v1alpha1.ConditionPodsWithoutDisk)
	}
	for range 2 {
		require.NoError(t, watcher.Look(t.Context()))
		c := condition("set")
		require.NotNil(t, c)
		require.Equal(t, metav1.ConditionTrue, c.Status)
		require.Contains(t, c.Message, "make them again: late, legacy")
		require.Equal(t, []string{"Warning NoDisk", "Warning NoDisk"}, w.Events())
		require.Nil(t, condition("other"))
	}
	writes := w.Writes()
	require.NoError(t, watcher.Look(t.Context()))
	require.Equal(t, writes, w.Writes(), "nothing is written while nothing changes")
	for _, p := range []*corev1.Pod{late, legacy} {
		require.NoError(t, w.Base.Delete(t.Context(), p))
	}
	require.NoError(t, watcher.Look(t.Context()))
	require.Equal(t, metav1.ConditionFalse, condition("set").Status)
}

// TestLookAtAMachine: a machine of KubeVirt without its disks is named by the set of each disk.
func TestLookAtAMachine(t *testing.T) {
	w := controllertest.New(t, nil,
		&v1alpha1.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Name: "set"}},
		&v1alpha1.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Name: "other"}})
	w.Make(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "machine",
		Labels: map[string]string{"kubevirt.io": "virt-launcher"},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "kubevirt.io/v1", Name: "m",
			Kind: "VirtualMachineInstance", UID: "m", Controller: new(true)}},
		Annotations: map[string]string{v1alpha1.AnnotationSet: "set",
			v1alpha1.AnnotationSet + ".1": "set", v1alpha1.AnnotationSet + ".2": "other"}}})
	watcher := &Watcher{Client: w.Client, Live: w.Client, Events: w}
	require.NoError(t, watcher.Look(t.Context()))
	for _, name := range []string{"set", "other"} {
		s := controllertest.Get(t, w.Base, controllertest.Namespace, name,
			&v1alpha1.VMIdentitySet{})
		c := meta.FindStatusCondition(s.Status.Conditions, v1alpha1.ConditionPodsWithoutDisk)
		require.NotNil(t, c, name)
		require.Regexp(t, "again: machine$", c.Message)
	}
	require.Equal(t, []string{"Warning NoDisk"}, w.Events())
}

// failing is a reader that fails, and counts.
type failing struct {
	client.Reader
	asked atomic.Int64
}

func (f *failing) List(context.Context, client.ObjectList, ...client.ListOption) error {
	f.asked.Add(1)
	return errors.New("the API server is away")
}

// TestFailedLook: a look that fails is repeated within a minute, also long after the start.
func TestFailedLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &failing{}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- (&Watcher{Live: f}).Start(ctx) }()
		time.Sleep(early + time.Minute)
		before := f.asked.Load()
		time.Sleep(time.Minute)
		require.Greater(t, f.asked.Load(), before)
		stop()
		require.NoError(t, <-ended)
	})
}
