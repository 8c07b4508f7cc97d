package pod

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
)

// TestImageThatIsHeld: a pod waits while the image of its ready disk may not be used, whatever the
// status says.
func TestImageThatIsHeld(t *testing.T) {
	w := newWorld(t, newSet(), gatedPod("a", "vm"))
	refusing := controllertest.Refusing(v1alpha1.ReasonNotSigned)
	work := func() []controllertest.Reconciler {
		all := restart(w)()
		for _, r := range all {
			if pods, ok := r.(*Reconciler); ok {
				pods.Images = &refusing
			}
		}
		return all
	}
	w.Settle(t, work, "vm")
	require.True(t, identityOf(t, w, "vm").Status.Ready)
	require.True(t, gated(t, w, "a"))
	require.Contains(t, w.Events(), "Warning NotSigned")
	refusing = ""
	w.Settle(t, work, "vm")
	require.False(t, gated(t, w, "a"))
}

// TestFollowedTag: a new identity begins from what the tag of its set names, and stays there when
// the tag moves: its next pod starts, as that of a new one does.
func TestFollowedTag(t *testing.T) {
	filled := func(name, id string) *corev1.Pod {
		p := gatedPod(name, id)
		p.Spec.Volumes, p.Spec.InitContainers[0].VolumeMounts = nil, nil
		return p
	}
	set := newSet(func(s *v1alpha1.VMIdentitySet) {
		s.Spec.Population = v1alpha1.Snapshot
		s.Spec.Follow = &v1alpha1.FollowSpec{Tag: "stable"}
	})
	w := newWorld(t, set, controllertest.Class("csi"))
	work := func() []controllertest.Reconciler {
		return []controllertest.Reconciler{restart(w)()[0]}
	}
	follow := func(image string) {
		set, _ := get(t, w, "set", &v1alpha1.VMIdentitySet{})
		set.Status.Followed = &v1alpha1.FollowedStatus{Tag: "stable", Image: image}
		require.NoError(t, w.Base.Status().Update(t.Context(), set))
	}
	start := func(pod, name string) *v1alpha1.VMIdentity {
		t.Helper()
		w.Make(t, filled(pod, name))
		w.Settle(t, work, name)
		id := identityOf(t, w, name)
		id.Status.Ready = true
		require.NoError(t, w.Base.Status().Update(t.Context(), id))
		w.Settle(t, work, name)
		require.False(t, gated(t, w, pod), pod)
		return identityOf(t, w, name)
	}
	follow("registry.example.com/a@sha256:cc")
	id := start("one", "vm")
	require.Equal(t, "registry.example.com/a@sha256:cc", id.Spec.Image)
	require.Equal(t, "stable", id.Spec.FollowedTag)
	require.Nil(t, id.Spec.Follow)
	follow("registry.example.com/a@sha256:dd")
	remove(t, w, named(&corev1.Pod{}, "one"))
	w.Settle(t, work, "vm")
	require.Equal(t, "registry.example.com/a@sha256:cc", start("two", "vm").Spec.Image)
	require.Equal(t, "registry.example.com/a@sha256:dd", start("other", "vm2").Spec.Image)

	// A set that follows nothing any more changes no disk either.
	set, _ = get(t, w, "set", &v1alpha1.VMIdentitySet{})
	set.Spec.Follow = nil
	require.NoError(t, w.Base.Update(t.Context(), set))
	remove(t, w, named(&corev1.Pod{}, "two"))
	w.Settle(t, work, "vm")
	require.Equal(t, "registry.example.com/a@sha256:cc", start("three", "vm").Spec.Image)
	require.Equal(t, image, start("last", "vm3").Spec.Image)
}
