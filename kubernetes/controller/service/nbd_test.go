package service

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
)

var certificates = client.ObjectKey{Namespace: "default", Name: "vmnbd-vm1"}

func (w *world) deployment() *appsv1.Deployment {
	w.t.Helper()
	d := &appsv1.Deployment{}
	require.NoError(w.t, w.Get(w.t.Context(), made, d))
	return d
}

// TestCertificates: a server has certificates before it starts, whatever fails meanwhile. They stay
// while machines may have them, and are made again with a server whose certificates were deleted.
func TestCertificates(t *testing.T) {
	controllertest.EachFault(t, func(t *testing.T, calls *controllertest.Calls) {
		w := newWorld(t, calls, nil)
		w.converge()
		first := &corev1.Secret{}
		require.NoError(t, w.Get(t.Context(), certificates, first))
		require.NoError(t, w.Delete(t.Context(), w.deployment()))
		w.converge()
		again := &corev1.Secret{}
		require.NoError(t, w.Get(t.Context(), certificates, again))
		require.Equal(t, first.Data, again.Data, "another server has the same")
		require.NoError(t, w.Delete(t.Context(), again))
		w.converge()
		w.missing(certificates, &corev1.Secret{})
		require.NoError(t, w.Delete(t.Context(), w.deployment()))
		w.converge()
		require.NoError(t, w.Get(t.Context(), certificates, again))
		require.NotEqual(t, first.Data, again.Data)
	})
}

// TestCertificatesOfOthers: a server never has certificates whose keys somebody else knows.
func TestCertificatesOfOthers(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), nil)
	require.NoError(t, w.Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{
		Namespace: certificates.Namespace, Name: certificates.Name}}))
	// As the policy secrets.controller.disk.kubevirt.io does.
	w.r.Client = interceptor.NewClient(w.WithWatch, interceptor.Funcs{Delete: func(
		_ context.Context, _ client.WithWatch, o client.Object, _ ...client.DeleteOption) error {
		return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, o.GetName(), nil)
	}})
	require.NoError(t, testtool.Err(w.reconcile())) // the finalizer
	require.Error(t, testtool.Err(w.reconcile()))
	require.Contains(t, w.condition(v1alpha1.ConditionServed).Message, "secret vmnbd-vm1")
	w.missing(made, &appsv1.Deployment{})
}

// TestHydratedServer: the server of a disk that needs its image no more starts without it, but not
// again under a machine. A claim that was restored needs it.
func TestHydratedServer(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), nil)
	data := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: made.Namespace,
		Name: made.Name, UID: "data", Labels: map[string]string{v1alpha1.LabelIdentity: "vm1"}}}
	require.NoError(t, w.Create(t.Context(), data))
	image := func() bool {
		w.converge()
		d := &appsv1.Deployment{}
		require.NoError(t, w.Get(t.Context(), made, d))
		return hasImage(d)
	}
	status := func(change func(*v1alpha1.VMIdentityStatus)) {
		id := w.identity()
		change(&id.Status)
		require.NoError(t, w.Status().Update(t.Context(), id))
	}
	require.True(t, image())
	status(func(s *v1alpha1.VMIdentityStatus) {
		s.HydratedClaim, s.UsedBy = data.UID, &corev1.ObjectReference{Name: "vm", UID: "vm"}
	})
	require.True(t, image(), "a machine uses the disk")
	status(func(s *v1alpha1.VMIdentityStatus) { s.UsedBy = nil })
	require.False(t, image())
	status(func(s *v1alpha1.VMIdentityStatus) {
		s.UsedBy = &corev1.ObjectReference{Name: "vm", UID: "vm"}
	})
	require.False(t, image())
	require.NoError(t, w.Delete(t.Context(), data))
	data.UID, data.ResourceVersion = "restored", ""
	require.NoError(t, w.Create(t.Context(), data))
	require.True(t, image(), "another claim")
}
