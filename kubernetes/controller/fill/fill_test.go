package fill

import (
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/registry/signature"
	"kubevirt.io/disk/status"
)

const ns = "default"

var (
	image  = "registry.example.com/fedora@sha256:" + strings.Repeat("a", 64)
	digest = "sha256:" + strings.Repeat("a", 64)
	scheme = controllertest.Scheme(batchv1.AddToScheme, storagev1.AddToScheme)
)

// world is an API server with a VMImage and a claim that begins from it, and Kubernetes' work on
// claims, volumes and Jobs.
type world struct {
	t *testing.T
	client.WithWatch
	r      *Reconciler
	events *events.FakeRecorder
	uids   int
	// fails is what the next pods say at their end; "": they fetch the disk.
	fails string
	// held keeps the Job from ending.
	held bool
}

func newWorld(t *testing.T, calls *controllertest.Calls) *world {
	t.Helper()
	w := &world{t: t, events: events.NewFakeRecorder(1000)}
	w.WithWatch = fake.NewClientBuilder().WithScheme(scheme).
		WithIndex(&corev1.PersistentVolumeClaim{}, indexImage, byImage).
		WithStatusSubresource(&v1alpha1.VMImage{}, &batchv1.Job{}, &corev1.Pod{},
			&corev1.PersistentVolumeClaim{}, &corev1.PersistentVolume{}).
		WithInterceptorFuncs(interceptor.Funcs{Create: func(ctx context.Context,
			in client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			w.uids++
			o.SetUID(types.UID(fmt.Sprintf("uid-%d", w.uids)))
			return in.Create(ctx, o, opts...)
		}}).Build()
	role := controllertest.RoleOf(t, controllertest.Settings{Fill: true})
	c := role.Cache(calls.Client(w.WithWatch))
	w.r = &Reconciler{Claims: c, Kit: objects.Kit{Client: c,
		Live: role.Live(calls.Client(w.WithWatch)), Events: w.events,
		Options: objects.Options{Server: "kubevirt.io:disk"}},
		Ask: func(context.Context, string) (status.Progress, error) {
			return status.Progress{}, errors.New("no answer")
		}}
	w.create(controllertest.DefaultClass())
	w.create(&v1alpha1.VMImage{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "fedora"},
		Spec: v1alpha1.VMImageSpec{Image: image}})
	w.create(newTestClaim("web"))
	return w
}

func newTestClaim(name string) *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany},
			DataSourceRef: &corev1.TypedObjectReference{APIGroup: new(v1alpha1.Group),
				Kind: "VMImage", Name: "fedora"},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{
				corev1.ResourceStorage: resource.MustParse("10Gi")}}}}
}

func (w *world) create(o client.Object) {
	w.t.Helper()
	require.NoError(w.t, w.Create(w.t.Context(), o))
}

func (w *world) claim(name string) *corev1.PersistentVolumeClaim {
	w.t.Helper()
	return controllertest.Get(w.t, w, ns, name, &corev1.PersistentVolumeClaim{})
}

// filled is the claim that is filled for the claim web, or nil.
func (w *world) filled() *corev1.PersistentVolumeClaim {
	w.t.Helper()
	c := &corev1.PersistentVolumeClaim{}
	if !controllertest.There(w.t, w, ns, nameOf(w.claim("web")), c) {
		return nil
	}
	return c
}

func (w *world) job() *batchv1.Job {
	w.t.Helper()
	j := &batchv1.Job{}
	if !controllertest.There(w.t, w, ns, nameOf(w.claim("web")), j) {
		return nil
	}
	return j
}

func (w *world) image() *v1alpha1.VMImage {
	w.t.Helper()
	return controllertest.Get(w.t, w, ns, "fedora", &v1alpha1.VMImage{})
}

