package renew

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/identity"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/source"
)

const repository = "registry.example.com/vm/a"

var (
	first, second, third = digest("1"), digest("2"), digest("3")
	image                = repository + ":1@" + first
)

func digest(of string) string { return "sha256:" + strings.Repeat(of, 64) }

// scene is a ready disk of a set whose tag has moved from the third image to the second. The set
// began from the first, as the disk.
type scene struct {
	*controllertest.World
	t *testing.T
	// refused is what the registry and the policy say of the new image; "": they admit it.
	refused string
	asked   []string // images that were asked for
	claim   *corev1.PersistentVolumeClaim
}

func newScene(t *testing.T, calls *controllertest.Calls, change func(*v1alpha1.VMIdentity)) *scene {
	t.Helper()
	s := &scene{t: t}
	set := &v1alpha1.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Name: "set"}}
	set.Spec = v1alpha1.DiskSpec{Image: image, Type: v1alpha1.PersistentVolume,
		Population: v1alpha1.Snapshot, Follow: &v1alpha1.FollowSpec{Tag: "stable"}}
	id := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "vm"}}
	id.Spec = v1alpha1.VMIdentitySpec{DiskSpec: *set.Spec.DeepCopy(), SetName: "set"}
	id.Spec.Follow = nil
	if change != nil {
		change(id)
	}
	s.World = controllertest.New(t, []controllertest.Index{
		{Object: &v1alpha1.VMIdentity{}, Field: source.Index, Of: source.By},
		{Object: &corev1.Pod{}, Field: objects.IndexIdentity, Of: objects.ByIdentity}},
		set, id, controllertest.DefaultClass())
	if calls != nil {
		s.Client = calls.Client(s.Client)
	}
	set.Status.Followed = &v1alpha1.FollowedStatus{Tag: "stable", Image: repository + "@" + second,
		Earlier: []string{third}}
	require.NoError(t, s.Base.Status().Update(t.Context(), set))
	fail := 0
	if calls != nil {
		fail, calls.Fail = calls.Fail, 0
	}
	s.settle()
	require.True(t, s.id().Status.Ready)
	s.claim = s.pvc()
	require.NotNil(t, s.claim)
	// Kubernetes keeps a claim until no pod uses it.
	s.claim.Finalizers = []string{"kubernetes.io/pvc-protection"}
	require.NoError(t, s.Base.Update(t.Context(), s.claim))
	if calls != nil {
		*calls = controllertest.Calls{Fail: fail, Late: calls.Late, Err: calls.Err}
	}
	return s
}

// populator gives each image a snapshot of its own.
type populator struct{}

func (populator) Source(_ context.Context, id *v1alpha1.VMIdentity, _ *string) (
	*corev1.TypedObjectReference, resource.Quantity, string, string, error) {
	return &corev1.TypedObjectReference{Kind: "VolumeSnapshot",
		Name: v1alpha1.DigestOf(id.Spec.Image)[7:9]}, resource.Quantity{}, "", "", nil
}

func (s *scene) controllers() []controllertest.Reconciler {
	return []controllertest.Reconciler{
		&identity.Reconciler{Client: s.Client, Live: s.Live, Events: s, Options: identity.Options{
			ClaimSize: resource.MustParse("20Gi"), Populator: populator{}}},
		&Reconciler{Client: s.Client, Live: s.Live, Events: s, Admit: s.admit},
	}
}

func (s *scene) admit(_ context.Context, namespace, image string) (string, string, error) {
	require.Equal(s.t, controllertest.Namespace, namespace)
	s.asked = append(s.asked, image)
	if s.refused != "" {
		return s.refused, "no", nil
	}
	return "", "", nil
}

func (s *scene) settle() {
	s.t.Helper()
	s.Settle(s.t, s.controllers, "vm")
}

func (s *scene) id() *v1alpha1.VMIdentity {
	s.t.Helper()
	return controllertest.Get(s.t, s.Base, controllertest.Namespace, "vm", &v1alpha1.VMIdentity{})
}

