package snapshot

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/source"
)

const image = "registry.example.com/fedora@sha256:" +
	"a8dd75ecffd4cdd96072d60c2237b448e0c8b2bc94d57f10fdbc8c481d9005b8"

var scheme = controllertest.Scheme(batchv1.AddToScheme, storagev1.AddToScheme, func(
	s *runtime.Scheme) error {
	s.AddKnownTypeWithName(source.SnapshotKind, &unstructured.Unstructured{})
	s.AddKnownTypeWithName(source.SnapshotKind.GroupVersion().WithKind("VolumeSnapshotList"),
		&unstructured.UnstructuredList{})
	return nil
})

// world is an API server with a snapshot driver and the Job controller. The driver takes a moment,
// and can fail.
type world struct {
	t *testing.T
	client.WithWatch
	calls    *controllertest.Calls
	r        *Reconciler
	events   chan string
	uid      int
	held     bool   // the Job does not end
	jobFails string // output of the failing Job; "": the Job writes the image
	snapErr  string // error of the driver; "": it takes the snapshot
}

func newWorld(t *testing.T, calls *controllertest.Calls, names ...string) *world {
	t.Helper()
	w := &world{t: t, calls: calls, events: make(chan string, 1000)}
	var all []client.Object
	for _, name := range names {
		all = append(all, &v1alpha1.VMIdentity{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
				UID: types.UID("uid-" + name), Generation: 1},
			Spec: v1alpha1.VMIdentitySpec{DiskSpec: v1alpha1.DiskSpec{Image: image,
				Population: v1alpha1.Snapshot}}})
	}
	w.WithWatch = fake.NewClientBuilder().WithScheme(scheme).WithObjects(all...).
		WithStatusSubresource(&v1alpha1.VMIdentity{}, &batchv1.Job{}, &corev1.Pod{}).Build()
	role := controllertest.RoleOf(t, controllertest.Settings{Snapshots: true})
	c := role.Cache(calls.Client(w.WithWatch))
	w.r = &Reconciler{objects.Kit{Client: c, Snapshots: c,
		Live: role.Live(calls.Client(w.WithWatch)), Events: &events.FakeRecorder{Events: w.events},
		Options: objects.Options{Server: "kubevirt.io:disk", ClaimSize: resource.MustParse("20Gi"),
			UsageTypes: map[string]string{"fast": "ssd"}}}}
	return w
}

// golden is the key of all golden objects for the image.
func golden() client.ObjectKey {
	return client.ObjectKey{Namespace: "default", Name: source.Golden(image, nil)}
}

// there reads an object, and says whether it exists.
func (w *world) there(o client.Object) bool {
	w.t.Helper()
	return controllertest.There(w.t, w, golden().Namespace, golden().Name, o)
}

// kubernetes does one thing that Kubernetes has to do, and returns whether there was one.
func (w *world) kubernetes() bool {
	w.t.Helper()
	ctx := w.t.Context()
	job, claim, snapshot := &batchv1.Job{}, &corev1.PersistentVolumeClaim{}, source.NewSnapshot()
	hasJob, hasClaim, hasSnapshot := w.there(job), w.there(claim), w.there(snapshot)
	for o, there := range map[client.Object]bool{claim: hasClaim, snapshot: hasSnapshot} {
		owner := metav1.GetControllerOf(o)
		if there && owner != nil && (!hasJob || owner.UID != job.UID) {
			require.NoError(w.t, w.Delete(ctx, o)) // it is collected
			return true
		}
	}
	switch {
	case !hasJob:
	case job.UID == "":
		w.uid++
		job.UID = types.UID(string(rune('0' + w.uid)))
		require.NoError(w.t, w.Update(ctx, job))
		return true
	case hasClaim && objects.Ended(job).Type == "" && w.held:
	case hasClaim && objects.Ended(job).Type == "":
		if w.jobFails != "" {
			controllertest.EndJob(w.t, w, job, batchv1.JobFailed, "fetching\n"+w.jobFails+"\n")
			return true
		}
		controllertest.EndJob(w.t, w, job, batchv1.JobComplete, "")
		return true
	case hasSnapshot:
		ready, _, problem := source.SnapshotState(snapshot)
		if !ready && problem != w.snapErr || !ready && w.snapErr == "" {
			require.NoError(w.t, unstructured.SetNestedField(snapshot.Object, w.snapErr == "",
				"status", "readyToUse"))
			require.NoError(w.t, unstructured.SetNestedField(snapshot.Object, w.snapErr,
				"status", "error", "message"))
			require.NoError(w.t, unstructured.SetNestedField(snapshot.Object, "20Gi",
				"status", "restoreSize"))
			require.NoError(w.t, w.Update(ctx, snapshot))
			return true
		}
	}
	return false
}

