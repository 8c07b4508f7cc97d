package local_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/identity"
	"kubevirt.io/disk/kubernetes/controller/local"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/pod"
)

const namespace = "default"

var image = "registry.example.com/fedora@sha256:" + strings.Repeat("a", 64)

// world is an API server with the controllers of identities, pods and moves, and the work of
// Kubernetes on claims, volumes, Jobs and pods.
type world struct {
	t *testing.T
	client.WithWatch
	// calls are the requests of moves. others are the requests of the other controllers, which
	// never fail here: their own tests cover that.
	calls, others *controllertest.Calls

	events chan string
	// whole are the volumes that have the complete disk.
	whole map[string]bool
	// full: the new node has no room for the disk.
	full bool
	// stolen: somebody has deleted the claim that is filled, and it goes with the receiver's pod.
	stolen bool
	// off: moves are turned off. offAt turns them off when a move is at that step.
	off   bool
	offAt v1alpha1.MoveStep
	made  int
}

type reconciler interface {
	Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error)
}

// scheme has few types: the fake client goes through all of them at each request.
var scheme = sync.OnceValue(func() *runtime.Scheme {
	s := runtime.NewScheme()
	s.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Pod{}, &corev1.PodList{}, &corev1.Node{},
		&corev1.PersistentVolumeClaim{}, &corev1.PersistentVolumeClaimList{},
		&corev1.PersistentVolume{}, &corev1.PersistentVolumeList{}, &corev1.Secret{})
	metav1.AddToGroupVersion(s, corev1.SchemeGroupVersion)
	s.AddKnownTypes(batchv1.SchemeGroupVersion, &batchv1.Job{}, &batchv1.JobList{})
	metav1.AddToGroupVersion(s, batchv1.SchemeGroupVersion)
	_, _ = storagev1.AddToScheme(s), v1alpha1.AddToScheme(s) // a missing type makes every test fail
	return s
})

func newWorld(t *testing.T, calls *controllertest.Calls) *world {
	t.Helper()
	w := &world{t: t, calls: &controllertest.Calls{}, others: &controllertest.Calls{},
		events: make(chan string, 10_000), whole: map[string]bool{}}
	w.WithWatch = fake.NewClientBuilder().WithScheme(scheme()).
		WithStatusSubresource(&v1alpha1.VMIdentity{}, &v1alpha1.VMIdentitySet{}, &corev1.Pod{},
			&corev1.PersistentVolumeClaim{}, &corev1.PersistentVolume{}, &batchv1.Job{},
			&corev1.Node{}).
		WithInterceptorFuncs(interceptor.Funcs{Create: w.born}).
		WithIndex(&corev1.Pod{}, v1alpha1.Group+"/pod-identity", func(o client.Object) []string {
			return []string{o.GetLabels()[v1alpha1.LabelIdentity]}
		}).
		WithIndex(&corev1.Pod{}, v1alpha1.Group+"/pod-waits-for-set",
			func(o client.Object) []string { return nil }).
		Build()
	for _, name := range []string{"node-1", "node-2"} {
		w.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
			Labels: map[string]string{corev1.LabelHostname: name}},
			Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady,
				Status: corev1.ConditionTrue}}}})
	}
	class := "local"
	require.NoError(t, w.Create(t.Context(), controllertest.Class(class)))
	spec := v1alpha1.DiskSpec{Image: image, Type: v1alpha1.Local, StorageClassName: &class}
	w.create(&v1alpha1.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Name: "set"}, Spec: spec})
	w.pod("vm", "")
	w.converge()
	p := w.getPod("vm")
	require.False(t, gated(p), "the first pod starts")
	p.Spec.NodeName = "node-1"
	require.NoError(t, w.Update(t.Context(), p))
	w.converge()
	require.Equal(t, "node-1", w.identity().Status.NodeName)
	w.whole[w.claim().Spec.VolumeName] = true
	w.calls = calls // failures begin here
	return w
}

