package identity

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

type world struct {
	*controllertest.World
	t         *testing.T
	options   objects.Options
	images    objects.Images
	snapshots client.Reader
}

func newWorld(t *testing.T, spec v1alpha1.DiskSpec, others ...client.Object) *world {
	t.Helper()
	id := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "vm"}}
	id.Spec.DiskSpec = spec
	others = append(others, controllertest.DefaultClass(), controllertest.Class("nvme"))
	return &world{World: controllertest.New(t, nil, append(others, id)...), t: t,
		options: objects.Options{ClaimSize: resource.MustParse("20Gi"),
			UsageTypes: map[string]string{"fast": "nvme", "big": "ceph"}}}
}

// settled is a world in which the controller has done its work.
func settled(t *testing.T, spec v1alpha1.DiskSpec, others ...client.Object) *world {
	t.Helper()
	w := newWorld(t, spec, others...)
	w.settle()
	return w
}

func (w *world) kit() objects.Kit {
	return objects.Kit{Client: w.Client, Live: w.Live, Events: w.World, Options: w.options,
		Images: w.images, Snapshots: w.snapshots}
}

func (w *world) settle() {
	w.t.Helper()
	w.Settle(w.t, func() []controllertest.Reconciler {
		return []controllertest.Reconciler{&Reconciler{w.kit()}}
	}, "vm")
}

func (w *world) get(name string, o client.Object) bool {
	w.t.Helper()
	return controllertest.There(w.t, w.Base, controllertest.Namespace, name, o)
}

func (w *world) identity() *v1alpha1.VMIdentity {
	w.t.Helper()
	return controllertest.Get(w.t, w.Base, controllertest.Namespace, "vm", &v1alpha1.VMIdentity{})
}

func (w *world) claim() *corev1.PersistentVolumeClaim {
	w.t.Helper()
	return controllertest.Get(w.t, w.Base, controllertest.Namespace, "vmid-vm",
		&corev1.PersistentVolumeClaim{})
}

// condition returns the status and reason of a condition, and its message.
func (w *world) condition(name string) (is, message string) {
	w.t.Helper()
	c := meta.FindStatusCondition(w.identity().Status.Conditions, name)
	require.NotNil(w.t, c, name)
	return string(c.Status) + " " + c.Reason, c.Message
}

func (w *world) require(condition, is, message string) {
	w.t.Helper()
	got, text := w.condition(condition)
	require.Equal(w.t, is, got, text)
	require.Contains(w.t, text, message)
	if condition == v1alpha1.ConditionReady {
		require.Equal(w.t, strings.HasPrefix(is, "True"), w.identity().Status.Ready)
	}
}

// settles lets the controller do its work, after which a condition has to be this.
func (w *world) settles(condition, is, message string) {
	w.t.Helper()
	w.settle()
	w.require(condition, is, message)
}

func (w *world) bind(size string) {
	w.t.Helper()
	claim := w.claim()
	claim.Status.Phase = corev1.ClaimBound
	claim.Status.Capacity = corev1.ResourceList{
		corev1.ResourceStorage: resource.MustParse(size)}
	require.NoError(w.t, w.Base.Status().Update(w.t.Context(), claim))
}

var size = controllertest.Quantity

func TestMakes(t *testing.T) {
	w := settled(t, v1alpha1.DiskSpec{UsageType: "fast"})
	w.require("Ready", "True Ready", "a pod can use the disk")
	w.require("Bound", "False ClaimPending", "kubectl describe pvc vmid-vm")
	claim := w.claim()
	require.Equal(t, "nvme", *claim.Spec.StorageClassName)
	require.Equal(t, []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod},
		claim.Spec.AccessModes)
	require.Equal(t, "20Gi", claim.Spec.Resources.Requests.Storage().String())
	require.True(t, metav1.IsControlledBy(claim, w.identity()))
	require.Equal(t, "vm", claim.Labels[v1alpha1.LabelIdentity])
	require.Equal(t, []string{v1alpha1.Finalizer}, w.identity().Finalizers)

	secret := &corev1.Secret{}
	require.True(t, w.get("vmid-vm", secret))
	require.Equal(t, corev1.SecretType("kubernetes.io/iscsi-chap"), secret.Type)
	require.True(t, *secret.Immutable)
	require.Equal(t, "vm", secret.StringData["node.session.auth.username"])
	password := secret.StringData["node.session.auth.password"]
	require.Len(t, password, 26)
	require.Equal(t, "vm", secret.StringData["discovery.sendtargets.auth.username"])
	require.Equal(t, password, secret.StringData["discovery.sendtargets.auth.password"])
	require.True(t, objects.Belongs(secret, w.identity()))
	require.Empty(t, secret.OwnerReferences)

	w.bind("21Gi")
	w.settles("Bound", "True ClaimBound", "vmid-vm")
	require.Equal(t, "21Gi", w.identity().Status.Size.String())
	require.Empty(t, w.Events(), "what goes well is told by the conditions")
}

