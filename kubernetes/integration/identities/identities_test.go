package identities

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/admission"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

const (
	system  = "kubevirt-disk-system"
	account = "kubevirt-disk-controller"
	timeout = 100 * time.Second
)

var image = "registry.example.com/a@sha256:" + strings.Repeat("a", 64)

// run starts two managers that both lead, with exactly the manifest's role.
func run(t *testing.T, p *plane.Plane, namespace string) {
	t.Helper()
	p.Kubectl(t, "apply", "--server-side", "--force-conflicts", "-f", controllertest.Manifest(t))
	// Pets are off in the manifest.
	p.Grant(t, namespace, system, account,
		controllertest.RoleOf(t, controllertest.Settings{Pets: true}).Rules...)
	for range 2 {
		p.Controllers(t, system, account, objects.Options{ClaimSize: resource.MustParse("1Gi"),
			Concurrency: 4, Server: "kubevirt.io:disk"}, namespace)
	}
	p.ServeWebhook(t, system, account, "kubevirt.io:disk", namespace)
}

// world is a namespace with a set.
type world struct {
	*plane.Plane
	t  *testing.T
	ns string
}

func newWorld(t *testing.T) *world {
	p := plane.Get(t)
	w := &world{Plane: p, t: t, ns: p.Namespace(t)}
	run(t, p, w.ns)
	return w
}

func (w *world) make(o client.Object) {
	w.t.Helper()
	o.SetNamespace(w.ns)
	require.NoError(w.t, w.Client.Create(w.t.Context(), o))
}

func (w *world) set(change func(*v1alpha1.DiskSpec)) {
	w.t.Helper()
	set := &v1alpha1.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Name: "set"},
		Spec: v1alpha1.DiskSpec{Image: image}}
	change(&set.Spec)
	w.make(set)
}

// pod makes a pod as admission leaves it.
func (w *world) pod(name, id string) {
	w.t.Helper()
	pod := plane.Pod(w.ns, name, map[string]string{v1alpha1.AnnotationSet: "set",
		v1alpha1.AnnotationName: id})
	require.NoError(w.t, admission.Pod(pod, "registry.example.com/disk:1", []admission.Wanted{{
		Disk: admission.Disks(pod)[0], Set: &v1alpha1.VMIdentitySet{
			ObjectMeta: metav1.ObjectMeta{Name: "set"},
			Spec:       v1alpha1.DiskSpec{Image: image}}}}))
	w.make(pod)
}

func (w *world) get(name string, o client.Object) bool {
	w.t.Helper()
	err := w.Client.Get(w.t.Context(), client.ObjectKey{Namespace: w.ns, Name: name}, o)
	if !apierrors.IsNotFound(err) {
		require.NoError(w.t, err)
	}
	return err == nil
}

func (w *world) remove(name string, o client.Object) {
	w.t.Helper()
	o.SetNamespace(w.ns)
	o.SetName(name)
	require.NoError(w.t, w.Client.Delete(w.t.Context(), o))
}

// free reports whether a pod exists and has no gate.
func (w *world) free(name string) bool {
	p := &corev1.Pod{}
	return w.get(name, p) && len(p.Spec.SchedulingGates) == 0
}

// until waits for a condition, which may end the test.
func (w *world) until(what string, met func() bool) {
	w.t.Helper()
	testtool.Within(w.t, timeout, met, what)
}

// says reports whether a condition of an identity has a reason.
func (w *world) says(id, condition, reason string) func() bool {
	return func() bool {
		o := &v1alpha1.VMIdentity{}
		if !w.get(id, o) {
			return false
		}
		c := meta.FindStatusCondition(o.Status.Conditions, condition)
		return c != nil && c.Reason == reason
	}
}

// Two controllers work at once on pairs of pods that want the same disks.
func TestTwoLeaders(t *testing.T) {
	w := newWorld(t)
	w.set(func(*v1alpha1.DiskSpec) {})
	const disks = 8
	name := func(kind string, n int) string { return fmt.Sprintf("%s-%d", kind, n) }
	for n := range disks {
		w.pod(name("a", n), name("vm", n))
		w.pod(name("b", n), name("vm", n))
	}
	first := make([]string, disks)
	for n := range disks {
		w.until("one pod of each pair starts", func() bool {
			a, b := w.free(name("a", n)), w.free(name("b", n))
			require.False(t, a && b, "two pods use disk %d", n)
			if first[n] = name("a", n); b {
				first[n] = name("b", n)
			}
			return a || b
		})
	}
	for n := range disks {
		w.remove(first[n], &corev1.Pod{})
	}
	for n := range disks {
		w.until("then the other one", func() bool {
			return w.free(name("a", n)) || w.free(name("b", n))
		})
	}
	w.until("the set counts them", func() bool {
		set := &v1alpha1.VMIdentitySet{}
		return w.get("set", set) && set.Status.Identities == disks &&
			set.Status.ReadyIdentities == disks
	})
	require.NotContains(t, w.Kubectl(t, "get", "events", "-n", w.ns), "Foreign",
		"neither takes what the other made for a stranger's")
}