// kubernetes does its next step: a claim without a source gets a volume, a volume with a claimRef
// its claim, and a Job ends.
func (w *world) kubernetes() {
	w.t.Helper()
	ctx := w.t.Context()
	var claims corev1.PersistentVolumeClaimList
	require.NoError(w.t, w.List(ctx, &claims))
	var volumes corev1.PersistentVolumeList
	require.NoError(w.t, w.List(ctx, &volumes))
	for i := range claims.Items {
		c := &claims.Items[i]
		bound := ""
		for _, v := range volumes.Items {
			if ref := v.Spec.ClaimRef; ref.UID == c.UID && ref.Name == c.Name {
				bound = v.Name
			}
		}
		if bound == "" && c.Spec.DataSourceRef == nil && c.Spec.VolumeName == "" {
			bound = "pv-" + string(c.UID)
			w.create(&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: bound},
				Spec: corev1.PersistentVolumeSpec{ClaimRef: &corev1.ObjectReference{
					Namespace: c.Namespace, Name: c.Name, UID: c.UID}}})
		}
		if bound != "" && c.Spec.VolumeName == "" {
			c.Spec.VolumeName = bound
			require.NoError(w.t, w.Update(ctx, c))
			c.Status.Phase = corev1.ClaimBound
			require.NoError(w.t, w.Status().Update(ctx, c))
		}
	}
	if job := w.job(); job != nil && !w.held && len(job.Status.Conditions) == 0 {
		w.end(job)
	}
}

func (w *world) end(job *batchv1.Job) {
	w.t.Helper()
	if w.fails != "" {
		controllertest.EndJob(w.t, w, job, batchv1.JobFailed, w.fails)
		return
	}
	controllertest.EndJob(w.t, w, job, batchv1.JobComplete, digest)
}

func (w *world) reconcile() {
	_, _ = w.r.Reconcile(w.t.Context(), ctrl.Request{
		NamespacedName: client.ObjectKey{Namespace: ns, Name: "fedora"}})
}

// settle lets the controller and Kubernetes work until nothing changes.
func (w *world) settle() {
	w.t.Helper()
	for range 12 {
		w.reconcile()
		w.kubernetes()
	}
	w.reconcile()
}

// says is what the events of the claim have said since the last call.
func (w *world) says() (all string) {
	for {
		select {
		case e := <-w.events.Events:
			all += e + "\n"
		default:
			return all
		}
	}
}

// TestFill: whichever request fails, the claim gets one volume, which was filled, and what has
// filled it is gone.
func TestFill(t *testing.T) {
	controllertest.EachFault(t, func(t *testing.T, calls *controllertest.Calls) {
		w := newWorld(t, calls)
		w.settle()
		claim := w.claim("web")
		require.Equal(t, corev1.ClaimBound, claim.Status.Phase)
		require.Nil(t, w.filled())
		require.Nil(t, w.job())
		var volumes corev1.PersistentVolumeList
		require.NoError(t, w.List(t.Context(), &volumes))
		require.Len(t, volumes.Items, 1)
		require.Equal(t, volumes.Items[0].Name, claim.Spec.VolumeName)
		require.Equal(t, claim.UID, volumes.Items[0].Spec.ClaimRef.UID)
		require.Equal(t, ns, volumes.Items[0].Spec.ClaimRef.Namespace)
		require.Empty(t, w.image().Status.Claims)
		if calls.Fail == 0 {
			require.Contains(t, w.says(), "Normal Filled the claim has the disk of VMImage "+
				"fedora, "+digest)
		}
	})
}