// claim makes the claim of an identity.
func (w *world) claim(identity string, phase corev1.PersistentVolumeClaimPhase) {
	w.t.Helper()
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default",
		Name: v1alpha1.ClaimName(identity)}}
	claim.Status.Phase = phase
	require.NoError(w.t, w.Create(w.t.Context(), claim))
}

func (w *world) reconcile(name string) (ctrl.Result, error) {
	return w.r.Reconcile(w.t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{
		Namespace: "default", Name: name}})
}

// converge reconciles until there is nothing to do.
func (w *world) converge(names ...string) ctrl.Result {
	w.t.Helper()
	var keys []client.ObjectKey
	for _, name := range names {
		keys = append(keys, client.ObjectKey{Namespace: "default", Name: name})
	}
	return w.calls.Settle(w.t, w.r, w.kubernetes, keys...)
}

func (w *world) identity(name string) *v1alpha1.VMIdentity {
	w.t.Helper()
	return controllertest.Get(w.t, w, "default", name, &v1alpha1.VMIdentity{})
}

func (w *world) populated(name string) *metav1.Condition {
	w.t.Helper()
	c := apimeta.FindStatusCondition(w.identity(name).Status.Conditions,
		v1alpha1.ConditionPopulated)
	require.NotNil(w.t, c)
	return c
}

func TestPopulate(t *testing.T) {
	controllertest.EachFault(t, func(t *testing.T, calls *controllertest.Calls) {
		w := newWorld(t, calls, "vm1", "vm2")
		w.converge("vm1", "vm2")
		f := source.Finder{Kit: objects.Kit{Client: w, Live: w, Snapshots: w}}
		for _, name := range []string{"vm1", "vm2"} {
			require.Equal(t, metav1.ConditionTrue, w.populated(name).Status)
			a := testtool.Must(f.Find(t.Context(), w.identity(name), nil))(t)
			require.Empty(t, a.Reason)
			require.Equal(t, golden().Name, a.From.Name)
			require.Equal(t, "snapshot.storage.k8s.io", *a.From.APIGroup)
			require.Equal(t, "20Gi", a.AtLeast.String())
		}
		// Both identities share one of each, which stays while one of them exists.
		var jobs batchv1.JobList
		require.NoError(t, w.List(t.Context(), &jobs))
		require.Len(t, jobs.Items, 1)
		require.Len(t, jobs.Items[0].OwnerReferences, 2)
		writes := calls.Writes
		w.converge("vm1", "vm2")
		require.Equal(t, writes, calls.Writes)
	})
}

// TestJob: the Job fits into a namespace that enforces "restricted", and writes the file that
// serves the claim of an identity. While a pod of it is ending, it makes no other one.
func TestJob(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), "vm1")
	w.r.Options.PullSecret, w.r.Options.PullCA = "regcred", "our-ca"
	w.converge("vm1")
	var job batchv1.Job
	require.True(t, w.there(&job))
	pod := job.Spec.Template.Spec
	c := pod.Containers[0]
	require.Equal(t, batchv1.Failed, *job.Spec.PodReplacementPolicy)
	require.Equal(t, []string{"pull", "--force", image, "/data/disk.img"}, c.Args)
	require.Equal(t, golden().Name, pod.Volumes[0].PersistentVolumeClaim.ClaimName)
	require.Equal(t, "REGISTRY_CONFIG", c.Env[0].Name)
	require.Equal(t, "regcred", pod.Volumes[2].Secret.SecretName)
	require.Equal(t, corev1.EnvVar{Name: "REGISTRY_CA", Value: "/etc/registry-ca/ca.crt"}, c.Env[1])
	require.Equal(t, "our-ca", pod.Volumes[3].ConfigMap.Name)
	require.False(t, *c.SecurityContext.AllowPrivilegeEscalation)
	require.True(t, *c.SecurityContext.RunAsNonRoot)
	require.Equal(t, corev1.SeccompProfileTypeRuntimeDefault, c.SecurityContext.SeccompProfile.Type)
	var claim corev1.PersistentVolumeClaim
	require.True(t, w.there(&claim))
	require.Equal(t, "20Gi", claim.Spec.Resources.Requests.Storage().String())
	require.True(t, metav1.IsControlledBy(&claim, &job))
}