// An object that is stuck says why, and goes on when it can.
func TestStuck(t *testing.T) {
	w := newWorld(t)
	none := "none"
	w.set(func(s *v1alpha1.DiskSpec) { s.StorageClassName = &none })
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "small"},
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{
			"persistentvolumeclaims": resource.MustParse("0")}}}
	w.make(quota)
	w.until("the quota counts", func() bool {
		q := &corev1.ResourceQuota{}
		return w.get("small", q) && len(q.Status.Hard) > 0
	})
	w.pod("a", "vm")
	w.until("the quota is said",
		w.says("vm", v1alpha1.ConditionReady, v1alpha1.ReasonQuotaExceeded))
	require.False(t, w.free("a"))
	w.remove("small", &corev1.ResourceQuota{})
	w.until("a missing class is said",
		w.says("vm", v1alpha1.ConditionReady, v1alpha1.ReasonClassMissing))
	require.False(t, w.free("a"))
	class := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: none},
		Provisioner: "kubernetes.io/no-provisioner"}
	require.NoError(t, w.Client.Create(t.Context(), class))
	t.Cleanup(func() { require.NoError(t, w.Client.Delete(context.Background(), class)) })
	w.until("the pod starts", func() bool { return w.free("a") })
	w.until("a claim that never gets a volume is said",
		w.says("vm", v1alpha1.ConditionInUse, v1alpha1.ReasonUnschedulable))
	require.True(t, w.says("vm", v1alpha1.ConditionBound, v1alpha1.ReasonClaimPending)())
	w.until("events say it, too", func() bool {
		events := w.Kubectl(t, "get", "events", "-n", w.ns)
		return strings.Contains(events, "QuotaExceeded") &&
			strings.Contains(events, "Unschedulable")
	})
	// The secret's credential reaches neither conditions nor events.
	secret := &corev1.Secret{}
	require.True(t, w.get("vmid-vm", secret))
	password := string(secret.Data["node.session.auth.password"])
	require.Len(t, password, 26)
	seen := w.Kubectl(t, "get", "vmid,vmidset,vmpet,events", "-n", w.ns, "-o", "yaml")
	require.NotContains(t, seen, password)
}

// launcher is the pod in which KubeVirt runs a machine with two hook sidecars.
func (w *world) launcher(name string, annotations map[string]string) *corev1.Pod {
	pod := plane.Pod(w.ns, "virt-launcher-"+name, annotations, "compute", "hook-sidecar-0",
		"hook-sidecar-1")
	pod.Labels = map[string]string{"kubevirt.io": "virt-launcher"}
	pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "kubevirt.io/v1",
		Kind: "VirtualMachineInstance", Name: name, UID: "u", Controller: new(true)}}
	return pod
}

// TestMachineWithTwoDisks: the API server gives a machine of KubeVirt a disk in its pod and one
// behind a Service, and the controller lets it start when both are ready.
func TestMachineWithTwoDisks(t *testing.T) {
	w := newWorld(t)
	w.set(func(*v1alpha1.DiskSpec) {})
	service := &v1alpha1.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Name: "service"},
		Spec: v1alpha1.DiskSpec{Image: image, Attachment: v1alpha1.Service}}
	w.make(service)
	pod := w.launcher("m", map[string]string{v1alpha1.AnnotationSet: "set",
		v1alpha1.AnnotationSet + ".1": "service"})
	w.make(pod)
	gates := func() (all []string) {
		p := &corev1.Pod{}
		require.True(t, w.get(pod.Name, p))
		for _, g := range p.Spec.SchedulingGates {
			all = append(all, g.Name)
		}
		return all
	}
	w.until("the first disk is there", func() bool { return len(gates()) == 1 })
	require.Equal(t, []string{v1alpha1.Gate + ".1"}, gates())
	// There is no node, so nothing runs the server of the other one.
	w.until("the other one is served", func() bool {
		var servers corev1.PodList
		require.NoError(t, w.Client.List(t.Context(), &servers, client.InNamespace(w.ns),
			client.MatchingLabels{v1alpha1.LabelServer: "m-1"}))
		if len(servers.Items) == 0 {
			return false
		}
		server := &servers.Items[0]
		server.Status.Conditions = append(server.Status.Conditions, corev1.PodCondition{
			Type: corev1.PodReady, Status: corev1.ConditionTrue})
		return w.Client.Status().Update(t.Context(), server) == nil
	})
	w.until("the machine starts", func() bool { return len(gates()) == 0 })
	got := &corev1.Pod{}
	require.True(t, w.get(pod.Name, got))
	require.Equal(t, v1alpha1.DiskURI("vmid-m-1."+w.ns+".svc"),
		got.Annotations[v1alpha1.AnnotationDisk+".1"])
	require.NotContains(t, got.Annotations, v1alpha1.AnnotationDisk)
	var claims []string
	for _, v := range got.Spec.Volumes {
		if v.PersistentVolumeClaim != nil {
			claims = append(claims, v.Name+" "+v.PersistentVolumeClaim.ClaimName)
		} else if v.Secret != nil {
			claims = append(claims, v.Name+" "+v.Secret.SecretName)
		}
	}
	require.ElementsMatch(t, []string{"disk-vda-data vmid-m", "disk-vda-nbd-1 vmnbd-m-1"}, claims)
}
