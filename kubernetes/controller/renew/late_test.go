package renew

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// TestLateCache: the former claim is in the cache, and is not taken for the new one.
func TestLateCache(t *testing.T) {
	s := newScene(t, nil, nil)
	s.change(func(id *v1alpha1.VMIdentity) { id.Spec.Image = repository + "@" + second })
	id := s.id()
	id.Status = v1alpha1.VMIdentityStatus{SecretName: id.Status.SecretName}
	require.NoError(t, s.Base.Status().Update(t.Context(), id))
	s.settle()
	require.False(t, s.id().Status.Ready)
	c := meta.FindStatusCondition(s.id().Status.Conditions, "Ready")
	require.Equal(t, "ImageDiffers", c.Reason, c.Message)
	require.Nil(t, s.id().Status.CreationTime)
	former := s.pvc()
	former.Finalizers = nil
	require.NoError(t, s.Base.Update(t.Context(), former))
	require.NoError(t, s.Base.Delete(t.Context(), former))
	s.settle()
	require.True(t, s.id().Status.Ready)
	require.Equal(t, second[7:9], s.pvc().Spec.DataSourceRef.Name)

	// Nor is the new one taken for the former one, by a renewal that comes late.
	id = s.id()
	id.Spec.Image = image
	id.Status.Renew = &v1alpha1.RenewStatus{Image: repository + "@" + second, From: image}
	id.Status.Conditions = append(id.Status.Conditions, metav1.Condition{Type: "Renewed",
		Reason: "Renewing", Status: metav1.ConditionFalse})
	metav1.SetMetaDataAnnotation(&id.ObjectMeta, v1alpha1.AnnotationRenew, second)
	r := &Reconciler{Client: s.Client, Live: s.Client, Events: s, Admit: s.admit}
	said, err := r.replace(t.Context(), id, id, second)
	require.NoError(t, err)
	require.Contains(t, said.message, "is not as it was made for "+image)
	require.NotNil(t, s.pvc())
	require.Nil(t, s.pvc().DeletionTimestamp)
}

// TestLateRenewal: the claim is deleted when the cache has status.renew. Before that, a clone could
// come to the cache and not see it there.
func TestLateRenewal(t *testing.T) {
	s := newScene(t, nil, nil)
	s.annotate(second)
	late := s.id() // it has the wish, and not what begin writes
	s.begun()
	cache := interceptor.NewClient(s.Base, interceptor.Funcs{Get: func(ctx context.Context,
		from client.WithWatch, key client.ObjectKey, o client.Object,
		options ...client.GetOption) error {
		if id, ok := o.(*v1alpha1.VMIdentity); ok {
			late.DeepCopyInto(id)
			return nil
		}
		return from.Get(ctx, key, o, options...)
	}})
	r := &Reconciler{Client: cache, Live: s.Client, Events: s, Admit: s.admit}
	for range 3 {
		_, err := r.Reconcile(t.Context(), ctrl.Request{
			NamespacedName: client.ObjectKeyFromObject(late)})
		require.NoError(t, err)
	}
	require.Nil(t, s.pvc().DeletionTimestamp)
	s.settle()
	require.NotNil(t, s.pvc().DeletionTimestamp)
}