// TestWhatFills: claim and Job are as the claim and the VMImage want them.
func TestWhatFills(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls))
	i := w.image()
	i.Spec.Keys = []string{"key 1", "key 2"}
	i.Spec.Path, i.Spec.SecretName = "root.img", "vmimage-pull"
	i.Spec.RegistryCA = &v1alpha1.ConfigMapKey{Name: "authority"}
	require.NoError(t, w.Update(t.Context(), i))
	w.held = true
	w.settle()
	filled, claim := w.filled(), w.claim("web")
	require.Nil(t, filled.Spec.DataSourceRef)
	require.Equal(t, claim.Spec.AccessModes, filled.Spec.AccessModes)
	require.Equal(t, claim.Spec.Resources, filled.Spec.Resources)
	pod := w.job().Spec.Template
	require.Equal(t, []string{"pull", "--force", "--digest-file=/dev/termination-log",
		"--progress-listen=:9262", "--path=root.img", "--verify-key=/etc/verify-keys/keys.pem",
		"--size=10092544000", image, "/data/disk.img"}, pod.Spec.Containers[0].Args)
	require.Equal(t, "key 1\nkey 2", pod.Annotations["verify-keys"])
	require.Contains(t, fmt.Sprint(pod.Spec.Containers[0].Env),
		"{REGISTRY_CA /etc/registry-ca/ca.crt nil}")
	require.Contains(t, fmt.Sprint(pod.Spec.Volumes), "vmimage-pull")

	block := newTestClaim("block")
	block.Spec.VolumeMode = new(corev1.PersistentVolumeBlock)
	w.create(block)
	job := newJob(w.image(), block, "uid", "kubevirt.io:disk")
	c := job.Spec.Template.Spec.Containers[0]
	require.Equal(t, []string{image, "/dev/vm-image"}, c.Args[len(c.Args)-2:])
	require.NotContains(t, strings.Join(c.Args, " "), "--size")
	require.Equal(t, []corev1.VolumeDevice{{Name: "data", DevicePath: "/dev/vm-image"}},
		c.VolumeDevices)
	require.Equal(t, corev1.PersistentVolumeBlock, *newClaim(block).Spec.VolumeMode)
}

// TestProgress: status and events say how far the pod is, as it says itself, in quarters.
func TestProgress(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls))
	w.held = true
	w.settle()
	pod := controllertest.PodOf(t, w, w.job())
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled,
		Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "no node"}}
	require.NoError(t, w.Status().Update(t.Context(), pod))
	w.reconcile()
	require.Contains(t, w.image().Status.Claims[0].Message, "no node can run the pod")
	pod.Status.Conditions = nil
	pod.Status.Phase, pod.Status.PodIP = corev1.PodRunning, "192.0.2.7"
	require.NoError(t, w.Status().Update(t.Context(), pod))
	for _, c := range []struct {
		done, total int64
		says        string
		event       bool
	}{{0, 0, "", false}, {1, 100, "1%", true}, {20, 100, "20%", false}, {60, 100, "60%", true},
		{200, 100, "100%", true}} {
		w.says()
		w.r.Ask = func(_ context.Context, address string) (status.Progress, error) {
			require.Equal(t, "192.0.2.7:9262", address)
			return status.Progress{Done: c.done, Total: c.total}, nil
		}
		w.reconcile()
		s := w.image().Status.Claims
		require.Len(t, s, 1)
		require.Equal(t, "web", s[0].Name)
		require.Equal(t, v1alpha1.ReasonFilling, s[0].Reason)
		require.Equal(t, c.says, s[0].Progress)
		require.Equal(t, c.event, strings.Contains(w.says(), c.says+" so far"), c.says)
	}
}

// TestFailedFill: the last words of the pod are the event of the claim and in the status. The Job
// is made again after a while, and at once when the VMImage changes.
func TestFailedFill(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls))
	w.fails = "fedora: no signature that counts"
	w.settle()
	require.NotEqual(t, corev1.ClaimBound, w.claim("web").Status.Phase)
	require.NotNil(t, w.filled())
	require.Contains(t, w.says(), "Warning FillFailed the claim cannot be filled: "+w.fails)
	require.Contains(t, w.image().Status.Claims[0].Message, w.fails)
	first := w.job()

	i := w.image()
	i.Spec.SecretName = "vmimage-pull"
	require.NoError(t, w.Update(t.Context(), i))
	w.settle()
	second := w.job()
	require.NotEqual(t, first.UID, second.UID)

	second.Status.Conditions[0].LastTransitionTime = metav1.NewTime(
		time.Now().Add(-2 * afterFailed))
	require.NoError(t, w.Status().Update(t.Context(), second))
	w.fails = ""
	w.settle()
	require.Equal(t, corev1.ClaimBound, w.claim("web").Status.Phase)
}

