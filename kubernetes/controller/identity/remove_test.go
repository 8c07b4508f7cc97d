package identity

import (
	"errors"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// delete deletes the identity as a person does, and then does what Kubernetes' garbage collector
// does for a way of deletion.
func (w *world) delete(policy metav1.DeletionPropagation) {
	w.t.Helper()
	ctx, id := w.t.Context(), w.identity()
	if policy == metav1.DeletePropagationOrphan {
		id.Finalizers = append(id.Finalizers, metav1.FinalizerOrphanDependents)
		require.NoError(w.t, w.Base.Update(ctx, id))
	}
	require.NoError(w.t, w.Base.Delete(ctx, id))
	if policy == metav1.DeletePropagationOrphan {
		w.settle() // nothing happens before the collector has done its work
	}
	for _, o := range []client.Object{&corev1.PersistentVolumeClaim{}, &corev1.Secret{}} {
		if !w.get("vmid-vm", o) || !slices.ContainsFunc(o.GetOwnerReferences(),
			func(r metav1.OwnerReference) bool { return r.UID == id.UID }) {
			continue
		}
		switch policy {
		case metav1.DeletePropagationForeground:
			require.NoError(w.t, w.Base.Delete(ctx, o))
		case metav1.DeletePropagationOrphan:
			o.SetOwnerReferences(nil)
			require.NoError(w.t, w.Base.Update(ctx, o))
		}
	}
	if policy == metav1.DeletePropagationOrphan {
		id = w.identity()
		id.Finalizers = slices.DeleteFunc(id.Finalizers, func(name string) bool {
			return name == metav1.FinalizerOrphanDependents
		})
		require.NoError(w.t, w.Base.Update(ctx, id))
	}
}

// TestEveryWayOfDeletion: while a pod uses the disk, nothing of it goes, whatever way of deletion a
// person chooses. Afterwards everything goes, but for the claim that somebody wants to keep.
func TestEveryWayOfDeletion(t *testing.T) {
	for _, policy := range []metav1.DeletionPropagation{metav1.DeletePropagationBackground,
		metav1.DeletePropagationForeground, metav1.DeletePropagationOrphan} {
		user := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "vm",
			Labels: map[string]string{v1alpha1.LabelIdentity: "vm"}}}
		w := settled(t, v1alpha1.DiskSpec{}, user)
		w.bind("21Gi")
		w.settle()
		uid := w.claim().UID
		w.delete(policy)
		w.settle()
		require.Equal(t, uid, w.claim().UID, policy)
		require.True(t, w.get("vmid-vm", &corev1.Secret{}), policy)
		w.require("Ready", "False Deleting", "pod vm uses the disk")
		require.NoError(t, w.Base.Delete(t.Context(), user))
		w.settle()
		require.False(t, w.get("vm", &v1alpha1.VMIdentity{}), policy)
		require.False(t, w.get("vmid-vm", &corev1.Secret{}), policy)
		claim := &corev1.PersistentVolumeClaim{}
		kept := policy == metav1.DeletePropagationOrphan
		require.Equal(t, kept, w.get("vmid-vm", claim), policy)
		// Whoever has it now can delete it.
		require.Empty(t, claim.Finalizers, policy)
		require.Nil(t, claim.DeletionTimestamp, policy)
	}
}

// TestDeletionThatIsRefused: the condition names what a policy of the cluster refuses, and no more
// the pod that has ended. When it is allowed, the deletion goes on.
func TestDeletionThatIsRefused(t *testing.T) {
	for _, refused := range []string{"delete", "patch"} { // patch: of the claim's finalizer
		w := settled(t, v1alpha1.DiskSpec{})
		w.Refuse = func(verb string, o any) error {
			if _, claim := o.(*corev1.PersistentVolumeClaim); claim && verb == refused {
				return apierrors.NewForbidden(schema.GroupResource{
					Resource: "persistentvolumeclaims"}, "vmid-vm", errors.New("claims are kept"))
			}
			return nil
		}
		w.delete(metav1.DeletePropagationBackground)
		w.settle()
		w.require("Ready", "False Deleting", "does not allow that the claim vmid-vm is deleted")
		w.require("Ready", "False Deleting", "claims are kept")
		w.Refuse = nil
		w.settle()
		require.False(t, w.get("vm", &v1alpha1.VMIdentity{}))
		require.False(t, w.get("vmid-vm", &corev1.PersistentVolumeClaim{}))
	}
}

