package export

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

const (
	image = "registry.example.com/fedora@sha256:" +
		"a8dd75ecffd4cdd96072d60c2237b448e0c8b2bc94d57f10fdbc8c481d9005b8"
	reference = "registry.example.com/golden/web:1"
)

// pushed is the digest that the command says.
var pushed = "sha256:" + strings.Repeat("b", 64)

var scheme = controllertest.Scheme(batchv1.AddToScheme)

// world is an API server with an identity that nobody uses, and an export.
type world struct {
	t *testing.T
	client.WithWatch
	calls *controllertest.Calls
	r     *Reconciler
}

func newWorld(t *testing.T, calls *controllertest.Calls) *world {
	t.Helper()
	id := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web",
		UID: "web"}}
	id.Spec.Image = image
	id.Spec.Export = &v1alpha1.ExportSpec{Reference: reference, SecretName: "vmexport-push"}
	id.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionBound,
		Status: metav1.ConditionTrue}}
	w := &world{t: t, calls: calls}
	w.WithWatch = fake.NewClientBuilder().WithScheme(scheme).WithObjects(id).
		WithStatusSubresource(id, &batchv1.Job{}, &corev1.Pod{}).Build()
	role := controllertest.RoleOf(t, controllertest.Settings{Exports: true})
	c := role.Cache(calls.Client(w.WithWatch))
	w.r = &Reconciler{objects.Kit{Client: c, Live: role.Live(calls.Client(w.WithWatch)),
		Events: events.NewFakeRecorder(1000), Options: objects.Options{Server: "kubevirt.io:disk"}}}
	return w
}

func (w *world) identity() *v1alpha1.VMIdentity {
	w.t.Helper()
	return controllertest.Get(w.t, w, "default", "web", &v1alpha1.VMIdentity{})
}

func (w *world) settle() {
	w.t.Helper()
	w.calls.Settle(w.t, w.r, nil, client.ObjectKey{Namespace: "default", Name: "web"})
}

func (w *world) jobs() []batchv1.Job {
	w.t.Helper()
	var all batchv1.JobList
	require.NoError(w.t, w.List(w.t.Context(), &all))
	return all.Items
}

// require compares the reason of condition Exported, and a part of its message.
func (w *world) require(reason, says string) {
	w.t.Helper()
	c := apimeta.FindStatusCondition(w.identity().Status.Conditions, v1alpha1.ConditionExported)
	require.NotNil(w.t, c)
	require.Equal(w.t, reason, c.Reason, c.Message)
	require.Contains(w.t, c.Message, says)
	require.Equal(w.t, reason == v1alpha1.ReasonExported, c.Status == metav1.ConditionTrue)
}

func (w *world) change(change func(id *v1alpha1.VMIdentity)) {
	w.t.Helper()
	id := w.identity()
	change(id)
	require.NoError(w.t, w.Update(w.t.Context(), id))
}

// ends lets the pod of the only Job end with a message, and the Job with it.
func (w *world) ends(how batchv1.JobConditionType, says string) {
	w.t.Helper()
	controllertest.EndJob(w.t, w, &w.jobs()[0], how, says)
}

// TestExport: whichever write fails, one Job commits the disk, which belongs to it before the Job
// is made. The status says the digest, and the Job is not made again.
func TestExport(t *testing.T) {
	controllertest.EachWriteFault(t, func(t *testing.T, calls *controllertest.Calls) {
		w := newWorld(t, calls)
		w.settle()
		w.require("Exporting", "commits the disk to "+reference)
		require.True(t, w.identity().Status.Export.Running)
		require.Len(t, w.jobs(), 1)
		require.True(t, metav1.IsControlledBy(&w.jobs()[0], w.identity()))
		w.ends(batchv1.JobComplete, pushed+"\n")
		w.settle()
		w.require("Exported", "by the digest "+pushed)
		require.Equal(t, pushed, w.identity().Status.Export.Digest)
		require.False(t, w.identity().Status.Export.Running)
		job := w.jobs()[0]
		require.NoError(t, w.Delete(t.Context(), &job))
		w.settle()
		require.Empty(t, w.jobs(), "what is done is not repeated")

		w.change(func(id *v1alpha1.VMIdentity) { id.Spec.Export.Reference += "2" })
		w.settle()
		require.Len(t, w.jobs(), 1)
		require.NotEqual(t, job.Name, w.jobs()[0].Name)
	})
}

// TestDiskIsTaken: the Job is made only when the disk is written down as its own, and that fails if
// a pod has got the disk meanwhile.
func TestDiskIsTaken(t *testing.T) {
	calls := &controllertest.Calls{Fail: 2, Err: controllertest.Conflict()}
	w := newWorld(t, calls)
	req := ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "default", Name: "web"}}
	for range 2 { // the identity, the pods, and the write
		_, _ = w.r.Reconcile(t.Context(), req)
		require.Empty(t, w.jobs())
	}
	require.True(t, w.identity().Status.Export.Running)
}