// born gives new objects their UID, which the fake client does not.
func (w *world) born(ctx context.Context, c client.WithWatch, o client.Object,
	options ...client.CreateOption) error {
	w.made++
	o.SetUID(types.UID(fmt.Sprintf("uid-%d", w.made)))
	return c.Create(ctx, o, options...)
}

func (w *world) create(o client.Object) {
	w.t.Helper()
	if _, isNode := o.(*corev1.Node); !isNode {
		if _, isVolume := o.(*corev1.PersistentVolume); !isVolume {
			o.SetNamespace(namespace)
		}
	}
	require.NoError(w.t, w.Create(w.t.Context(), o))
}

// pod makes a pod as admission leaves it.
func (w *world) pod(name, node string) {
	w.t.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name,
		Labels:      map[string]string{v1alpha1.LabelIdentity: "vm", v1alpha1.LabelSet: "set"},
		Annotations: map[string]string{v1alpha1.AnnotationSet: "set"}},
		Spec: corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: v1alpha1.Gate}},
			InitContainers: []corev1.Container{{Name: v1alpha1.DiskContainer,
				VolumeMounts: []corev1.VolumeMount{{Name: "image", MountPath: "/disk"}}}},
			Volumes: []corev1.Volume{{Name: "image", VolumeSource: corev1.VolumeSource{
				Image: &corev1.ImageVolumeSource{Reference: image}}}}}}
	if node != "" {
		p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node}
	}
	w.create(p)
}

func gated(p *corev1.Pod) bool { return len(p.Spec.SchedulingGates) > 0 }

func (w *world) get(name string, o client.Object) bool {
	w.t.Helper()
	where := namespace
	switch o.(type) {
	case *corev1.Node, *corev1.PersistentVolume:
		where = ""
	}
	return controllertest.There(w.t, w, where, name, o)
}

func (w *world) getPod(name string) *corev1.Pod {
	w.t.Helper()
	return controllertest.Get(w.t, w, namespace, name, &corev1.Pod{})
}

func (w *world) identity() *v1alpha1.VMIdentity {
	w.t.Helper()
	return controllertest.Get(w.t, w, namespace, "vm", &v1alpha1.VMIdentity{})
}

func (w *world) claim() *corev1.PersistentVolumeClaim {
	w.t.Helper()
	return controllertest.Get(w.t, w, namespace, "vmid-vm", &corev1.PersistentVolumeClaim{})
}

func (w *world) remove(o client.Object, name string) {
	w.t.Helper()
	require.True(w.t, w.get(name, o), name)
	require.NoError(w.t, w.Delete(w.t.Context(), o))
}

// condition returns the status, reason and message of a condition.
func (w *world) condition(kind string) string {
	w.t.Helper()
	c := meta.FindStatusCondition(w.identity().Status.Conditions, kind)
	if c == nil {
		return ""
	}
	return fmt.Sprintf("%s %s: %s", c.Status, c.Reason, c.Message)
}

func (w *world) annotate(node string) {
	w.t.Helper()
	id := w.identity()
	id.Annotations = map[string]string{v1alpha1.AnnotationMoveTo: node}
	require.NoError(w.t, w.Update(w.t.Context(), id))
}