// TestWhatAClaimWaitsFor: nothing is made for a claim that cannot have a volume yet, or must not
// have one of ours, and people are told.
func TestWhatAClaimWaitsFor(t *testing.T) {
	mode := storagev1.VolumeBindingWaitForFirstConsumer
	late := controllertest.Class("late")
	late.VolumeBindingMode = &mode
	for what, c := range map[string]struct {
		change func(w *world, claim *corev1.PersistentVolumeClaim)
		says   string
	}{
		"no image": {func(w *world, _ *corev1.PersistentVolumeClaim) {
			require.NoError(w.t, w.Delete(w.t.Context(), w.image()))
		}, "Warning ImageMissing there is no VMImage fedora"},
		"no class": {func(_ *world, claim *corev1.PersistentVolumeClaim) {
			claim.Spec.StorageClassName = new("")
		}, "Warning Invalid the claim asks for no StorageClass"},
		"a class that is not there": {func(_ *world, claim *corev1.PersistentVolumeClaim) {
			claim.Spec.StorageClassName = new("gold")
		}, "Warning ClassMissing there is no StorageClass gold"},
		"a consumer": {func(_ *world, claim *corev1.PersistentVolumeClaim) {
			claim.Spec.StorageClassName = new("late")
		}, "Normal Waiting the StorageClass late makes a volume where the first pod runs"},
		"a stranger's Job": {func(w *world, claim *corev1.PersistentVolumeClaim) {
			w.create(&batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: ns,
				Name: nameOf(claim)}})
		}, "Warning FillFailed there is a Job vmfill-"},
		"another namespace": {func(_ *world, claim *corev1.PersistentVolumeClaim) {
			claim.Spec.DataSourceRef.Namespace = new("other")
		}, ""},
		"its end": {func(_ *world, claim *corev1.PersistentVolumeClaim) {
			claim.Spec.VolumeName = "by hand"
		}, ""},
	} {
		t.Run(what, func(t *testing.T) {
			w := newWorld(t, new(controllertest.Calls))
			w.create(late.DeepCopy())
			claim := w.claim("web")
			c.change(w, claim)
			require.NoError(t, w.Update(t.Context(), claim))
			w.held = true
			w.settle()
			require.Nil(t, w.filled())
			said := w.says()
			require.Equal(t, c.says == "", said == "", said)
			require.Contains(t, said, c.says)
			require.Equal(t, 1, max(1, strings.Count(said, "\n")), "it is told once: %s", said)
		})
	}
}

// TestFirstConsumer: the volume is made on the node that the scheduler has chosen for the consumer.
func TestFirstConsumer(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls))
	mode := storagev1.VolumeBindingWaitForFirstConsumer
	late := controllertest.Class("late")
	late.VolumeBindingMode = &mode
	w.create(late)
	claim := w.claim("web")
	claim.Spec.StorageClassName = new("late")
	claim.Annotations = map[string]string{annotationNode: "node-7"}
	require.NoError(t, w.Update(t.Context(), claim))
	w.held = true
	w.settle()
	require.Equal(t, "node-7", w.filled().Annotations[annotationNode])
}

// TestVolumeOfAnotherClaim: a claim names a volume in its spec as it likes. Only one that
// Kubernetes has bound to it is given away.
func TestVolumeOfAnotherClaim(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls))
	w.create(&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "other"},
		Spec: corev1.PersistentVolumeSpec{ClaimRef: &corev1.ObjectReference{Namespace: "victim",
			Name: nameOf(w.claim("web")), UID: "victim"}}})
	w.held = true
	w.settle()
	filled := w.filled()
	filled.Spec.VolumeName = "other"
	require.NoError(t, w.Update(t.Context(), filled))
	w.held = false
	w.settle()
	v := controllertest.Get(t, w, "", "other", &corev1.PersistentVolume{})
	require.Equal(t, types.UID("victim"), v.Spec.ClaimRef.UID)
	require.Contains(t, w.says(), "no volume is bound to the claim")
}