// TestWhoWaits: while a pod has the disk, or there is nothing to export, no Job is made.
func TestWhoWaits(t *testing.T) {
	for what, c := range map[string]struct {
		change       func(w *world, id *v1alpha1.VMIdentity)
		reason, says string
	}{
		"a pod of the status": {func(_ *world, id *v1alpha1.VMIdentity) {
			id.Status.UsedBy = &corev1.ObjectReference{Name: "vm"}
		}, "InUse", "pod vm uses the disk"},
		"a pod that somebody has let go": {func(w *world, _ *v1alpha1.VMIdentity) {
			require.NoError(w.t, w.Create(w.t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
				Namespace: "default", Name: "vm", Labels: map[string]string{
					v1alpha1.LabelIdentity: "web"}}}))
		}, "InUse", "pod vm uses the disk"},
		"a pod that nobody knows": {func(w *world, _ *v1alpha1.VMIdentity) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "rescue"}}
			pod.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{
					ClaimName: "vmid-web"}}}}
			require.NoError(w.t, w.Create(w.t.Context(), pod))
		}, "InUse", "pod rescue uses the disk"},
		"a move": {func(_ *world, id *v1alpha1.VMIdentity) {
			id.Status.Move = &v1alpha1.MoveStatus{}
		}, "InUse", "being moved"},
		"a server": {func(_ *world, id *v1alpha1.VMIdentity) {
			id.Spec.Attachment = v1alpha1.Service
		}, "Invalid", "attachment Service"},
		"no volume": {func(_ *world, id *v1alpha1.VMIdentity) { id.Status.Conditions = nil },
			"ClaimPending", "no volume yet"},
		"an image that may not be used": {func(w *world, _ *v1alpha1.VMIdentity) {
			w.r.Images = new(controllertest.Refusing(v1alpha1.ReasonNotSigned))
		}, "NotSigned", "are not read: the image has no signature"},
		"no exports": {func(w *world, _ *v1alpha1.VMIdentity) {
			w.r.Options.Without = []string{objects.Exports}
		}, "Invalid",
			"turned off"},
	} {
		t.Run(what, func(t *testing.T) {
			w := newWorld(t, new(controllertest.Calls))
			id := w.identity()
			c.change(w, id)
			status := id.Status
			require.NoError(t, w.Update(t.Context(), id))
			id.Status = status
			require.NoError(t, w.Status().Update(t.Context(), id))
			w.settle()
			w.require(c.reason, c.says)
			require.Empty(t, w.jobs())
			require.Nil(t, w.identity().Status.Export)
		})
	}
}

// TestExportFails: the message says why, the disk is free, and the Job stays until somebody deletes
// it. Then it begins again.
func TestExportFails(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls))
	w.settle()
	w.ends(batchv1.JobFailed, "reading\nregistry.example.com: 401 Unauthorized")
	w.settle()
	w.require("ExportFailed", "registry.example.com: 401 Unauthorized. Delete the Job")
	require.False(t, w.identity().Status.Export.Running)
	job := w.jobs()[0]
	w.settle()
	require.Len(t, w.jobs(), 1)
	require.NoError(t, w.Delete(t.Context(), &job))
	require.NoError(t, w.DeleteAllOf(t.Context(), &corev1.Pod{}, client.InNamespace("default")))
	w.settle()
	w.require("Exporting", "commits")

	w.ends(batchv1.JobComplete, "done")
	w.settle()
	w.require("ExportFailed", "does not say the digest")
}

// TestExportIsRefused: while the quota has no room for the Job, the disk is free, and the export
// does not begin again and again.
func TestExportIsRefused(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls))
	full := true
	w.r.Client = interceptor.NewClient(w.r.Client.(client.WithWatch), interceptor.Funcs{
		Create: func(ctx context.Context, in client.WithWatch, o client.Object,
			opts ...client.CreateOption) error {
			if full {
				return apierrors.NewForbidden(batchv1.Resource("jobs"), o.GetName(),
					errors.New("exceeded quota: jobs"))
			}
			return in.Create(ctx, o, opts...)
		}})
	w.settle()
	w.require("ExportFailed", "exceeded quota: jobs")
	require.Nil(t, w.identity().Status.Export)
	// Nobody asks for it any more, so nothing is left of the refusal.
	export := w.identity().Spec.Export
	for _, without := range [][]string{nil, {objects.Exports}} {
		w.r.Options.Without = without
		w.change(func(id *v1alpha1.VMIdentity) { id.Spec.Export = export })
		w.settle()
		require.NotEmpty(t, w.identity().Status.Conditions)
		w.change(func(id *v1alpha1.VMIdentity) { id.Spec.Export = nil })
		w.settle()
		require.Nil(t, apimeta.FindStatusCondition(w.identity().Status.Conditions,
			v1alpha1.ConditionExported))
	}
	w.r.Options.Without, full = nil, false
	w.change(func(id *v1alpha1.VMIdentity) { id.Spec.Export = export })
	w.settle()
	w.require("Exporting", "commits")
}