// TestSecretThatTheStatusDoesNotKnow: a controller that was killed when it had made the secret
// leaves none behind, also if Kubernetes deletes the claim first.
func TestSecretThatTheStatusDoesNotKnow(t *testing.T) {
	w := settled(t, v1alpha1.DiskSpec{})
	id := w.identity()
	id.Status.SecretName = ""
	require.NoError(t, w.Base.Status().Update(t.Context(), id))
	w.delete(metav1.DeletePropagationForeground)
	w.settle()
	require.False(t, w.get("vm", &v1alpha1.VMIdentity{}))
	require.False(t, w.get("vmid-vm", &corev1.Secret{}))
}

// TestClaimDeletedInTheMaking: a person deletes the claim when the secret is made and the status
// does not say so yet. The secret goes, too: as it cannot be read, it would count as another's.
func TestClaimDeletedInTheMaking(t *testing.T) {
	w := settled(t, v1alpha1.DiskSpec{})
	before := w.claim()
	id := w.identity()
	id.Status = v1alpha1.VMIdentityStatus{}
	require.NoError(t, w.Base.Status().Update(t.Context(), id))
	require.NoError(t, w.Base.Delete(t.Context(), before))
	w.settles("Ready", "True Ready", "")
	require.NotEqual(t, before.UID, w.claim().UID)
}

// TestDeletionThatTheCacheDoesNotKnow: the claim that Kubernetes has deleted with its identity, or
// taken from it, is neither let go nor taken back.
func TestDeletionThatTheCacheDoesNotKnow(t *testing.T) {
	for _, policy := range []metav1.DeletionPropagation{metav1.DeletePropagationForeground,
		metav1.DeletePropagationOrphan} {
		user := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "vm",
			Labels: map[string]string{v1alpha1.LabelIdentity: "vm"}}}
		w := settled(t, v1alpha1.DiskSpec{}, user)
		before := w.identity()
		w.delete(policy)
		r := &Reconciler{w.kit()}
		r.Client = controllertest.Late(w.Client, before)
		_, _ = controllertest.Once(t, r, "vm") // the status that it writes conflicts
		require.Contains(t, w.claim().Finalizers, v1alpha1.FinalizerDisk, policy)
		require.Equal(t, policy == metav1.DeletePropagationOrphan,
			w.claim().OwnerReferences == nil, policy)
	}
}

// TestHolds: a claim that has lost its finalizer, as by a backup, is held again. One that has lost
// its label is in no cache, so it gets that again, too.
func TestHolds(t *testing.T) {
	w := settled(t, v1alpha1.DiskSpec{})
	claim := w.claim()
	claim.Labels = nil
	require.NoError(t, w.Base.Update(t.Context(), claim))
	w.settle()
	require.Equal(t, "vm", w.claim().Labels[v1alpha1.LabelIdentity])
	claim = w.claim()
	claim.Finalizers = nil
	require.NoError(t, w.Base.Update(t.Context(), claim))
	w.settle()
	require.Equal(t, []string{v1alpha1.FinalizerDisk}, w.claim().Finalizers)
	require.True(t, metav1.IsControlledBy(w.claim(), w.identity()))
	require.False(t, objects.Belongs(w.claim(), w.identity()))
	require.Equal(t, controllertest.Namespace, w.claim().Namespace)
}

// TestImageThatIsHeld: nothing is made for an identity whose image may not be used. One that has
// its disk keeps it, and is not ready.
func TestImageThatIsHeld(t *testing.T) {
	w := newWorld(t, v1alpha1.DiskSpec{Image: "a"})
	refusing := controllertest.Refusing(v1alpha1.ReasonNotSigned)
	w.images = &refusing
	w.settles("Ready", "False NotSigned", "the image has no signature")
	require.Equal(t, []string{"Warning NotSigned"}, w.Events())
	require.Zero(t, w.Made("PersistentVolumeClaim")+w.Made("Secret"))
	refusing = ""
	w.settles("Ready", "True Ready", "")
	refusing = v1alpha1.ReasonUnverified
	w.settles("Ready", "False Unverified", "")
	w.claim()
}
