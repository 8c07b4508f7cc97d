package service

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/status"
)

const (
	image = "registry.example.com/fedora@sha256:" +
		"a8dd75ecffd4cdd96072d60c2237b448e0c8b2bc94d57f10fdbc8c481d9005b8"
	here, there = "iqn.2017-01.io.kubevirt:node-1:vm", "iqn.2017-01.io.kubevirt:node-2:vm"
)

var (
	name  = client.ObjectKey{Namespace: "default", Name: "vm1"}
	made  = client.ObjectKey{Namespace: "default", Name: "vmid-vm1"}
	claim = client.ObjectKey{Namespace: "default", Name: "vm1-root"}
)

// world is an API server, the controllers of Kubernetes as far as needed, a kubelet, and the daemon
// in the server's pod.
type world struct {
	t *testing.T
	client.WithWatch
	calls  *controllertest.Calls
	r      *Reconciler
	events chan string
	page   status.Status // of the daemon
	stale  bool          // the kubelet has not written the annotations yet
	// silent is why the daemon does not answer. nil: it does.
	silent func() error
}

func newWorld(t *testing.T, calls *controllertest.Calls, change func(*v1alpha1.VMIdentity)) *world {
	t.Helper()
	id := &v1alpha1.VMIdentity{
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name, UID: "u-1",
			Generation: 1, Annotations: map[string]string{},
			Finalizers: []string{v1alpha1.Finalizer}},
		Spec: v1alpha1.VMIdentitySpec{DiskSpec: v1alpha1.DiskSpec{Image: image,
			Type: v1alpha1.PersistentVolume, Attachment: v1alpha1.Service}},
		Status: v1alpha1.VMIdentityStatus{ClaimName: made.Name, SecretName: made.Name},
	}
	if change != nil {
		change(id)
	}
	w := &world{t: t, calls: calls, events: make(chan string, 1000)}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: made.Namespace,
		Name: made.Name}}
	w.WithWatch = fake.NewClientBuilder().WithScheme(scheme).WithObjects(id, secret).
		WithStatusSubresource(id, &appsv1.Deployment{}, &corev1.Pod{},
			&corev1.PersistentVolumeClaim{}).Build()
	volumes := id.Annotations[v1alpha1.AnnotationVolumeClaim] != ""
	role := controllertest.RoleOf(t, controllertest.Settings{Services: true, Volumes: volumes})
	api := calls.Client(w.WithWatch)
	w.r = &Reconciler{Kit: objects.Kit{Client: role.Cache(api), Live: role.Live(api),
		Events: &events.FakeRecorder{Events: w.events},
		Options: objects.Options{Server: "kubevirt.io:disk", ClaimSize: resource.MustParse("20Gi"),
			Volumes: volumes}},
		Ask: func(context.Context, string) (*status.Status, error) {
			if w.silent != nil {
				return nil, w.silent()
			}
			w.follow()
			return &w.page, nil
		}}
	return w
}

// converged is a world in which all is done.
func converged(t *testing.T, change func(*v1alpha1.VMIdentity)) *world {
	t.Helper()
	w := newWorld(t, new(controllertest.Calls), change)
	w.converge()
	return w
}

var scheme = controllertest.Scheme(appsv1.AddToScheme)

// follow does the work of the daemon on the annotation of its pod.
func (w *world) follow() {
	var pod corev1.Pod
	if w.stale || w.Get(w.t.Context(), made, &pod) != nil {
		return
	}
	asked := pod.Annotations[v1alpha1.AnnotationHandoverRequest]
	if asked == "" {
		return
	}
	w.page.Handover = &status.HandoverOutcome{Asked: asked}
	req, err := control.ParseHandover(asked)
	switch {
	case err != nil:
		w.page.Handover.Error = err.Error()
	case req.LUN != 1 || req.To != there:
		w.page.Handover.Error = "wrong LUN or initiator"
	default:
		w.page.Handover.Done = "done: " + string(req.Action)
	}
}