// TestExportIsGivenUp: without the spec the Job goes, and the disk is free when its pod has ended.
func TestExportIsGivenUp(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls))
	w.settle()
	pod := controllertest.PodOf(t, w, &w.jobs()[0])
	w.change(func(id *v1alpha1.VMIdentity) { id.Spec.Export = nil })
	// The cache does not know the Job yet.
	cache := w.r.Client
	w.r.Client = controllertest.Labelled(cache.(client.WithWatch), "none", &batchv1.Job{})
	job := w.jobs()[0]
	job.Finalizers = []string{metav1.FinalizerDeleteDependents} // it goes after its pods
	require.NoError(t, w.Update(t.Context(), &job))
	for range 2 {
		require.NoError(t, testtool.Err(w.r.Reconcile(t.Context(), ctrl.Request{
			NamespacedName: client.ObjectKeyFromObject(w.identity())})))
	}
	w.r.Client = cache
	require.NotNil(t, w.jobs()[0].DeletionTimestamp)
	w.require("Stopping", "of the earlier export is ending")
	require.True(t, w.identity().Status.Export.Running)
	job = w.jobs()[0]
	job.Finalizers = nil
	require.NoError(t, w.Update(t.Context(), &job))
	w.settle()
	require.Empty(t, w.jobs())
	w.require("Stopping", "is ending")
	require.True(t, w.identity().Status.Export.Running)
	require.NoError(t, w.Delete(t.Context(), pod))
	w.settle()
	require.Nil(t, w.identity().Status.Export)
	require.Nil(t, apimeta.FindStatusCondition(w.identity().Status.Conditions,
		v1alpha1.ConditionExported))
}

// TestExportJob: the Job has the claim, and of secrets only the credential of a registry in the one
// that the spec names.
func TestExportJob(t *testing.T) {
	id := newWorld(t, new(controllertest.Calls)).identity()
	pod := newJob(id, "kubevirt.io:disk").Spec.Template.Spec
	require.Equal(t, []string{"commit", reference, "--persistent-dir=/data",
		"--digest-file=/dev/termination-log", "--onto=" + image}, pod.Containers[0].Args)
	require.Equal(t, "vmid-web", pod.Volumes[0].PersistentVolumeClaim.ClaimName)
	require.Equal(t, "vmexport-push", pod.Volumes[2].Secret.SecretName)
	require.Equal(t, []corev1.KeyToPath{{Key: ".dockerconfigjson", Path: ".dockerconfigjson"}},
		pod.Volumes[2].Secret.Items)
	require.False(t, *pod.AutomountServiceAccountToken)
	require.True(t, *pod.SecurityContext.RunAsNonRoot)

	name := jobName(id)
	id.Spec.Export.RegistryCA = &v1alpha1.ConfigMapKey{Name: "trust", Key: "bundle.pem"}
	require.NotEqual(t, name, jobName(id), "with other certificates, it is another export")
	pod = newJob(id, "kubevirt.io:disk").Spec.Template.Spec
	require.Equal(t, []corev1.EnvVar{
		{Name: "REGISTRY_CONFIG", Value: "/etc/registry/.dockerconfigjson"},
		{Name: "REGISTRY_CA", Value: "/etc/registry-ca/ca.crt"}}, pod.Containers[0].Env)
	require.Equal(t, "trust", pod.Volumes[3].ConfigMap.Name)
	require.Equal(t, []corev1.KeyToPath{{Key: "bundle.pem", Path: "ca.crt"}},
		pod.Volumes[3].ConfigMap.Items)
	require.Equal(t, "/etc/registry-ca", pod.Containers[0].VolumeMounts[3].MountPath)

	id.Spec.Export.Flat, id.Spec.Export.SecretName, id.Spec.Export.RegistryCA = true, "", nil
	require.Equal(t, []string{"--image=" + image, "--flat", "--base=none"}, args(id)[4:])
	require.Len(t, newJob(id, "s").Spec.Template.Spec.Volumes, 2)
	id.Spec.Export.Flat, id.Spec.Population = false, v1alpha1.Snapshot
	require.Equal(t, []string{"--onto=" + image}, args(id)[4:])
	id.Spec.Image = "https://example.com/fedora.qcow2@sha256:" + strings.Repeat("1", 64)
	require.Equal(t, []string{"--flat", "--base=none"}, args(id)[4:], "a file has no layers")
	id.Spec.Image = ""
	require.Equal(t, []string{"--flat", "--base=none"}, args(id)[4:])
	require.Empty(t, objects.Ended(newJob(id, "s")).Type)
}