// pvc is the claim, or nil.
func (s *scene) pvc() *corev1.PersistentVolumeClaim {
	s.t.Helper()
	c := &corev1.PersistentVolumeClaim{}
	if !controllertest.There(s.t, s.Base, controllertest.Namespace, "vmid-vm", c) {
		return nil
	}
	return c
}

func (s *scene) change(f func(*v1alpha1.VMIdentity)) {
	s.t.Helper()
	id := s.id()
	f(id)
	require.NoError(s.t, s.Base.Update(s.t.Context(), id))
}

func (s *scene) annotate(value string) {
	s.t.Helper()
	s.change(func(id *v1alpha1.VMIdentity) {
		metav1.SetMetaDataAnnotation(&id.ObjectMeta, v1alpha1.AnnotationRenew, value)
	})
}

// released lets the claim go, as Kubernetes does when no pod has it.
func (s *scene) released() {
	s.t.Helper()
	c := s.pvc()
	require.NotNil(s.t, c)
	require.NotNil(s.t, c.DeletionTimestamp)
	c.Finalizers = nil
	require.NoError(s.t, s.Base.Update(s.t.Context(), c))
}

func (s *scene) says(reason, part string) {
	s.t.Helper()
	c := meta.FindStatusCondition(s.id().Status.Conditions, v1alpha1.ConditionRenewed)
	require.NotNil(s.t, c)
	require.Equal(s.t, reason, c.Reason, c.Message)
	require.Contains(s.t, c.Message, part)
	require.Equal(s.t, reason == v1alpha1.ReasonRenewed, c.Status == metav1.ConditionTrue)
}

// stays: the disk is as it was, and pods may start with it.
func (s *scene) stays() {
	s.t.Helper()
	id, claim := s.id(), s.pvc()
	require.Equal(s.t, image, id.Spec.Image)
	require.Nil(s.t, id.Status.Renew)
	require.True(s.t, id.Status.Ready)
	require.NotNil(s.t, claim)
	require.Equal(s.t, s.claim.UID, claim.UID)
	require.Nil(s.t, claim.DeletionTimestamp)
}

// renewed: the disk began anew from an image with this digest, in a claim of its own.
func (s *scene) renewed(digest string) {
	s.t.Helper()
	id, claim := s.id(), s.pvc()
	require.Equal(s.t, repository+"@"+digest, id.Spec.Image)
	require.Equal(s.t, "stable", id.Spec.FollowedTag)
	require.Nil(s.t, id.Status.Renew)
	require.True(s.t, id.Status.Ready)
	require.Equal(s.t, "vmid-vm", id.Status.ClaimName)
	require.NotNil(s.t, claim)
	require.NotEqual(s.t, s.claim.UID, claim.UID)
	require.Equal(s.t, id.Spec.Content(), claim.Annotations[v1alpha1.AnnotationContent])
	require.Equal(s.t, digest[7:9], claim.Spec.DataSourceRef.Name)
	s.says("Renewed", "anew from "+repository+"@"+digest+
		", and what guests had written to the one from "+image+" is gone")
}

// TestRenew: the disk begins anew from what the tag names or has named, in another claim, with the
// password that it had. Two events say so, the first one before anything is deleted.
func TestRenew(t *testing.T) {
	for name, to := range map[string]string{"named": second, "named before": third} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, nil, nil)
			s.annotate(to)
			s.settle()
			require.Equal(t, []string{repository + "@" + to}, s.asked)
			s.says("Renewing", "claim vmid-vm")
			require.False(t, s.id().Status.Ready, "no pod starts")
			require.Equal(t, image, s.id().Spec.Image, "before the former disk is gone")
			require.Equal(t, []string{"Warning Renewing"}, s.Events())
			s.released()
			s.settle()
			s.renewed(to)
			require.NotContains(t, s.id().Annotations, v1alpha1.AnnotationRenew)
			require.Equal(t, []string{"Warning Renewing", "Normal Renewed"}, s.Events())
			require.Equal(t, 1, s.Made("Secret"))
			require.Equal(t, 2, s.Made("PersistentVolumeClaim"))

			// The same wish again, as from a manifest, throws nothing away.
			claim := s.pvc()
			s.annotate(to)
			s.settle()
			s.renewed(to)
			require.Equal(t, claim.UID, s.pvc().UID)
			require.NotContains(t, s.id().Annotations, v1alpha1.AnnotationRenew)
		})
	}
}