func (w *world) reconcile() (ctrl.Result, error) {
	return w.r.Reconcile(w.t.Context(), ctrl.Request{NamespacedName: name})
}

// converge reconciles until there is nothing to do, like the watches and the queue.
func (w *world) converge() ctrl.Result {
	w.t.Helper()
	return w.calls.Settle(w.t, w.r, w.kubernetes, name)
}

// kubernetes gives the Service an address, and the Deployment a ready pod. It returns whether it
// had to do something.
func (w *world) kubernetes() (changed bool) {
	w.t.Helper()
	ctx := w.t.Context()
	var service corev1.Service
	if err := w.Get(ctx, made, &service); err == nil && service.Spec.ClusterIP == "" {
		service.Spec.ClusterIP = "10.96.0.50"
		require.NoError(w.t, w.Update(ctx, &service))
		changed = true
	}
	var d appsv1.Deployment
	var pod corev1.Pod
	podErr := w.Get(ctx, made, &pod)
	if err := w.Get(ctx, made, &d); err != nil {
		if podErr == nil {
			require.NoError(w.t, w.Delete(ctx, &pod))
			changed = true
		}
		return changed
	}
	if podErr != nil {
		pod = corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: made.Namespace, Name: made.Name,
			Labels: d.Spec.Template.Labels}, Spec: d.Spec.Template.Spec}
		pod.Spec.NodeName = "node-1"
		require.NoError(w.t, w.Create(ctx, &pod))
	}
	if !ready(&pod) {
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady,
			Status: corev1.ConditionTrue}}
		require.NoError(w.t, w.Status().Update(ctx, &pod))
		changed = true
	}
	return changed
}

func (w *world) identity() *v1alpha1.VMIdentity {
	w.t.Helper()
	return controllertest.Get(w.t, w, name.Namespace, name.Name, &v1alpha1.VMIdentity{})
}

func (w *world) condition(kind string) *metav1.Condition {
	w.t.Helper()
	c := apimeta.FindStatusCondition(w.identity().Status.Conditions, kind)
	require.NotNil(w.t, c, kind)
	return c
}

func (w *world) change(what func(*v1alpha1.VMIdentity)) {
	w.t.Helper()
	id := w.identity()
	what(id)
	require.NoError(w.t, w.Update(w.t.Context(), id))
}

func (w *world) annotate(key, value string) {
	w.t.Helper()
	w.change(func(id *v1alpha1.VMIdentity) {
		if id.Annotations == nil {
			id.Annotations = map[string]string{}
		}
		id.Annotations[key] = value
	})
}

func (w *world) missing(key client.ObjectKey, all ...client.Object) {
	w.t.Helper()
	for _, o := range all {
		require.True(w.t, apierrors.IsNotFound(w.Get(w.t.Context(), key, o)), "%T", o)
	}
}

func TestServe(t *testing.T) {
	controllertest.EachFault(t, func(t *testing.T, calls *controllertest.Calls) {
		w := newWorld(t, calls, nil)
		w.converge()
		require.Equal(t, metav1.ConditionTrue, w.condition(v1alpha1.ConditionServed).Status)
		id := w.identity()
		require.Equal(t, "vmid-vm1.default.svc:3260", id.Status.Portal)
		require.Equal(t, "iqn.2017-01.io.kubevirt:default.vm1", id.Status.TargetName)
		require.Nil(t, apimeta.FindStatusCondition(id.Status.Conditions,
			v1alpha1.ConditionVolumeReady))

		// Nothing is written while nothing changes.
		writes := calls.Writes
		require.Zero(t, w.converge())
		require.Equal(t, writes, calls.Writes)

		require.NoError(t, w.Delete(t.Context(), id))
		w.converge()
		w.missing(made, &appsv1.Deployment{}, &corev1.Service{})
		require.Equal(t, []string{v1alpha1.Finalizer}, w.identity().Finalizers)
	})
}

