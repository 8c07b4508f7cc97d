package service

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
)

var volume = client.ObjectKey{Name: "vmid-u-1"}

// withVolume asks for a volume with which the disk is used.
func withVolume(id *v1alpha1.VMIdentity) {
	id.Annotations[v1alpha1.AnnotationVolumeClaim] = claim.Name
}

// bind does the work of Kubernetes' binder.
func (w *world) bind() {
	w.t.Helper()
	var c corev1.PersistentVolumeClaim
	require.NoError(w.t, w.Get(w.t.Context(), claim, &c))
	c.Status.Phase = corev1.ClaimBound
	require.NoError(w.t, w.Status().Update(w.t.Context(), &c))
}

func TestVolume(t *testing.T) {
	controllertest.EachFault(t, func(t *testing.T, calls *controllertest.Calls) {
		w := newWorld(t, calls, withVolume)
		w.converge()
		require.Equal(t, v1alpha1.ReasonClaimPending,
			w.condition(v1alpha1.ConditionVolumeReady).Reason)
		w.bind()
		w.converge()
		require.Equal(t, metav1.ConditionTrue, w.condition(v1alpha1.ConditionVolumeReady).Status)
		writes := calls.Writes
		w.converge()
		require.Equal(t, writes, calls.Writes)
	})
}

func TestVolumeGoes(t *testing.T) {
	w := converged(t, withVolume)

	// If the annotation is removed, so are both.
	w.annotate(v1alpha1.AnnotationVolumeClaim, "")
	w.converge()
	w.missing(claim, &corev1.PersistentVolumeClaim{})
	w.missing(volume, &corev1.PersistentVolume{})
	require.NotContains(t, w.identity().Status.Conditions, v1alpha1.ConditionVolumeReady)

	// They go with the identity, too.
	w.annotate(v1alpha1.AnnotationVolumeClaim, claim.Name)
	w.converge()
	require.NoError(t, w.Delete(t.Context(), w.identity()))
	w.converge()
	w.missing(claim, &corev1.PersistentVolumeClaim{})
	w.missing(volume, &corev1.PersistentVolume{})
	require.Equal(t, []string{v1alpha1.Finalizer}, w.identity().Finalizers)
}

// TestVolumeOfAClaimThatIsGone: if somebody deletes the claim, the next one gets the volume.
// Kubernetes binds no volume that names the UID of another claim.
func TestVolumeOfAClaimThatIsGone(t *testing.T) {
	w := converged(t, withVolume)
	w.bind()
	var v corev1.PersistentVolume
	require.NoError(t, w.Get(t.Context(), volume, &v))
	v.Spec.ClaimRef.UID = "former"
	require.NoError(t, w.Update(t.Context(), &v))
	w.converge()
	require.NoError(t, w.Get(t.Context(), volume, &v))
	require.EqualValues(t, "former", v.Spec.ClaimRef.UID, "its claim is there")
	c := controllertest.Get(t, w, claim.Namespace, claim.Name, &corev1.PersistentVolumeClaim{})
	c.Status.Phase = corev1.ClaimLost // as after somebody has deleted the volume
	require.NoError(t, w.Status().Update(t.Context(), c))
	w.converge()
	require.Contains(t, w.condition(v1alpha1.ConditionVolumeReady).Message, "delete the claim")
	require.NoError(t, w.Delete(t.Context(), c))
	w.converge()
	v = corev1.PersistentVolume{}
	require.NoError(t, w.Get(t.Context(), volume, &v))
	require.Empty(t, v.Spec.ClaimRef.UID)
	require.Equal(t, claim.Name, v.Spec.ClaimRef.Name)
	require.NoError(t, w.Get(t.Context(), claim, &corev1.PersistentVolumeClaim{}))
}

// TestVolumeIsThatOfTheExample compares the volume and the claim with those of the example, which a
// test in package integration lets a kernel log in to. Only names, address and size differ.
func TestVolumeIsThatOfTheExample(t *testing.T) {
	text := testtool.Must(os.ReadFile("../../../examples/kubernetes/volume.yaml"))(t)
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), len(text))
	var wantVolume corev1.PersistentVolume
	var wantClaim corev1.PersistentVolumeClaim
	require.NoError(t, decoder.Decode(&wantVolume))
	require.NoError(t, decoder.Decode(&wantClaim))

	w := converged(t, withVolume)
	var v corev1.PersistentVolume
	require.NoError(t, w.Get(t.Context(), volume, &v))
	require.Equal(t, "10.96.0.50:3260", v.Spec.ISCSI.TargetPortal)
	require.Equal(t, w.identity().Status.TargetName, v.Spec.ISCSI.IQN)
	require.Equal(t, corev1.SecretReference{Namespace: name.Namespace, Name: made.Name},
		*v.Spec.ISCSI.SecretRef)
	require.Equal(t, claim.Name, v.Spec.ClaimRef.Name)
	v.Spec.ISCSI.IQN = wantVolume.Spec.ISCSI.IQN
	v.Spec.ISCSI.SecretRef = wantVolume.Spec.ISCSI.SecretRef
	v.Spec.ClaimRef = wantVolume.Spec.ClaimRef
	require.Equal(t, wantVolume.Spec, v.Spec)
	var c corev1.PersistentVolumeClaim
	require.NoError(t, w.Get(t.Context(), claim, &c))
	require.Equal(t, v.Name, c.Spec.VolumeName)
	c.Spec.VolumeName = wantClaim.Spec.VolumeName
	require.Equal(t, wantClaim.Spec, c.Spec)
}