// TestSameImage: the digest that the disk has asks for nothing.
func TestSameImage(t *testing.T) {
	s := newScene(t, nil, nil)
	s.annotate(first)
	s.settle()
	s.stays()
	s.says("Renewed", "already: nothing was changed")
	require.NotContains(t, s.id().Annotations, v1alpha1.AnnotationRenew)
}

// TestRefused: a wish that cannot be granted is answered, and nothing is thrown away.
func TestRefused(t *testing.T) {
	anything := func(*scene) {}
	for _, c := range []struct {
		digest       string
		given        func(*v1alpha1.VMIdentity)
		then         func(*scene)
		reason, says string
	}{
		{second[:70], nil, anything, "Invalid", "must be the digest of an image"},
		{"", nil, anything, "Invalid", "must be the digest of an image"},
		{"followed", nil, anything, "Invalid", "must be the digest of an image"},
		{repository + "@" + second, nil, anything, "Invalid", "must be the digest of an image"},
		{digest("9"), nil, anything, "Invalid", "neither has nor had the image " + repository +
			"@" + digest("9")},
		{second, nil, func(s *scene) { s.refused = "NotSigned" }, "NotSigned",
			"the disk stays as it is, because " + repository + "@" + second + " is not used: no"},
		{second, nil, func(s *scene) { s.refused = "Unverified" }, "Unverified", "no"},
		{second, func(id *v1alpha1.VMIdentity) { id.Spec.SetName = "" }, anything, "Invalid",
			"is of no VMIdentitySet"},
		{second, func(id *v1alpha1.VMIdentity) { id.Spec.SetName = "other" }, anything, "Invalid",
			"there is no VMIdentitySet other"},
		{second, func(id *v1alpha1.VMIdentity) { id.Spec.Population = v1alpha1.Overlay }, anything,
			"Invalid", "have the image of their set as a volume"},
		{second, nil, func(s *scene) {
			set := controllertest.Get(s.t, s.Base, controllertest.Namespace, "set",
				&v1alpha1.VMIdentitySet{})
			set.Spec.Image = "registry.example.com/other@" + first
			require.NoError(s.t, s.Base.Update(s.t.Context(), set))
			set.Status.Followed.Image = "registry.example.com/other@" + second
			require.NoError(s.t, s.Base.Status().Update(s.t.Context(), set))
		}, "Invalid", "neither has nor had the image " + repository},
		{second, nil, func(s *scene) {
			s.claim.Annotations[v1alpha1.AnnotationContent] = "Snapshot another"
			require.NoError(s.t, s.Base.Update(s.t.Context(), s.claim))
		}, "Invalid", "not as it was made"},
	} {
		s := newScene(t, nil, c.given)
		c.then(s)
		s.annotate(c.digest)
		s.settle()
		s.says(c.reason, c.says)
		require.Nil(t, s.id().Status.Renew)
		require.Equal(t, s.claim.UID, s.pvc().UID, c.says)
		require.Nil(t, s.pvc().DeletionTimestamp)

		// Without the wish, there is nothing to say.
		s.change(func(id *v1alpha1.VMIdentity) { delete(id.Annotations, v1alpha1.AnnotationRenew) })
		s.settle()
		require.Nil(t, meta.FindStatusCondition(s.id().Status.Conditions, "Renewed"))
	}
}