// TestRoomForTheImage: a full image fits into the claim, whose file system needs room, too.
func TestRoomForTheImage(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), "vm")
	id := w.identity("vm")
	id.Spec.Size = new(resource.MustParse("32Gi"))
	require.NoError(t, w.Update(t.Context(), id))
	w.converge("vm")
	var claim corev1.PersistentVolumeClaim
	require.True(t, w.there(&claim))
	require.Equal(t, "34944Mi", claim.Spec.Resources.Requests.Storage().String())
}

func TestNameIsThatOfTheContent(t *testing.T) {
	other := "mirror.example.com/f" + image[len("registry.example.com/fedora"):]
	require.Equal(t, source.Golden(image, nil), source.Golden(other, nil))
	require.NotEqual(t, source.Golden(image, nil), source.Golden(image, new("")))
	require.NotEqual(t, source.Golden(image, nil), source.Golden(image, new("default")))
	require.NotEqual(t, source.Golden(image, nil), source.Golden(image[:len(image)-1]+"9", nil))
}

// TestDefaultClass: what is made for an image is of the class that is the default one now, and an
// identity that has its claim keeps what its claim begins from.
func TestDefaultClass(t *testing.T) {
	w := newWorld(t, &controllertest.Calls{}, "vm")
	fast := controllertest.DefaultClass()
	fast.Name = "fast"
	require.NoError(t, w.Create(t.Context(), fast))
	w.converge("vm")
	var claims corev1.PersistentVolumeClaimList
	require.NoError(t, w.List(t.Context(), &claims))
	require.Len(t, claims.Items, 1)
	require.Equal(t, source.Golden(image, new("fast")), claims.Items[0].Name)
	require.Equal(t, "fast", *claims.Items[0].Spec.StorageClassName)

	fast.Annotations = nil
	require.NoError(t, w.Update(t.Context(), fast))
	require.NoError(t, w.Create(t.Context(), controllertest.DefaultClass()))
	// An earlier version had one name for all default classes.
	for _, from := range []string{claims.Items[0].Name, source.Golden(image, nil)} {
		own := &corev1.PersistentVolumeClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "vmid-vm"},
			Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: new("fast"),
				DataSourceRef: &corev1.TypedObjectReference{Name: from}}}
		require.NoError(t, w.Create(t.Context(), own))
		w.converge("vm")
		require.NoError(t, w.Delete(t.Context(), own))
		golden := controllertest.Get(t, w, "default", from, &corev1.PersistentVolumeClaim{})
		require.Equal(t, "fast", *golden.Spec.StorageClassName)
	}
	require.NoError(t, w.List(t.Context(), &claims))
	require.Len(t, claims.Items, 2, "of no other class")
}

// TestJobFails: the output of the command is reported, and everything is made again after a while.
func TestJobFails(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), "vm1")
	w.jobFails = "registry.example.com is unknown"
	result := w.converge("vm1")
	c := w.populated("vm1")
	require.Equal(t, v1alpha1.ReasonPopulationError, c.Reason)
	require.Contains(t, c.Message, "cannot write the image: registry.example.com is unknown")
	require.Positive(t, result.RequeueAfter)
	require.Contains(t, <-w.events, "Warning PopulationError")
	f := source.Finder{Kit: objects.Kit{Snapshots: w}}
	a := testtool.Must(f.Find(t.Context(), w.identity("vm1"), nil))(t)
	require.Equal(t, source.Answer{Reason: c.Reason, Message: c.Message}, a)
	reads := w.calls.Reads
	require.NoError(t, testtool.Err(w.reconcile("vm1")))
	require.Equal(t, 6, w.calls.Reads-reads, "the pods are asked once")

	var job batchv1.Job
	require.True(t, w.there(&job))
	failed := job.UID
	job.Status.Conditions[0].LastTransitionTime = metav1.NewTime(time.Now().Add(-failedStays))
	require.NoError(t, w.Status().Update(t.Context(), &job))
	w.jobFails = ""
	w.converge("vm1")
	require.Equal(t, metav1.ConditionTrue, w.populated("vm1").Status)
	require.True(t, w.there(&job))
	require.NotEqual(t, failed, job.UID)
}