func TestVolumeIsRefused(t *testing.T) {
	for want, annotations := range map[string]map[string]string{
		"is the claim of the data": {v1alpha1.AnnotationVolumeClaim: made.Name},
		`"Often" is unknown: want ReadWriteOncePod`: {v1alpha1.AnnotationVolumeClaim: claim.Name,
			v1alpha1.AnnotationVolumeAccess: "Often"},
	} {
		w := newWorld(t, new(controllertest.Calls), func(id *v1alpha1.VMIdentity) {
			id.Annotations = annotations
		})
		w.converge()
		c := w.condition(v1alpha1.ConditionVolumeReady)
		require.Equal(t, v1alpha1.ReasonInvalid, c.Reason)
		require.Contains(t, c.Message, want)
	}
}

// TestVolumeKeepsItsClaim: another name takes effect when the first claim is gone.
func TestVolumeKeepsItsClaim(t *testing.T) {
	w := converged(t, withVolume)
	w.annotate(v1alpha1.AnnotationVolumeClaim, "other")
	w.converge()
	require.Contains(t, w.condition(v1alpha1.ConditionVolumeReady).Message, "the volume has the "+
		"claim vm1-root")
}

// TestVolumesAreTurnedOff: without the right over volumes, one that is asked for is reported, and
// the identity is deleted all the same.
func TestVolumesAreTurnedOff(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), nil) // in the role of the default installation
	w.annotate(v1alpha1.AnnotationVolumeClaim, claim.Name)
	w.converge()
	c := w.condition(v1alpha1.ConditionVolumeReady)
	require.Equal(t, v1alpha1.ReasonInvalid, c.Reason)
	require.Contains(t, c.Message, "persistentVolumes.create")
	require.NoError(t, w.Delete(t.Context(), w.identity()))
	w.converge()
	require.Equal(t, []string{v1alpha1.Finalizer}, w.identity().Finalizers)
}

// TestNothingIsCollected: Kubernetes' garbage collector deletes nothing of a disk that machines
// use, also if somebody deletes the identity with --cascade=foreground. The controller deletes all.
func TestNothingIsCollected(t *testing.T) {
	w := converged(t, withVolume)
	made := map[client.ObjectKey]client.Object{made: &appsv1.Deployment{}, claim: &corev1.
		PersistentVolumeClaim{}, {Namespace: made.Namespace, Name: "vmnbd-vm1"}: &corev1.Secret{}}
	for key, o := range made {
		require.NoError(t, w.Get(t.Context(), key, o))
		require.Empty(t, o.GetOwnerReferences(), key)
		require.Equal(t, string(w.identity().UID), o.GetAnnotations()[v1alpha1.AnnotationOwner])
	}
	var service corev1.Service
	require.NoError(t, w.Get(t.Context(), client.ObjectKey{Namespace: name.Namespace,
		Name: serviceName(name.Name)}, &service))
	require.Empty(t, service.OwnerReferences)
	require.NoError(t, w.Delete(t.Context(), w.identity()))
	w.converge()
	for key, o := range made {
		w.missing(key, o)
	}
	w.missing(client.ObjectKeyFromObject(&service), &service)
}

// TestWhatMayNotBeChanged: where a policy of the cluster forbids a step, a condition says so. When
// it is allowed, the step is done.
func TestWhatMayNotBeChanged(t *testing.T) {
	deletion := func(w *world) { require.NoError(t, w.Delete(t.Context(), w.identity())) }
	for what, c := range map[string]struct {
		kind      client.Object
		condition string
		step      func(w *world)
	}{
		"the claim of the volume": {&corev1.PersistentVolumeClaim{}, v1alpha1.ConditionVolumeReady,
			func(w *world) { w.annotate(v1alpha1.AnnotationVolumeClaim, "") }},
		"the claim at the end": {&corev1.PersistentVolumeClaim{}, v1alpha1.ConditionServed,
			deletion},
		"the server": {&appsv1.Deployment{}, v1alpha1.ConditionServed, deletion},
		"the handover": {&corev1.Pod{}, v1alpha1.ConditionHandedOver,
			func(w *world) { w.annotate(v1alpha1.AnnotationHandoverTo, there) }},
	} {
		w := converged(t, withVolume)
		w.bind()
		w.converge()
		allowed := w.r.Client
		refuse := func(o client.Object) error {
			if reflect.TypeOf(o) != reflect.TypeOf(c.kind) {
				return nil
			}
			return apierrors.NewForbidden(schema.GroupResource{}, o.GetName(),
				errors.New("a policy"))
		}
		w.r.Client = interceptor.NewClient(allowed.(client.WithWatch), interceptor.Funcs{
			Delete: func(ctx context.Context, in client.WithWatch, o client.Object,
				all ...client.DeleteOption) error {
				if err := refuse(o); err != nil {
					return err
				}
				return in.Delete(ctx, o, all...)
			},
			Patch: func(ctx context.Context, in client.WithWatch, o client.Object,
				p client.Patch, all ...client.PatchOption) error {
				if err := refuse(o); err != nil {
					return err
				}
				return in.Patch(ctx, o, p, all...)
			},
		})
		c.step(w)
		for range 3 {
			_, _ = w.reconcile() // the error is for the log
			w.kubernetes()
		}
		require.Contains(t, w.condition(c.condition).Message, "does not allow", what)
		require.Contains(t, w.condition(c.condition).Message, "a policy", what)
		w.r.Client = allowed
		w.converge()
		require.NotContains(t, fmt.Sprint(w.identity().Status.Conditions), "a policy", what)
	}
}