func TestSecretsDiffer(t *testing.T) {
	id := &v1alpha1.VMIdentity{}
	require.NotEqual(t, secret(id).StringData, secret(id).StringData)
}

// TestClaimSizeAndAccessMode: an identity that names no class has the default one, and what is
// said of that holds for its claim.
func TestClaimSizeAndAccessMode(t *testing.T) {
	for class, mode := range map[string]corev1.PersistentVolumeAccessMode{
		"*": corev1.ReadWriteOnce, "default": corev1.ReadWriteOnce,
		"nvme": corev1.ReadWriteOncePod} {
		w := newWorld(t, v1alpha1.DiskSpec{Size: size("16Gi")})
		w.options.ReadWriteOnce = []string{class}
		w.settle()
		// The disk, a sixteenth, and 128 MiB.
		require.Equal(t, int64(17<<30+128<<20), w.claim().Spec.Resources.Requests.Storage().Value())
		require.Equal(t, mode, w.claim().Spec.AccessModes[0], class)
		require.Equal(t, "default", *w.claim().Spec.StorageClassName)
	}
}

func TestUsageTypeUnknown(t *testing.T) {
	w := settled(t, v1alpha1.DiskSpec{UsageType: "slow"})
	w.require("Ready", "False Invalid", `"slow" is unknown: the controller's --usage-type has `+
		"big, fast")
	require.Zero(t, w.Made("Secret"))
}

func TestNoSnapshots(t *testing.T) {
	w := settled(t, v1alpha1.DiskSpec{Population: v1alpha1.Snapshot})
	w.require("Ready", "False Invalid", "no snapshots")
}

func TestQuotaExceeded(t *testing.T) {
	for _, kind := range []string{"PersistentVolumeClaim", "Secret"} {
		w := newWorld(t, v1alpha1.DiskSpec{})
		full := true
		w.Refuse = func(verb string, o any) error {
			_, secret := o.(*corev1.Secret)
			_, claim := o.(*corev1.PersistentVolumeClaim)
			meant := secret && kind == "Secret" || claim && kind != "Secret"
			if verb == "create" && full && meant {
				return apierrors.NewForbidden(schema.GroupResource{Resource: kind}, "vmid-vm",
					errors.New("exceeded quota: small, requested: 1, used: 1, limited: 1"))
			}
			return nil
		}
		w.settles("Ready", "False QuotaExceeded", "exceeded quota: small")
		require.Equal(t, []string{"Warning QuotaExceeded"}, w.Events())
		require.Nil(t, w.identity().Status.CreationTime)
		full = false
		w.settles("Ready", "True Ready", "")
	}
}

func TestForeignClaim(t *testing.T) {
	theirs := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "vmid-vm"}}
	w := settled(t, v1alpha1.DiskSpec{Size: size("1Gi")}, theirs)
	w.require("Ready", "False ClaimForeign", "give the VMIdentity another name; or, if")
	before := w.claim()
	require.Zero(t, w.Made("Secret"))
	require.NoError(t, w.Base.Delete(t.Context(), w.identity()))
	w.settle()
	require.False(t, w.get("vm", &v1alpha1.VMIdentity{}))
	require.Equal(t, before, w.claim(), "it is as it was")

	theirs.ResourceVersion = ""
	w = settled(t, v1alpha1.DiskSpec{UsageType: "slow"}, theirs)
	w.require("Bound", "False ClaimForeign", "exists and is not of this")
	require.NoError(t, w.Base.Delete(t.Context(), theirs))
	w.settles("Ready", "False Invalid", "")
	require.Nil(t, meta.FindStatusCondition(w.identity().Status.Conditions, "Bound"))
}