// TestWaits: what has the disk, or needs it first, comes first.
func TestWaits(t *testing.T) {
	pod := func(labels map[string]string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "user", Labels: labels}}
	}
	clone := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "clone"}}
	clone.Spec.Source = &v1alpha1.DiskSource{Identity: "vm"}
	snapshot := &v1alpha1.VMIdentitySnapshot{ObjectMeta: metav1.ObjectMeta{Name: "monday"}}
	snapshot.Spec.IdentityName = "vm"
	numbered := v1alpha1.Numbered(v1alpha1.LabelIdentity, 2)
	for says, o := range map[string]client.Object{
		"pod user uses it": pod(map[string]string{v1alpha1.LabelIdentity: "vm"}),
		"pod user uses":    pod(map[string]string{v1alpha1.LabelSeveral: "true", numbered: "vm"}),
		"VMIdentity clone begins from it and has no volume": clone,
		"VMIdentitySnapshot monday of it is not ready":      snapshot,
	} {
		s := newScene(t, nil, func(id *v1alpha1.VMIdentity) {
			id.Spec.CloneableBy = []string{"clone"}
		})
		o := o.DeepCopyObject().(client.Object)
		s.Make(t, o)
		s.annotate(second)
		s.settle()
		s.says("InUse", says)
		s.stays()
		require.Empty(t, s.asked, "the registry is asked when the disk is free")

		// If it comes when the renewal has begun, that is taken back.
		require.NoError(t, s.Base.Delete(t.Context(), o))
		s.begun()
		o.SetResourceVersion("")
		s.Make(t, o)
		s.settle()
		s.says("InUse", says)
		s.stays()
		require.NoError(t, s.Base.Delete(t.Context(), o))
		s.settle()
		s.released()
		s.settle()
		s.renewed(second)
	}

	for says, change := range map[string]func(id *v1alpha1.VMIdentity){
		"pod b uses it": func(id *v1alpha1.VMIdentity) {
			id.Status.UsedBy = &corev1.ObjectReference{Name: "b"}
		},
		"its export comes first": func(id *v1alpha1.VMIdentity) {
			id.Status.Export = &v1alpha1.ExportStatus{Running: true}
		},
	} {
		s := newScene(t, nil, nil)
		id := s.id()
		change(id)
		require.NoError(t, s.Base.Status().Update(t.Context(), id))
		s.annotate(second)
		s.settle()
		s.says("InUse", says)
		s.stays()
	}
	s := newScene(t, nil, func(id *v1alpha1.VMIdentity) {
		id.Spec.Export = &v1alpha1.ExportSpec{Reference: "registry.example.com/b:1"}
	})
	s.annotate(second)
	s.settle()
	s.says("InUse", "its export comes first")
}

// begun lets the renewal begin, and nothing more.
func (s *scene) begun() {
	s.t.Helper()
	for s.id().Status.Renew == nil {
		_, err := s.controllers()[1].Reconcile(s.t.Context(), ctrl.Request{
			NamespacedName: client.ObjectKeyFromObject(s.id())})
		require.NoError(s.t, err)
	}
	s.says("Renewing", "what guests have written to the one from "+image+" is deleted")
}

// TestPodIsFaster: a pod that gets the disk at the same time wins, or loses, and never both.
func TestPodIsFaster(t *testing.T) {
	s := newScene(t, nil, nil)
	before := s.id()
	s.annotate(second)
	s.begun()
	// As package pod gives a disk to a pod.
	after := before.DeepCopy()
	after.Status.UsedBy = &corev1.ObjectReference{Name: "b"}
	require.ErrorContains(t, objects.PatchStatus(t.Context(), s.Base, before, after), "modified")
}