// TestRetryConverges: a failed Job is deleted and everything made again, whichever request fails.
func TestRetryConverges(t *testing.T) {
	controllertest.EachFault(t, func(t *testing.T, calls *controllertest.Calls) {
		w := newWorld(t, calls, "vm1")
		w.jobFails = "no"
		w.converge("vm1")
		var job batchv1.Job
		require.True(t, w.there(&job))
		job.Status.Conditions[0].LastTransitionTime = metav1.NewTime(time.Now().Add(-failedStays))
		require.NoError(t, w.Status().Update(t.Context(), &job))
		w.jobFails = ""
		w.converge("vm1")
		require.Equal(t, metav1.ConditionTrue, w.populated("vm1").Status)
	})
}

func TestSnapshotFails(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), "vm1")
	w.snapErr = "the pool is full"
	w.converge("vm1")
	require.Equal(t, v1alpha1.ReasonPopulationError, w.populated("vm1").Reason)
	require.Contains(t, w.populated("vm1").Message, "the pool is full")
	w.snapErr = ""
	w.converge("vm1")
	require.Equal(t, metav1.ConditionTrue, w.populated("vm1").Status)
}

// TestWhatEndsIsNotUsed: nothing is made from a Job, a claim or a snapshot that is being deleted.
func TestWhatEndsIsNotUsed(t *testing.T) {
	for name, o := range map[string]client.Object{"Job": &batchv1.Job{},
		"claim":          &corev1.PersistentVolumeClaim{},
		"VolumeSnapshot": source.NewSnapshot()} {
		w := newWorld(t, new(controllertest.Calls), "vm1", "vm2")
		w.converge("vm1")
		require.True(t, w.there(o))
		o.SetFinalizers([]string{"example.com/driver"})
		require.NoError(t, w.Update(t.Context(), o))
		require.NoError(t, w.Delete(t.Context(), o))
		for range 3 {
			require.NoError(t, testtool.Err(w.reconcile("vm2")))
		}
		require.Equal(t, v1alpha1.ReasonPopulating, w.populated("vm2").Reason, name)
		require.Contains(t, w.populated("vm2").Message, "is being deleted", name)
		if name == "VolumeSnapshot" {
			f := source.Finder{Kit: objects.Kit{Snapshots: w}}
			a := testtool.Must(f.Find(t.Context(), w.identity("vm1"), nil))(t)
			require.Equal(t, v1alpha1.ReasonPopulating, a.Reason)
		}
		require.True(t, w.there(o))
		o.SetFinalizers(nil)
		require.NoError(t, w.Update(t.Context(), o))
		w.converge("vm2")
		require.Equal(t, metav1.ConditionTrue, w.populated("vm2").Status, name)
	}
}

// TestQuota: a refusal of the API server is reported, and tried again.
func TestQuota(t *testing.T) {
	quota := apierrors.NewForbidden(corev1.Resource("persistentvolumeclaims"), "x", nil)
	// The identity, its claim, the classes, the Job, and then its creation.
	w := newWorld(t, &controllertest.Calls{Fail: 5, Err: quota}, "vm1")
	require.Error(t, testtool.Err(w.reconcile("vm1")))
	require.Equal(t, v1alpha1.ReasonPopulationError, w.populated("vm1").Reason)
	require.Contains(t, w.populated("vm1").Message, "does not allow")
	w.converge("vm1")
	require.Equal(t, metav1.ConditionTrue, w.populated("vm1").Status)
}

// TestSnapshotGoesBeforeTheVolume: while the claim of an identity has no volume, a snapshot that
// somebody deletes is made again, under the same name.
func TestSnapshotGoesBeforeTheVolume(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), "vm1")
	w.converge("vm1")
	id := w.identity("vm1")
	id.Status.CreationTime = new(metav1.Now()) // it has a claim that waits for its first pod
	require.NoError(t, w.Status().Update(t.Context(), id))
	w.claim("vm1", corev1.ClaimPending)
	snapshot := source.NewSnapshot()
	require.True(t, w.there(snapshot))
	require.NoError(t, w.Delete(t.Context(), snapshot))
	require.NoError(t, testtool.Err(w.reconcile("vm1")))
	require.Equal(t, v1alpha1.ReasonPopulating, w.populated("vm1").Reason)
	w.converge("vm1")
	require.True(t, w.there(source.NewSnapshot()))
	require.Equal(t, metav1.ConditionTrue, w.populated("vm1").Status)
}