// converge runs everything until nothing changes.
func (w *world) converge() {
	w.t.Helper()
	// After an error the controllers are made anew, as after a restart.
	start := func() []reconciler {
		role := controllertest.RoleOf(w.t, controllertest.Settings{Move: !w.off})
		c, other := role.Cache(w.calls.Client(w.WithWatch)),
			role.Cache(w.others.Client(w.WithWatch))
		live, otherLive := role.Live(w.calls.Client(w.WithWatch)),
			role.Live(w.others.Client(w.WithWatch))
		recorder := &events.FakeRecorder{Events: w.events}
		ours := objects.Kit{Client: c, Live: live, Events: recorder, Options: objects.Options{
			ClaimSize: resource.MustParse("1Gi"), MoveImage: "kubevirt.io:disk-controller"}}
		if w.off {
			ours.Options.MoveImage = ""
		}
		others := ours
		others.Client, others.Live = other, otherLive
		return []reconciler{
			&pod.Reconciler{Kit: others},
			&local.Reconciler{Kit: ours}, &identity.Reconciler{Kit: others},
		}
	}
	all := start()
	req := ctrl.Request{NamespacedName: types.NamespacedName{Namespace: namespace, Name: "vm"}}
	for range 60 {
		writes, failed := w.calls.Writes+w.others.Writes, false
		for _, r := range all {
			before := w.calls.Writes + w.others.Writes
			if _, err := r.Reconcile(w.t.Context(), req); err != nil {
				failed = true
			}
			if before != w.calls.Writes+w.others.Writes {
				w.check()
			}
		}
		if w.offAt != "" && !w.off {
			m := w.identity().Status.Move
			w.off = m != nil && m.Step == w.offAt
		}
		if failed || w.off {
			all = start()
		}
		changed := w.kubernetes()
		if changed {
			w.check()
		}
		if !failed && !changed && writes == w.calls.Writes+w.others.Writes {
			return
		}
	}
	w.t.Fatal("it does not converge: " + w.condition(v1alpha1.ConditionMoving))
}

// check looks for forbidden states.
func (w *world) check() {
	w.t.Helper()
	if len(w.whole) == 0 {
		return
	}
	left := false
	for name, whole := range w.whole {
		left = left || whole && w.get(name, &corev1.PersistentVolume{})
	}
	require.True(w.t, left, "no volume has the disk any more")
	claim := &corev1.PersistentVolumeClaim{}
	if w.get("vmid-vm", claim) && claim.Status.Phase == corev1.ClaimBound {
		require.True(w.t, w.whole[claim.Spec.VolumeName], "the claim has no whole disk")
	}
	var pods corev1.PodList
	require.NoError(w.t, w.List(w.t.Context(), &pods, client.InNamespace(namespace)))
	users, movers := 0, 0
	for i := range pods.Items {
		p := &pods.Items[i]
		switch {
		case p.Labels[v1alpha1.Group+"/move"] != "":
			movers++
		case !gated(p):
			users++
		}
	}
	require.LessOrEqual(w.t, users, 1)
	require.False(w.t, users > 0 && movers > 0, "the disk is used while it is moved")
}

// kubernetes does the work of its controllers and nodes. It returns whether there was any.
func (w *world) kubernetes() bool {
	w.t.Helper()
	changed := w.jobs()
	return w.volumes() || changed
}

func (w *world) volumes() (changed bool) {
	w.t.Helper()
	ctx := w.t.Context()
	var claims corev1.PersistentVolumeClaimList
	require.NoError(w.t, w.List(ctx, &claims))
	uids := make(map[types.UID]bool)
	for i := range claims.Items {
		c := &claims.Items[i]
		uids[c.UID] = true
		if c.Status.Phase == corev1.ClaimBound {
			continue
		}
		v := &corev1.PersistentVolume{}
		if c.Spec.VolumeName == "" {
			consumer := "vm"
			if c.Name == "vmmove-vm" {
				consumer = "vmrecv-vm"
			}
			p := &corev1.Pod{}
			if !w.get(consumer, p) || gated(p) || w.full {
				continue // the class waits for the first consumer
			}
			w.made++
			v = &corev1.PersistentVolume{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("pv-%d", w.made)},
				Spec: corev1.PersistentVolumeSpec{StorageClassName: *c.Spec.StorageClassName,
					PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
					ClaimRef: &corev1.ObjectReference{Namespace: namespace,
						Name: c.Name}}}
			require.NoError(w.t, w.Create(ctx, v))
			c.Spec.VolumeName = v.Name
			require.NoError(w.t, w.Update(ctx, c))
		}
		require.True(w.t, w.get(c.Spec.VolumeName, v))
		ref := v.Spec.ClaimRef
		if ref == nil || ref.Name != c.Name || ref.UID != "" {
			continue
		}
		ref.UID = c.UID
		require.NoError(w.t, w.Update(ctx, v))
		c.Status.Phase = corev1.ClaimBound
		require.NoError(w.t, w.Status().Update(ctx, c))
		changed = true
	}
	var all corev1.PersistentVolumeList
	require.NoError(w.t, w.List(ctx, &all))
	for i := range all.Items {
		v := &all.Items[i]
		ref := v.Spec.ClaimRef
		if ref != nil && ref.UID != "" && !uids[ref.UID] &&
			v.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete {
			require.NoError(w.t, w.Delete(ctx, v))
			changed = true
		}
	}
	return changed
}