// TestDeployment: there is one pod at a time. It may run where "restricted" is enforced, and serves
// on the port of the Service.
func TestDeployment(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), func(id *v1alpha1.VMIdentity) {
		id.Spec.Size = new(resource.MustParse("30Gi"))
	})
	w.converge()
	var d appsv1.Deployment
	require.NoError(t, w.Get(t.Context(), made, &d))
	require.Equal(t, appsv1.RecreateDeploymentStrategyType, d.Spec.Strategy.Type)
	require.EqualValues(t, 1, *d.Spec.Replicas)
	pod := d.Spec.Template.Spec
	require.True(t, *pod.SecurityContext.RunAsNonRoot)
	require.Empty(t, pod.InitContainers)
	require.Len(t, pod.Containers, 1)
	c := pod.Containers[0]
	require.Nil(t, c.RestartPolicy)
	require.Equal(t, "kubevirt.io:disk", c.Image)
	env := map[string]string{}
	for _, e := range c.Env {
		env[e.Name] = e.Value
	}
	require.Equal(t, "0.0.0.0:3260", env["LISTEN"])
	require.Equal(t, "iqn.2017-01.io.kubevirt:default.vm1", env["TARGET_NAME"])
	require.Equal(t, "32212254720", env["SIZE"])
	require.Equal(t, "/etc/podinfo/annotations", env["POD_ANNOTATIONS"])
	require.Equal(t, "true", env["BEHIND_NAT"])
	var service corev1.Service
	require.NoError(t, w.Get(t.Context(), made, &service))
	require.Equal(t, d.Spec.Selector.MatchLabels, service.Spec.Selector)
	require.Equal(t, c.Ports[0].Name, service.Spec.Ports[0].TargetPort.String())
	require.Equal(t, "9260", d.Spec.Template.Annotations["prometheus.io/port"])

	// A new release of the server does not replace a running one. A larger disk does.
	w.r.Options.Server = "kubevirt.io:disk-2"
	w.converge()
	require.NoError(t, w.Get(t.Context(), made, &d))
	require.Equal(t, "kubevirt.io:disk", d.Spec.Template.Spec.Containers[0].Image)
	w.change(func(id *v1alpha1.VMIdentity) { id.Spec.Size = new(resource.MustParse("40Gi")) })
	w.converge()
	require.NoError(t, w.Get(t.Context(), made, &d))
	require.Contains(t, d.Spec.Template.Spec.Containers[0].Env,
		corev1.EnvVar{Name: "SIZE", Value: "42949672960"})
}

// TestNamesWithDots: the name of a Service has no dots, and two identities never share one.
func TestNamesWithDots(t *testing.T) {
	require.Equal(t, "vmid-vm1", serviceName("vm1"))
	seen := map[string]bool{}
	for _, name := range []string{"a.b", "a-b", "a.b.c", "a-b.c", "a.b-c",
		strings.Repeat("a.", 28) + "bc", strings.Repeat("a.", 28) + "bd"} {
		service := serviceName(name)
		require.Empty(t, validation.IsDNS1035Label(service), service)
		require.False(t, seen[service], service)
		seen[service] = true
	}
	id := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "a.b"}}
	require.Equal(t, serviceName("a.b"), newService(id).Name)
}

// TestOddSize: a size of no whole blocks is rounded up, as it is for a sidecar.
func TestOddSize(t *testing.T) {
	size := resource.MustParse("1500M")
	id := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "vm1"},
		Spec:   v1alpha1.VMIdentitySpec{DiskSpec: v1alpha1.DiskSpec{Image: image, Size: &size}},
		Status: v1alpha1.VMIdentityStatus{ClaimName: made.Name, SecretName: made.Name}}
	d := testtool.Must(newDeployment(id, "kubevirt.io:disk", true))(t)
	require.Contains(t, d.Spec.Template.Spec.Containers[0].Env,
		corev1.EnvVar{Name: "SIZE", Value: "1500000256"})
	size, id.Spec.BlockSize = resource.MustParse("1000001000"), 4096
	d = testtool.Must(newDeployment(id, "kubevirt.io:disk", true))(t)
	require.Subset(t, d.Spec.Template.Spec.Containers[0].Env, []corev1.EnvVar{
		{Name: "SIZE", Value: "1000001536"}, {Name: "BLOCK_SIZE", Value: "4096"}})
}