// TestClaimGoesBeforeTheSnapshot: a snapshot is made of the claim that the Job has filled, and not
// of another one, which would be empty.
func TestClaimGoesBeforeTheSnapshot(t *testing.T) {
	controllertest.EachFault(t, func(t *testing.T, calls *controllertest.Calls) {
		w := newWorld(t, calls, "vm1")
		w.converge("vm1")
		var job batchv1.Job
		require.True(t, w.there(&job))
		filled := job.UID
		claim, snapshot := &corev1.PersistentVolumeClaim{}, source.NewSnapshot()
		for _, o := range []client.Object{claim, snapshot} {
			require.True(t, w.there(o))
			require.NoError(t, w.Delete(t.Context(), o))
		}
		w.converge("vm1")
		require.Equal(t, metav1.ConditionTrue, w.populated("vm1").Status)
		require.True(t, w.there(&job))
		require.NotEqual(t, filled, job.UID, "the image was written again")
		require.True(t, w.there(claim))
		require.True(t, metav1.IsControlledBy(claim, &job))
		// With a snapshot, nobody needs the claim.
		require.NoError(t, w.Delete(t.Context(), claim))
		w.converge("vm1")
		require.Equal(t, metav1.ConditionTrue, w.populated("vm1").Status)
		require.False(t, w.there(claim))
	})
}

// TestClaimGoesWhileItIsFilled: somebody deletes the claim under the Job, whose end is known a
// moment after the claim has gone. The image is written again, and not looked for in another claim.
func TestClaimGoesWhileItIsFilled(t *testing.T) {
	controllertest.EachFault(t, func(t *testing.T, calls *controllertest.Calls) {
		w := newWorld(t, calls, "vm1")
		w.held = true
		w.converge("vm1")
		var job batchv1.Job
		require.True(t, w.there(&job))
		filled, claim := job.UID, &corev1.PersistentVolumeClaim{}
		require.True(t, w.there(claim))
		claim.Finalizers = []string{"kubernetes.io/pvc-protection"}
		require.NoError(t, w.Update(t.Context(), claim))
		require.NoError(t, w.Delete(t.Context(), claim))
		key := client.ObjectKey{Namespace: "default", Name: "vm1"}
		calls.Settle(t, w.r, nil, key)
		require.True(t, w.there(claim))
		claim.Finalizers = nil
		require.NoError(t, w.Update(t.Context(), claim))
		w.converge("vm1")
		w.held = false
		w.converge("vm1")
		require.Equal(t, metav1.ConditionTrue, w.populated("vm1").Status)
		require.True(t, w.there(&job))
		require.NotEqual(t, filled, job.UID, "the image was written again")
	})
}

// TestManyIdentities: an object has no room for an owner for each of thousands of identities.
func TestManyIdentities(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), "vm1", "vm2")
	w.converge("vm1")
	var job batchv1.Job
	require.True(t, w.there(&job))
	for len(job.OwnerReferences) < maxOwners {
		other := *job.OwnerReferences[0].DeepCopy()
		other.UID = types.UID(fmt.Sprint("other-", len(job.OwnerReferences)))
		job.OwnerReferences = append(job.OwnerReferences, other)
	}
	require.NoError(t, w.Update(t.Context(), &job))
	w.converge("vm2")
	require.Equal(t, metav1.ConditionTrue, w.populated("vm2").Status)
	require.True(t, w.there(&job))
	require.Len(t, job.OwnerReferences, maxOwners)
	// Kubernetes takes an owner away that is gone.
	job.OwnerReferences = job.OwnerReferences[1:]
	require.NoError(t, w.Update(t.Context(), &job))
	w.converge("vm2")
	require.True(t, w.there(&job))
	require.Len(t, job.OwnerReferences, maxOwners)
	require.EqualValues(t, "uid-vm2", job.OwnerReferences[maxOwners-1].UID)
}

// TestImageThatIsHeld: nothing is written from an image that may not be used.
func TestImageThatIsHeld(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), "a")
	refusing := controllertest.Refusing(v1alpha1.ReasonNotSigned)
	w.r.Images = &refusing
	require.NoError(t, testtool.Err(w.reconcile("a")))
	require.False(t, w.there(&batchv1.Job{}))
	require.Equal(t, "NotSigned", w.populated("a").Reason)
	refusing = ""
	require.NoError(t, testtool.Err(w.reconcile("a")))
	require.True(t, w.there(&batchv1.Job{}))
}