// TestServer: the server of the disk ends before the claim is deleted.
func TestServer(t *testing.T) {
	s := newScene(t, nil, func(id *v1alpha1.VMIdentity) {
		id.Spec.Attachment, id.Spec.Population = v1alpha1.Service, v1alpha1.Overlay
		id.Finalizers = []string{v1alpha1.FinalizerService}
		id.Status.Conditions = []metav1.Condition{{Type: "Served", Status: "True", Reason: "x",
			Message: "pod s serves the disk"}}
	})
	server := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "s", Labels: map[string]string{
		v1alpha1.LabelIdentity: "vm", v1alpha1.LabelServer: "vm"}}}
	s.Make(t, server)
	s.annotate(second)
	s.settle()
	s.says("Renewing", "the server of the disk ends first: pod s serves")
	require.Nil(t, s.pvc().DeletionTimestamp)
	require.NoError(t, s.Base.Delete(t.Context(), server))
	s.change(func(id *v1alpha1.VMIdentity) { id.Finalizers = []string{v1alpha1.Finalizer} })
	s.settle()
	require.NotNil(t, s.pvc().DeletionTimestamp)
}

// TestChangedInTheMiddle: as long as the claim is there, the wish can be taken back or changed.
// Afterwards, it is carried out, and then the next one.
func TestChangedInTheMiddle(t *testing.T) {
	s := newScene(t, nil, nil)
	s.annotate(second)
	s.begun()
	s.change(func(id *v1alpha1.VMIdentity) { delete(id.Annotations, v1alpha1.AnnotationRenew) })
	s.settle()
	s.stays()
	require.Nil(t, meta.FindStatusCondition(s.id().Status.Conditions, "Renewed"))

	s.annotate(second)
	s.begun()
	s.annotate(third)
	s.settle()
	require.Equal(t, repository+"@"+third, s.id().Status.Renew.Image)
	s.annotate(second)
	s.settle()
	require.Equal(t, repository+"@"+third, s.id().Status.Renew.Image, "the claim is being deleted")
	s.released()
	for s.id().Spec.Image == image || s.id().Status.Renew != nil {
		_, err := s.controllers()[1].Reconcile(t.Context(), ctrl.Request{
			NamespacedName: client.ObjectKeyFromObject(s.id())})
		require.NoError(t, err)
	}
	require.Equal(t, repository+"@"+third, s.id().Spec.Image)
	require.Equal(t, second, s.id().Annotations[v1alpha1.AnnotationRenew])
	s.settle()
	s.says("Renewed", "anew from "+repository+"@"+second+", and what guests had written to the "+
		"one from "+repository+"@"+third)
	require.Equal(t, second[7:9], s.pvc().Spec.DataSourceRef.Name)
}

// TestEachWriteFails: whatever write fails, carried out or not, and after a restart at each step,
// the disk begins anew once, and no claim of the former image is ever the disk of the new one.
func TestEachWriteFails(t *testing.T) {
	controllertest.EachWriteFault(t, func(t *testing.T, calls *controllertest.Calls) {
		s := newScene(t, calls, nil)
		s.annotate(second)
		restarts := 0
		for s.id().Spec.Image == image || s.id().Annotations[v1alpha1.AnnotationRenew] != "" ||
			!s.id().Status.Ready {
			require.Less(t, restarts, 60)
			restarts++
			for _, r := range s.controllers() {
				// Errors are tried again by controllers that are made anew.
				_, _ = r.Reconcile(t.Context(), ctrl.Request{
					NamespacedName: client.ObjectKeyFromObject(s.id())})
				id, claim := s.id(), s.pvc()
				if claim != nil && id.Status.Ready {
					require.Equal(t, id.Spec.Content(),
						claim.Annotations[v1alpha1.AnnotationContent])
					require.Nil(t, claim.DeletionTimestamp)
				}
				require.True(t, id.Spec.Image == image || claim == nil || claim.UID != s.claim.UID)
				if claim != nil && claim.UID != s.claim.UID {
					require.Equal(t, second[7:9], claim.Spec.DataSourceRef.Name)
				}
			}
			if c := s.pvc(); c != nil && c.DeletionTimestamp != nil {
				s.released()
			}
		}
		s.renewed(second)
	})
}