func (w *world) jobs() (changed bool) {
	w.t.Helper()
	ctx := w.t.Context()
	var sender *corev1.Pod
	for _, name := range []string{"vmsend-vm", "vmrecv-vm"} {
		job, p := &batchv1.Job{}, &corev1.Pod{}
		has, runs := w.get(name, job), w.get(name, p)
		if !has {
			if runs {
				require.NoError(w.t, w.Delete(ctx, p))
				changed = true
			}
			continue
		}
		if !runs {
			p = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name,
				Labels: job.Spec.Template.Labels, OwnerReferences: []metav1.OwnerReference{{
					APIVersion: "batch/v1", Kind: "Job", Name: name, UID: job.UID,
					Controller: new(true)}}}, Spec: job.Spec.Template.Spec}
			w.create(p)
			changed = true
		}
		if name == "vmsend-vm" {
			sender = p
			node := &corev1.Node{}
			if !w.get("node-1", node) {
				p.Status.Conditions = unschedulable(true)
				changed = changed || p.Status.Phase != corev1.PodPending
				p.Status.Phase = corev1.PodPending
				require.NoError(w.t, w.Status().Update(ctx, p))
				continue
			}
			if p.Status.PodIP == "" {
				p.Spec.NodeName = "node-1"
				require.NoError(w.t, w.Update(ctx, p))
				p.Status.Phase, p.Status.PodIP = corev1.PodRunning, "10.0.0.1"
				require.NoError(w.t, w.Status().Update(ctx, p))
				changed = true
			}
			continue
		}
		if want := unschedulable(w.full); len(want) != len(p.Status.Conditions) {
			p.Status.Conditions = want
			require.NoError(w.t, w.Status().Update(ctx, p))
			changed = true
		}
		changed = w.receive(job, sender) || changed
	}
	return changed
}

// unschedulable is the condition of a pod for which the scheduler finds no node.
func unschedulable(is bool) []corev1.PodCondition {
	if !is {
		return nil
	}
	return []corev1.PodCondition{{Type: corev1.PodScheduled,
		Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable,
		Message: "0/2 nodes are available: 1 node(s) had volume node affinity conflict"}}
}

// receive does the work of the receiver's pod.
func (w *world) receive(job *batchv1.Job, sender *corev1.Pod) bool {
	w.t.Helper()
	claim := &corev1.PersistentVolumeClaim{}
	if len(job.Status.Conditions) > 0 || !w.get("vmmove-vm", claim) ||
		claim.Status.Phase != corev1.ClaimBound || sender == nil || w.full {
		return false
	}
	require.Contains(w.t, job.Spec.Template.Spec.Containers[0].Args, sender.Status.PodIP+":9259")
	require.True(w.t, w.whole[w.claim().Spec.VolumeName])
	w.whole[claim.Spec.VolumeName] = true
	job.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobComplete,
		Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()}}
	require.NoError(w.t, w.Status().Update(w.t.Context(), job))
	p := w.getPod(job.Name)
	p.Status.Phase = corev1.PodSucceeded
	require.NoError(w.t, w.Status().Update(w.t.Context(), p))
	if w.stolen {
		w.stolen = false
		w.remove(claim, claim.Name)
	}
	return true
}