// TestClaimGoesBeforeItsVolumeIsGiven: if somebody deletes the claim that was filled, the next one
// of its name is filled, too, before its volume is given away.
func TestClaimGoesBeforeItsVolumeIsGiven(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls))
	w.held = true
	w.settle()
	first := w.job()
	w.end(first)
	require.NoError(t, w.Delete(t.Context(), w.filled()))
	w.settle()
	second := w.job()
	require.NotNil(t, second, "the claim got a volume that is empty")
	require.NotEqual(t, first.UID, second.UID)
	w.held = false
	w.settle()
	require.Equal(t, corev1.ClaimBound, w.claim("web").Status.Phase)
}

// TestStrip: of claims that are none of ours, the cache keeps only what tells that they are there.
func TestStrip(t *testing.T) {
	other := newTestClaim("other")
	other.Spec.DataSourceRef = nil
	other.Labels = map[string]string{"a": "b"}
	o := testtool.Must(strip(other))(t)
	require.Equal(t, &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: ns,
		Name: "other"}}, o)
	ours := newTestClaim("ours")
	ours.Annotations = map[string]string{annotationNode: "n", "x": "y"}
	o = testtool.Must(strip(ours))(t)
	require.Equal(t, map[string]string{annotationNode: "n"}, o.(client.Object).GetAnnotations())
	require.Equal(t, []string{"fedora"}, byImage(o.(client.Object)))
}

// newKey is a public key in PEM.
func newKey(t *testing.T) string {
	t.Helper()
	public, _ := testtool.Must2(ed25519.GenerateKey(nil))(t)
	spki := testtool.Must(x509.MarshalPKIXPublicKey(public))(t)
	return string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: spki}))
}

// TestPolicy: the keys of the namespace's policy count, and those of the VMImage only if they are
// among them.
func TestPolicy(t *testing.T) {
	theirs, both, own := newKey(t), newKey(t), newKey(t)
	for what, c := range map[string]struct {
		policy, image, want []string
		refused, says       string
	}{
		"nothing is asked":   {nil, []string{own}, []string{own}, "", ""},
		"the policy's":       {[]string{theirs, both}, nil, []string{theirs, both}, "", ""},
		"those of both":      {[]string{theirs, both}, []string{own, both}, []string{both}, "", ""},
		"none of both":       {[]string{theirs}, []string{own}, nil, "", "none of the keys"},
		"what is no key":     {[]string{theirs}, []string{"x"}, nil, "", "no public key"},
		"a policy's refusal": {nil, []string{own}, nil, v1alpha1.ReasonNotSigned, "denied"},
	} {
		t.Run(what, func(t *testing.T) {
			w := newWorld(t, new(controllertest.Calls))
			i := w.image()
			i.Spec.Keys = c.image
			require.NoError(t, w.Update(t.Context(), i))
			var policy []signature.Key
			if c.policy != nil {
				policy = testtool.Must(signature.ParseKeys([]byte(strings.Join(c.policy, "\n"))))(t)
			}
			w.r.Keys = func(_ context.Context, in, name string) ([]signature.Key, string,
				string, error) {
				require.Equal(t, ns+" "+image, in+" "+name)
				return policy, c.refused, "denied", nil
			}
			w.held = true
			w.settle()
			if c.want == nil {
				require.Nil(t, w.job())
				require.Contains(t, w.says(), c.says)
				return
			}
			require.Equal(t, strings.Join(c.want, "\n"),
				w.job().Spec.Template.Annotations[annotationKeys])
		})
	}
}