// TestRestoredClaim: a claim that a backup has restored becomes the identity's own, if it says that
// it has this disk. Any other claim stays as it is, and nobody is told to delete it.
func TestRestoredClaim(t *testing.T) {
	const image = "registry.example.com/a@sha256:aa"
	owner := func(kind, name string) []metav1.OwnerReference {
		return []metav1.OwnerReference{{APIVersion: v1alpha1.GroupVersion.String(), Kind: kind,
			Name: name, UID: "gone", Controller: new(true)}}
	}
	for what, c := range map[string]struct {
		says   string
		owners []metav1.OwnerReference
		adopts bool
	}{
		"its content":                  {"Overlay " + image, nil, true},
		"its owner was restored, too":  {"Overlay " + image, owner("VMIdentity", "vm"), true},
		"of another identity":          {"Overlay " + image, owner("VMIdentity", "x"), false},
		"of another kind":              {"Overlay " + image, owner("VMPet", "vm"), false},
		"another image":                {"Overlay registry.example.com/b@sha256:bb", nil, false},
		"another population":           {"Snapshot " + image, nil, false},
		"it does not say what it has":  {"", nil, false},
		"not even what its owner made": {"", owner("VMIdentity", "vm"), false},
	} {
		restored := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "vmid-vm",
			OwnerReferences: c.owners}}
		if c.says != "" {
			restored.Annotations = map[string]string{v1alpha1.AnnotationContent: c.says}
		}
		w := newWorld(t, v1alpha1.DiskSpec{Image: image}, restored,
			&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "vmid-vm"}})
		before := w.claim()
		w.settle()
		if !c.adopts {
			w.require("Ready", "False ClaimForeign", "another name")
			_, message := w.condition("Ready")
			require.NotContains(t, message, "delete", what)
			require.Equal(t, before, w.claim(), what)
			continue
		}
		w.require("Ready", "True Ready", "")
		require.True(t, metav1.IsControlledBy(w.claim(), w.identity()), what)
		require.Len(t, w.claim().OwnerReferences, 1, what)
		require.Equal(t, "vm", w.claim().Labels[v1alpha1.LabelIdentity], what)
		require.Equal(t, before.UID, w.claim().UID, what)
	}
}

// TestClaimComesBack: a claim that was deleted and restored is used again.
func TestClaimComesBack(t *testing.T) {
	w := settled(t, v1alpha1.DiskSpec{Image: "a"})
	backup := w.claim()
	require.Equal(t, "Overlay a", backup.Annotations[v1alpha1.AnnotationContent])
	require.NoError(t, w.Base.Delete(t.Context(), w.claim()))
	w.settles("Ready", "False ClaimMissing", "restore the claim from a backup")
	w.Make(t, &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "vmid-vm",
		Annotations: backup.Annotations, Labels: backup.Labels}})
	w.settles("Ready", "True Ready", "")
}

// TestForsakenClaim: a claim that is being deleted goes if its identity does not exist: somebody
// has taken the finalizers away, or a backup has restored the claim alone. A new identity of that
// name gets a new disk and a new secret. While only the cache does not know the identity, or a pod
// has the disk, both stay.
func TestForsakenClaim(t *testing.T) {
	w := settled(t, v1alpha1.DiskSpec{Image: "a"})
	id := w.identity()
	require.NoError(t, w.Base.Delete(t.Context(), w.claim()))
	r := &Reconciler{w.kit()}
	r.Client = controllertest.Labelled(w.Client, "none", &v1alpha1.VMIdentity{})
	reconcile := func() { require.NoError(t, testtool.Err(controllertest.Once(t, r, "vm"))) }
	reconcile()
	require.Contains(t, w.claim().Finalizers, v1alpha1.FinalizerDisk)
	id.Finalizers = nil
	require.NoError(t, w.Base.Update(t.Context(), id))
	require.NoError(t, w.Base.Delete(t.Context(), id))
	user := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "vm",
		Labels: map[string]string{v1alpha1.LabelIdentity: "vm"}}}
	w.Make(t, user)
	reconcile()
	w.claim()
	require.True(t, w.get("vmid-vm", &corev1.Secret{}))
	require.NoError(t, w.Base.Delete(t.Context(), user))
	reconcile()
	require.False(t, w.get("vmid-vm", &corev1.PersistentVolumeClaim{}))
	require.False(t, w.get("vmid-vm", &corev1.Secret{}))

	for what, forsaken := range map[string]*corev1.PersistentVolumeClaim{
		"of an earlier one": {ObjectMeta: metav1.ObjectMeta{OwnerReferences: objects.Owned(
			"VMIdentity", id)}},
		"restored alone": {ObjectMeta: metav1.ObjectMeta{}},
	} {
		forsaken.Name, forsaken.Finalizers = "vmid-vm", []string{v1alpha1.FinalizerDisk}
		forsaken.Labels = map[string]string{v1alpha1.LabelIdentity: "vm"}
		w := newWorld(t, v1alpha1.DiskSpec{Image: "a"}, forsaken, secret(id))
		require.NoError(t, w.Base.Delete(t.Context(), forsaken))
		user := user.DeepCopy()
		user.ResourceVersion = ""
		w.Make(t, user)
		w.settles("Ready", "False ClaimForeign", "is being deleted: there is a new one after that")
		require.NoError(t, w.Base.Delete(t.Context(), user))
		w.settles("Ready", "True Ready", "")
		require.NotEqual(t, forsaken.UID, w.claim().UID, what)
	}
}