// TestSecretDeletedByHand: while a server may run with a deleted secret, the secret is not made
// again. If somebody deletes the Deployment, both are made again.
func TestSecretDeletedByHand(t *testing.T) {
	controllertest.EachFault(t, func(t *testing.T, calls *controllertest.Calls) {
		w := newWorld(t, calls, nil)
		w.converge()
		secret := &corev1.Secret{}
		require.NoError(t, w.Get(t.Context(), made, secret))
		require.Empty(t, secret.StringData, "it was there, and is left alone")
		require.NoError(t, w.Delete(t.Context(), secret))
		w.converge()
		w.missing(made, &corev1.Secret{})
		require.NoError(t, w.Delete(t.Context(), &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{
			Namespace: made.Namespace, Name: made.Name}}))
		w.converge()
		require.NoError(t, w.Get(t.Context(), made, secret))
		require.NotEmpty(t, secret.StringData)
		require.NoError(t, w.Get(t.Context(), made, &appsv1.Deployment{}))
	})
}

// TestOthersAreLeftAlone: an object that has our name, and perhaps our label, but that we did not
// make stays as it is, and does not hold the deletion of the identity.
func TestOthersAreLeftAlone(t *testing.T) {
	for _, labels := range []map[string]string{nil, {v1alpha1.LabelIdentity: name.Name}} {
		w := newWorld(t, new(controllertest.Calls), nil)
		theirs := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: made.Namespace,
			Name: made.Name, Labels: labels}}
		require.NoError(t, w.Create(t.Context(), theirs))
		require.NoError(t, testtool.Err(w.reconcile())) // the finalizer
		// The cache has no object without our label.
		w.r.Client = controllertest.Labelled(w.WithWatch, v1alpha1.LabelIdentity,
			&appsv1.Deployment{})
		require.Error(t, testtool.Err(w.reconcile()))
		require.Contains(t, w.condition(v1alpha1.ConditionServed).Message,
			"the Deployment vmid-vm1 is there already, and not of this VMIdentity")
		require.NoError(t, w.Delete(t.Context(), w.identity()))
		for range 4 {
			require.NoError(t, testtool.Err(w.reconcile()))
		}
		require.NotContains(t, w.identity().Finalizers, v1alpha1.FinalizerService)
		require.NoError(t, w.Get(t.Context(), made, theirs))
		require.Empty(t, theirs.OwnerReferences)
		require.Empty(t, theirs.Spec.Template.Spec.Containers)
	}
}

func TestServedSaysWhy(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), nil)
	for range 2 {
		require.NoError(t, testtool.Err(w.reconcile()))
	}
	require.Equal(t, "the server has no pod yet", w.condition(v1alpha1.ConditionServed).Message)
	var d appsv1.Deployment
	require.NoError(t, w.Get(t.Context(), made, &d))
	d.Status.Conditions = []appsv1.DeploymentCondition{{Type: appsv1.DeploymentReplicaFailure,
		Status: corev1.ConditionTrue, Message: "exceeded quota"}}
	require.NoError(t, w.Status().Update(t.Context(), &d))
	require.NoError(t, testtool.Err(w.reconcile()))
	require.Contains(t, w.condition(v1alpha1.ConditionServed).Message, "exceeded quota")
	require.Contains(t, <-w.events, "Warning Failed")
}

// TestDiskInUseStays: a machine that uses the disk keeps it, even if the identity is deleted.
func TestDiskInUseStays(t *testing.T) {
	w := converged(t, nil)
	w.page.Sessions = []status.Session{{Initiator: here}}
	require.NoError(t, w.Delete(t.Context(), w.identity()))
	w.converge()
	require.Contains(t, w.condition(v1alpha1.ConditionServed).Message, "initiator "+here)
	var d appsv1.Deployment
	require.NoError(t, w.Get(t.Context(), made, &d))

	w.page.Sessions = nil
	vm := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: "vm",
		Labels: map[string]string{v1alpha1.LabelIdentity: name.Name}}}
	require.NoError(t, w.Create(t.Context(), vm))
	w.converge()
	require.Contains(t, w.condition(v1alpha1.ConditionServed).Message, "pod vm")
	require.NoError(t, w.Delete(t.Context(), vm))
	w.converge()
	w.missing(made, &d)
}