func TestForeignSecret(t *testing.T) {
	theirs := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "vmid-vm"}}
	w := settled(t, v1alpha1.DiskSpec{}, theirs)
	w.require("Ready", "False SecretForeign", "or delete the secret")
	require.Zero(t, w.Made("PersistentVolumeClaim"))
	require.NoError(t, w.Base.Delete(t.Context(), w.identity()))
	w.settle()
	require.False(t, w.get("vm", &v1alpha1.VMIdentity{}))
	require.True(t, w.get("vmid-vm", &corev1.Secret{}), "it is not ours to delete")
}

func TestClaimDeletedByHand(t *testing.T) {
	w := settled(t, v1alpha1.DiskSpec{})
	claim := w.claim()
	claim.Finalizers = append(claim.Finalizers, "kubernetes.io/pvc-protection")
	require.NoError(t, w.Base.Update(t.Context(), claim))
	require.NoError(t, w.Base.Delete(t.Context(), claim))
	w.settles("Ready", "False ClaimMissing", "is being deleted")
	claim = w.claim()
	require.Len(t, claim.Finalizers, 1, "ours does not hold it")
	claim.Finalizers = nil
	require.NoError(t, w.Base.Update(t.Context(), claim))
	w.settles("Ready", "False ClaimMissing", "delete this VMIdentity")
	w.require("Bound", "False ClaimMissing", "")
	require.Equal(t, 1, w.Made("PersistentVolumeClaim"), "an empty disk is no replacement")
	require.Equal(t, []string{"Warning ClaimMissing"}, w.Events())

	// A claim that somebody makes in its place is not ours.
	w.Make(t, &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "vmid-vm"}})
	w.settles("Ready", "False ClaimForeign", "")
}

func TestClaimLost(t *testing.T) {
	w := settled(t, v1alpha1.DiskSpec{})
	claim := w.claim()
	claim.Spec.VolumeName = "pv-7"
	require.NoError(t, w.Base.Update(t.Context(), claim))
	claim.Status.Phase = corev1.ClaimLost
	require.NoError(t, w.Base.Status().Update(t.Context(), claim))
	w.settles("Ready", "False ClaimLost", "pv-7")
	w.bind("20Gi")
	w.settles("Ready", "True Ready", "")
}

func TestGrows(t *testing.T) {
	w := settled(t, v1alpha1.DiskSpec{Size: size("16Gi")})
	grow := func(text string) {
		id := w.identity()
		id.Spec.Size = size(text)
		require.NoError(t, w.Base.Update(t.Context(), id))
		w.settle()
	}
	grow("32Gi")
	w.require("Ready", "True Resizing", "when it has its volume")
	w.bind("17Gi")
	w.settles("Ready", "True Resizing", "from 17Gi to")
	require.Equal(t, int64(34<<30+128<<20), w.claim().Spec.Resources.Requests.Storage().Value())
	require.Contains(t, w.Events(), "Normal Resizing")
	w.bind("35Gi")
	w.settles("Ready", "True Ready", "")

	w.Refuse = func(verb string, _ any) error {
		if verb == "apply" {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "persistentvolumeclaims"},
				"vmid-vm", errors.New("the storageclass must support resize"))
		}
		return nil
	}
	grow("64Gi")
	w.require("Ready", "True ResizeRefused", "the storageclass must support resize")
	require.Contains(t, w.Events(), "Warning ResizeRefused")
	w.Refuse = nil
	w.settles("Ready", "True Resizing", "")

	// A claim that somebody made larger by hand stays that large.
	claim := w.claim()
	claim.Spec.Resources.Requests[corev1.ResourceStorage] = resource.MustParse("1Ti")
	require.NoError(t, w.Base.Update(t.Context(), claim))
	w.bind("1Ti")
	w.settles("Ready", "True Ready", "")
	require.Equal(t, "1Ti", w.claim().Spec.Resources.Requests.Storage().String())
}