// TestBackToSidecar: an identity with attachment Sidecar again loses its server, and the status
// forgets the server.
func TestBackToSidecar(t *testing.T) {
	w := converged(t, nil)
	w.change(func(id *v1alpha1.VMIdentity) { id.Spec.Attachment = v1alpha1.Sidecar })
	w.converge()
	w.missing(made, &appsv1.Deployment{}, &corev1.Service{})
	require.Empty(t, w.identity().Status.Portal)
	require.Empty(t, w.identity().Status.Conditions)
	require.NotContains(t, w.identity().Finalizers, v1alpha1.FinalizerService)
}

// TestServicesAreTurnedOff: an identity reports that it is not served, and objects that were made
// for it before stay.
func TestServicesAreTurnedOff(t *testing.T) {
	w := converged(t, nil)
	w.r.Options.Without = []string{objects.Services}
	w.converge()
	c := w.condition(v1alpha1.ConditionServed)
	require.Equal(t, v1alpha1.ReasonInvalid, c.Reason)
	require.Contains(t, c.Message, "this disk can be deleted when it is turned on")
	require.NoError(t, w.Get(t.Context(), made, &appsv1.Deployment{}))

	w = newWorld(t, new(controllertest.Calls), nil)
	w.r.Options.Without = []string{objects.Services}
	w.converge()
	require.Contains(t, w.condition(v1alpha1.ConditionServed).Message, "use attachment Sidecar")
	require.NotContains(t, w.condition(v1alpha1.ConditionServed).Message, "deleted")
	w.missing(made, &appsv1.Deployment{}, &corev1.Service{})
	require.Contains(t, <-w.events, "Warning Invalid")
	w.change(func(id *v1alpha1.VMIdentity) { id.Spec.Attachment = v1alpha1.Sidecar })
	w.converge()
	require.Empty(t, w.identity().Status.Conditions, "somebody has done what the message says")

	w = newWorld(t, new(controllertest.Calls), func(id *v1alpha1.VMIdentity) {
		id.Spec.Attachment = v1alpha1.Sidecar
	})
	w.r.Options.Without = []string{objects.Services}
	w.converge()
	require.Empty(t, w.identity().Status.Conditions)
}

func TestHandover(t *testing.T) {
	controllertest.EachFault(t, func(t *testing.T, calls *controllertest.Calls) {
		w := newWorld(t, calls, nil)
		w.converge()
		w.annotate(v1alpha1.AnnotationHandoverTo, there)
		w.converge()
		require.Equal(t, v1alpha1.ReasonHandoverOpen,
			w.condition(v1alpha1.ConditionHandedOver).Reason)
		w.annotate(v1alpha1.AnnotationHandoverStep, "finish")
		w.converge()
		c := w.condition(v1alpha1.ConditionHandedOver)
		require.Equal(t, metav1.ConditionTrue, c.Status)
		require.Equal(t, "done: finish", c.Message)
		require.Equal(t, "finish "+there, w.identity().Status.Handover)
	})
}

// TestImageThatIsHeld: no server is made while the image may not be used. One that runs goes on.
func TestImageThatIsHeld(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), nil)
	refusing := controllertest.Refusing(v1alpha1.ReasonNotSigned)
	w.r.Images = &refusing
	w.converge()
	w.missing(made, &appsv1.Deployment{}, &corev1.Service{})
	require.Equal(t, "NotSigned", w.condition(v1alpha1.ConditionServed).Reason)
	refusing = ""
	w.converge()
	refusing = v1alpha1.ReasonNotSigned
	w.converge()
	require.Equal(t, metav1.ConditionTrue, w.condition(v1alpha1.ConditionServed).Status)
}