// A disk with a server pod is ready while that serves it. If it is not, it does not repeat the
// server's reason.
func TestServedFirst(t *testing.T) {
	w := settled(t, v1alpha1.DiskSpec{Attachment: v1alpha1.Service})
	w.require("Ready", "False Starting", "no pod yet")
	require.NotEmpty(t, w.identity().Status.SecretName, "the server needs it")
	for _, c := range []struct {
		status metav1.ConditionStatus
		reason string
		ready  string
	}{
		{metav1.ConditionTrue, v1alpha1.ReasonServing, "True Ready"},
		{metav1.ConditionFalse, v1alpha1.ReasonFailed, "False Failed"},
		{metav1.ConditionTrue, v1alpha1.ReasonServing, "True Ready"},
	} {
		id := w.identity()
		meta.SetStatusCondition(&id.Status.Conditions, metav1.Condition{
			Type: v1alpha1.ConditionServed, Status: c.status, Reason: c.reason, Message: "m"})
		require.NoError(t, w.Base.Status().Update(t.Context(), id))
		w.settles("Ready", c.ready, "")
	}
}

// forbidden is a reader that may not read pods.
type forbidden struct{ client.Reader }

func (f forbidden) List(ctx context.Context, list client.ObjectList,
	options ...client.ListOption) error {
	if _, pods := list.(*corev1.PodList); pods {
		return apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", nil)
	}
	return f.Reader.List(ctx, list, options...)
}

// TestRightsGoFirst: the Role in a namespace that is being deleted goes before its identities. They
// do not hold up the namespace, even while the cache still has their pods. In a namespace that
// stays, an identity keeps its finalizers until the rights are back.
func TestRightsGoFirst(t *testing.T) {
	for _, ending := range []bool{true, false} {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
			Name: controllertest.Namespace, Finalizers: []string{"kubernetes"}}}
		user := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "vm",
			Labels: map[string]string{v1alpha1.LabelIdentity: "vm"}}}
		w := settled(t, v1alpha1.DiskSpec{}, namespace, user)
		// The role of the namespace is gone: what is left are the rights in all.
		role := controllertest.RoleOf(t, controllertest.Settings{Namespaces: []string{
			controllertest.Namespace}}).Without()
		w.Client, w.Live = role.Cache(w.Base), role.Live(w.Base)
		id := w.identity()
		id.Finalizers = append(id.Finalizers, v1alpha1.FinalizerService, v1alpha1.FinalizerMove)
		require.NoError(t, w.Base.Update(t.Context(), id))
		require.NoError(t, w.Base.Delete(t.Context(), id))
		if ending {
			require.NoError(t, w.Base.Delete(t.Context(), namespace))
		}
		r := &Reconciler{w.kit()}
		r.Live = forbidden{w.Live}
		_, err := controllertest.Once(t, r, "vm")
		if ending {
			require.NoError(t, err)
		} else {
			require.True(t, apierrors.IsForbidden(err), "%v", err)
		}
		require.Equal(t, !ending, w.get("vm", &v1alpha1.VMIdentity{}))
		claim := &corev1.PersistentVolumeClaim{}
		require.True(t, w.get("vmid-vm", claim), "Kubernetes deletes the claim")
		require.Equal(t, !ending, slices.Contains(claim.Finalizers, v1alpha1.FinalizerDisk))
	}
}

// TestSecretOfSomebodyElse: the API server does not let the controller delete a secret that is not
// of an identity. The deletion of the identity goes on.
func TestSecretOfSomebodyElse(t *testing.T) {
	w := settled(t, v1alpha1.DiskSpec{})
	w.Refuse = func(verb string, o any) error {
		if _, secret := o.(*corev1.Secret); secret && verb == "delete" {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, "vmid-vm", nil)
		}
		return nil
	}
	require.NoError(t, w.Base.Delete(t.Context(), w.identity()))
	w.settle()
	require.False(t, w.get("vm", &v1alpha1.VMIdentity{}))
	require.True(t, w.get("vmid-vm", &corev1.Secret{}))
}
