package pod

import (
	"cmp"
	"errors"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// reason returns the status and the reason of a condition.
func reason(id *v1alpha1.VMIdentity, condition string) string {
	c := meta.FindStatusCondition(id.Status.Conditions, condition)
	if c == nil {
		return ""
	}
	return string(c.Status) + " " + c.Reason
}

func TestOnePodOfAFixedUUID(t *testing.T) {
	w := newWorld(t, newSet(fixedUUID), gatedPod("a", "a"), gatedPod("b", "b"))
	work := restart(w)
	w.Settle(t, work, "a", "b")
	require.False(t, gated(t, w, "a"))
	require.True(t, gated(t, w, "b"))
	require.Equal(t, uuid1, identityOf(t, w, "b").Spec.FirmwareUUID)
	require.Equal(t, "False UUIDInUse", reason(identityOf(t, w, "b"), v1alpha1.ConditionInUse))
	set, _ := get(t, w, "set", &v1alpha1.VMIdentitySet{})
	require.Equal(t, "a", set.Status.UsedBy.Name)
	a, _ := get(t, w, "a", &corev1.Pod{})
	require.Equal(t, uuid1, a.Annotations[v1alpha1.AnnotationFirmwareUUID])

	// A pod that has ended frees the UUID, although its object stays.
	p, _ := get(t, w, "a", &corev1.Pod{})
	p.Status.Phase = corev1.PodSucceeded
	require.NoError(t, w.Base.Status().Update(t.Context(), p))
	w.Settle(t, work, "a", "b")
	require.False(t, gated(t, w, "b"))
	require.Nil(t, identityOf(t, w, "a").Status.UsedBy)
	require.Equal(t, "False NotInUse", reason(identityOf(t, w, "a"), v1alpha1.ConditionInUse))
	set, _ = get(t, w, "set", &v1alpha1.VMIdentitySet{})
	require.Equal(t, "b", set.Status.UsedBy.Name)
}

// TestUUIDOfASetThatIsMadeAgain: such a set does not name the pod that has its UUID.
func TestUUIDOfASetThatIsMadeAgain(t *testing.T) {
	w := newWorld(t, newSet(fixedUUID), gatedPod("a", "a"))
	work := restart(w)
	w.Settle(t, work, "a")
	require.False(t, gated(t, w, "a"))
	remove(t, w, named(&v1alpha1.VMIdentitySet{}, "set"))
	w.Make(t, newSet(fixedUUID))
	w.Make(t, gatedPod("b", "b"))
	w.Settle(t, work, "a", "b")
	require.True(t, gated(t, w, "b"))
	require.Equal(t, "False UUIDInUse", reason(identityOf(t, w, "b"), v1alpha1.ConditionInUse))
	remove(t, w, named(&corev1.Pod{}, "a"))
	w.Settle(t, work, "a", "b")
	require.False(t, gated(t, w, "b"))
}

// TestSetThatTheCacheDoesNotKnow: a new disk is made from the set that is there, and not from the
// one before it, which the cache still has.
func TestSetThatTheCacheDoesNotKnow(t *testing.T) {
	before := newSet(func(s *v1alpha1.VMIdentitySet) { s.Spec.Image = image2 })
	w := newWorld(t, newSet(), gatedPod("a", "vm"))
	r := &Reconciler{Kit: objects.Kit{Client: controllertest.Late(w.Client, before), Live: w.Live,
		Events: w}}
	require.NoError(t, testtool.Err(controllertest.Once(t, r, "vm")))
	require.Equal(t, image, identityOf(t, w, "vm").Spec.Image)
	w.Settle(t, restart(w), "vm")
	require.False(t, gated(t, w, "a"))
}

func TestUUIDPerPod(t *testing.T) {
	w := newWorld(t, newSet(fixedUUID, func(s *v1alpha1.VMIdentitySet) {
		s.Spec.FirmwareUUIDPolicy = v1alpha1.PerPod
	}), gatedPod("a", "a"), gatedPod("b", "b"))
	w.Settle(t, restart(w), "a", "b")
	require.False(t, gated(t, w, "a"))
	require.False(t, gated(t, w, "b"))
	// uuidgen --sha1 --namespace 1b4d298f-... --name a
	a, b := identityOf(t, w, "a").Spec.FirmwareUUID, identityOf(t, w, "b").Spec.FirmwareUUID
	require.Equal(t, "5", a[14:15])
	require.NotEqual(t, a, b)
	require.Equal(t, a, uuidOf(uuid1, "a"))
}

func TestImageDiffers(t *testing.T) {
	for what, change := range map[string]func(*controllertest.World, *corev1.Pod){
		"the set's": func(w *controllertest.World, _ *corev1.Pod) {
			remove(t, w, named(&v1alpha1.VMIdentitySet{}, "set"))
			w.Make(t, newSet(func(s *v1alpha1.VMIdentitySet) { s.Spec.Image = image2 }))
		},
		"the pod's": func(_ *controllertest.World, p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{{Name: v1alpha1.DiskContainer,
				VolumeMounts: []corev1.VolumeMount{{Name: "image", MountPath: "/disk"}}}}
			p.Spec.Volumes = []corev1.Volume{{Name: "image", VolumeSource: corev1.VolumeSource{
				Image: &corev1.ImageVolumeSource{Reference: image2}}}}
		},
	} {
		w, work := settled(t, newSet(), gatedPod("a", "vm"))
		remove(t, w, named(&corev1.Pod{}, "a"))
		p := gatedPod("b", "vm")
		change(w, p)
		w.Make(t, p)
		w.Settle(t, work, "vm")
		require.True(t, gated(t, w, "b"), what)
		id := identityOf(t, w, "vm")
		require.Equal(t, "False ImageDiffers", reason(id, v1alpha1.ConditionInUse), what)
		c := meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionInUse)
		require.Contains(t, c.Message, image2)
		require.Contains(t, c.Message, v1alpha1.AnnotationName)
		require.Contains(t, w.Events(), "Warning ImageDiffers")
	}
}

// ofService is a pod whose disk is served elsewhere.
func ofService(p *corev1.Pod) *corev1.Pod {
	p.Spec.InitContainers, p.Spec.Volumes = nil, nil
	return p
}

// filled is a pod whose claim has the whole disk.
func filled(p *corev1.Pod) *corev1.Pod {
	p.Spec.Volumes = nil
	return p
}

// TestSetDiffers: a pod does not start with a disk that is not as its set says, or not as the pod
// was made for.
func TestSetDiffers(t *testing.T) {
	service := func(s *v1alpha1.VMIdentitySet) { s.Spec.Attachment = v1alpha1.Service }
	snapshot := func(s *v1alpha1.VMIdentitySet) { s.Spec.Population = v1alpha1.Snapshot }
	same := func(*v1alpha1.VMIdentitySet) {}
	for what, c := range map[string]struct {
		before, after func(*v1alpha1.VMIdentitySet) // the set, and the one in its place
		pod           *corev1.Pod
		says          string
	}{
		"attachment": {same, service, ofService(gatedPod("b", "vm")),
			"VMIdentity vm has attachment Sidecar, and VMIdentitySet set has Service"},
		"attachment, back": {service, same, gatedPod("b", "vm"),
			"VMIdentity vm has attachment Service, and VMIdentitySet set has Sidecar"},
		"population": {same, snapshot, filled(gatedPod("b", "vm")),
			"was made with population Overlay, and VMIdentitySet set has Snapshot"},
		"a pod for a Service": {same, same, ofService(gatedPod("b", "vm")),
			"made for another attachment than Sidecar"},
		"a pod for a sidecar": {service, service, gatedPod("b", "vm"),
			"made for another attachment than Service"},
		"a pod without the image": {same, same, filled(gatedPod("b", "vm")),
			"made without the image of VMIdentity vm, whose disk needs it"},
	} {
		w := newWorld(t, newSet(c.before))
		id := newIdentity(types.NamespacedName{Namespace: "test", Name: "vm"}, newSet(c.before))
		w.Make(t, id)
		remove(t, w, named(&v1alpha1.VMIdentitySet{}, "set"))
		w.Make(t, newSet(c.after))
		w.Make(t, c.pod)
		work := restart(w)
		w.Settle(t, work, "vm")
		require.True(t, gated(t, w, "b"), what)
		require.Contains(t, w.Events(), "Warning SetDiffers", what)
		r := &Reconciler{Kit: objects.Kit{Client: w.Client, Live: w.Live}}
		h := testtool.Must(r.mustWait(t.Context(), &decision{id: identityOf(t, w, "vm")},
			objects.Asks(c.pod, "vm")))(t)
		require.NotNil(t, h, what)
		require.Contains(t, h.message, c.says, what)
	}
}

var quantity = controllertest.Quantity

// TestServerIsStillThere: a disk that was served elsewhere has its server until nobody uses it.
func TestServerIsStillThere(t *testing.T) {
	id := newIdentity(types.NamespacedName{Namespace: "test", Name: "vm"}, newSet())
	id.Finalizers = append(id.Finalizers, v1alpha1.FinalizerService)
	w, work := settled(t, newSet(), gatedPod("a", "vm"), id)
	require.True(t, gated(t, w, "a"))
	require.Contains(t, w.Events(), "Normal Stopping")
	id = identityOf(t, w, "vm")
	id.Finalizers = []string{v1alpha1.Finalizer}
	require.NoError(t, w.Base.Update(t.Context(), id))
	w.Settle(t, work, "vm")
	require.False(t, gated(t, w, "a"))
}

// TestSizeOfTheIdentity: a pod learns the size of its disk when it starts, whatever the set said
// when the pod was made.
func TestSizeOfTheIdentity(t *testing.T) {
	id := newIdentity(types.NamespacedName{Namespace: "test", Name: "vm"},
		newSet(func(s *v1alpha1.VMIdentitySet) { s.Spec.Size = quantity("1500M") }))
	p := gatedPod("a", "vm")
	p.Annotations[v1alpha1.AnnotationSize] = "512"
	w := newWorld(t, p, id,
		newSet(func(s *v1alpha1.VMIdentitySet) { s.Spec.Size = quantity("1Gi") }))
	w.Settle(t, restart(w), "vm")
	p, _ = get(t, w, "a", &corev1.Pod{})
	require.Empty(t, p.Spec.SchedulingGates)
	require.Equal(t, "1500000256", p.Annotations[v1alpha1.AnnotationSize], "whole sectors")

	p = gatedPod("a", "vm")
	p.Annotations[v1alpha1.AnnotationSize] = "512"
	w = newWorld(t, newSet(), p)
	w.Settle(t, restart(w), "vm")
	p, _ = get(t, w, "a", &corev1.Pod{})
	require.Empty(t, p.Spec.SchedulingGates)
	require.Empty(t, p.Annotations[v1alpha1.AnnotationSize], "of an earlier identity")
}

// TestBlockSizeOfTheIdentity: a pod learns the block size of its disk, and the size is a whole
// number of such blocks.
func TestBlockSizeOfTheIdentity(t *testing.T) {
	set := newSet(func(s *v1alpha1.VMIdentitySet) {
		s.Spec.Size, s.Spec.BlockSize = quantity("1000001000"), 4096
	})
	w := newWorld(t, gatedPod("a", "vm"), set)
	w.Settle(t, restart(w), "vm")
	p, _ := get(t, w, "a", &corev1.Pod{})
	require.Empty(t, p.Spec.SchedulingGates)
	require.Equal(t, "4096", p.Annotations[v1alpha1.AnnotationBlockSize])
	require.Equal(t, "1000001536", p.Annotations[v1alpha1.AnnotationSize], "whole blocks")
	require.EqualValues(t, 4096, identityOf(t, w, "vm").Spec.BlockSize)
}

// TestEachWaitingPodIsTold: every pod that waits for a disk in use has an event, and only one.
func TestEachWaitingPodIsTold(t *testing.T) {
	w := newWorld(t, newSet(), gatedPod("a", "vm"))
	work := restart(w)
	r := work()
	once := func() []controllertest.Reconciler { return r }
	w.Settle(t, once, "vm")
	require.Empty(t, w.Events())
	w.Make(t, gatedPod("b", "vm"))
	w.Make(t, gatedPod("c", "vm"))
	w.Settle(t, once, "vm")
	w.Settle(t, once, "vm")
	require.Equal(t, []string{"Normal InUse", "Normal InUse"}, w.Events())
}

func TestSetMissing(t *testing.T) {
	w := newWorld(t, gatedPod("a", "vm"))
	work := restart(w)
	r := work()
	once := func() []controllertest.Reconciler { return r }
	w.Settle(t, once, "vm")
	w.Settle(t, once, "vm")
	require.Equal(t, []string{"Warning SetMissing"}, w.Events(), "people are told once")
	require.True(t, gated(t, w, "a"))
	w.Make(t, newSet())
	w.Settle(t, once, "vm")
	require.False(t, gated(t, w, "a"))
}

func TestOtherSet(t *testing.T) {
	w, work := settled(t, newSet(), gatedPod("a", "vm"))
	remove(t, w, named(&corev1.Pod{}, "a"))
	w.Make(t, named(newSet(), "other"))
	p := gatedPod("b", "vm")
	p.Annotations = map[string]string{v1alpha1.AnnotationSetLegacy: "other"}
	w.Make(t, p)
	w.Settle(t, work, "vm")
	require.True(t, gated(t, w, "b"))
	require.Equal(t, "False Invalid", reason(identityOf(t, w, "vm"), v1alpha1.ConditionInUse))
}

// A held pod does not block any deletion, and gets a new disk afterwards.
func TestPodOfAnIdentityThatIsDeleted(t *testing.T) {
	w, work := settled(t, newSet(), gatedPod("a", "vm"), gatedPod("b", "vm"))
	old := identityOf(t, w, "vm").UID
	remove(t, w, named(&v1alpha1.VMIdentity{}, "vm"))
	remove(t, w, named(&corev1.Pod{}, "a"))
	w.Settle(t, work, "vm")
	require.NotEqual(t, old, identityOf(t, w, "vm").UID)
	require.False(t, gated(t, w, "b"))
}

// The cache may learn of a pod later than of the status that names it. The API server decides.
func TestUserThatTheCacheDoesNotKnow(t *testing.T) {
	w := newWorld(t, newSet(), gatedPod("a", "vm"), gatedPod("b", "vm"))
	w.Settle(t, restart(w), "vm")
	// In the cache, pod a has no label any more, but it runs.
	p, _ := get(t, w, "a", &corev1.Pod{})
	p.Labels = nil
	require.NoError(t, w.Base.Update(t.Context(), p))
	w.Settle(t, restart(w), "vm")
	require.True(t, gated(t, w, "b"))
	require.Equal(t, "a", identityOf(t, w, "vm").Status.UsedBy.Name)
	remove(t, w, named(&corev1.Pod{}, "a"))
	w.Settle(t, restart(w), "vm")
	require.False(t, gated(t, w, "b"))
}

// Somebody removes the gate by hand. That pod has the disk, and no other pod gets it.
func TestGateTakenAwayByHand(t *testing.T) {
	p := gatedPod("z", "vm")
	p.Spec.SchedulingGates = nil
	w := newWorld(t, newSet(), p, gatedPod("a", "vm"))
	w.Settle(t, restart(w), "vm")
	require.Equal(t, "z", identityOf(t, w, "vm").Status.UsedBy.Name)
	require.True(t, gated(t, w, "a"))
}

func TestNodeAndUnschedulable(t *testing.T) {
	w, work := settled(t, newSet(), gatedPod("a", "vm"))
	p, _ := get(t, w, "a", &corev1.Pod{})
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled,
		Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
	require.NoError(t, w.Base.Status().Update(t.Context(), p))
	w.Settle(t, work, "vm")
	id := identityOf(t, w, "vm")
	require.Equal(t, "True Unschedulable", reason(id, v1alpha1.ConditionInUse))
	c := meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionInUse)
	require.Contains(t, c.Message, "kubectl describe pvc vmid-vm")
	require.Contains(t, w.Events(), "Warning Unschedulable")

	p.Spec.NodeName = "node-7"
	require.NoError(t, w.Base.Update(t.Context(), p))
	p.Status.Conditions = nil
	require.NoError(t, w.Base.Status().Update(t.Context(), p))
	w.Settle(t, work, "vm")
	id = identityOf(t, w, "vm")
	require.Equal(t, "node-7", id.Status.NodeName)
	require.Equal(t, "True InUse", reason(id, v1alpha1.ConditionInUse))
}

// Other gates of a pod stay.
func TestOtherGatesStay(t *testing.T) {
	p := gatedPod("a", "vm")
	p.Spec.SchedulingGates = slices.Insert(p.Spec.SchedulingGates, 0,
		corev1.PodSchedulingGate{Name: "example.com/other"})
	w := newWorld(t, newSet(), p)
	w.Settle(t, restart(w), "vm")
	now, _ := get(t, w, "a", &corev1.Pod{})
	require.Equal(t, []corev1.PodSchedulingGate{{Name: "example.com/other"}},
		now.Spec.SchedulingGates)
}

// A deleted secret is made again for the next pod, with another password. The running pod keeps its
// own.
func TestSecretDeletedByHand(t *testing.T) {
	w, work := settled(t, newSet(), gatedPod("a", "vm"))
	old, _ := get(t, w, "vmid-vm", &corev1.Secret{})
	remove(t, w, named(&corev1.Secret{}, "vmid-vm"))
	w.Settle(t, work, "vm")
	require.Equal(t, 1, w.Made("Secret"), "pod a would not fit a new one")

	remove(t, w, named(&corev1.Pod{}, "a"))
	w.Make(t, gatedPod("b", "vm"))
	w.Settle(t, work, "vm")
	require.False(t, gated(t, w, "b"))
	now, there := get(t, w, "vmid-vm", &corev1.Secret{})
	require.True(t, there)
	require.NotEqual(t, old.StringData, now.StringData)
	require.Equal(t, old.OwnerReferences, now.OwnerReferences)
	require.Equal(t, []string{"Warning SecretMissing"}, w.Events())
}

// A full quota refuses even a secret that exists. That must not hold a pod.
func TestQuotaIsFullOfSecrets(t *testing.T) {
	w, work := settled(t, newSet(), gatedPod("a", "vm"))
	w.Refuse = func(verb string, o any) error {
		if _, ok := o.(*corev1.Secret); !ok {
			return nil
		}
		return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, "vmid-vm",
			errors.New("exceeded quota: secrets"))
	}
	remove(t, w, named(&corev1.Pod{}, "a"))
	w.Make(t, gatedPod("b", "vm"))
	w.Settle(t, work, "vm")
	require.False(t, gated(t, w, "b"))
}

// TestGateThatMayNotBeRemoved: where a policy of the cluster forbids it, the pod says so, once.
func TestGateThatMayNotBeRemoved(t *testing.T) {
	w, work := settled(t, newSet(), gatedPod("a", "vm"))
	remove(t, w, named(&corev1.Pod{}, "a"))
	w.Make(t, gatedPod("b", "vm"))
	w.Refuse = func(verb string, o any) error {
		if _, pod := o.(*corev1.Pod); !pod || verb != "patch" {
			return nil
		}
		return apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "b",
			errors.New("pods stay as they are"))
	}
	r := work()[0]
	for range 3 {
		require.ErrorContains(t, testtool.Err(controllertest.Once(t, r, "vm")), "gate of pod b")
	}
	require.Equal(t, []string{"Warning Failed"}, w.Events())
	w.Refuse = nil
	w.Settle(t, work, "vm")
	require.False(t, gated(t, w, "b"))
}

// The server of the disk has the old credential, so no new one is made beside it.
func TestSecretOfAServiceDeletedByHand(t *testing.T) {
	set := newSet(behindService)
	w, work := settled(t, set, ofService(gatedPod("a", "vm")))
	remove(t, w, named(&corev1.Secret{}, "vmid-vm"))
	served(t, w, "vm")
	w.Settle(t, work, "vm")
	require.False(t, gated(t, w, "a"))
	require.Equal(t, 1, w.Made("Secret"))
}

// TestExportHasTheDisk: a pod waits while the disk belongs to the Job of an export.
func TestExportHasTheDisk(t *testing.T) {
	w, work := settled(t, newSet(), gatedPod("a", "vm"))
	remove(t, w, named(&corev1.Pod{}, "a"))
	w.Settle(t, work, "vm")
	exports := func(running bool) {
		id := identityOf(t, w, "vm")
		id.Status.Export = &v1alpha1.ExportStatus{JobName: "vmexport-x", Running: running}
		require.NoError(t, w.Base.Status().Update(t.Context(), id))
	}
	exports(true)
	w.Make(t, gatedPod("b", "vm"))
	w.Settle(t, work, "vm")
	require.True(t, gated(t, w, "b"))
	require.Equal(t, "False Exporting", reason(identityOf(t, w, "vm"), v1alpha1.ConditionInUse))
	exports(false)
	w.Settle(t, work, "vm")
	require.False(t, gated(t, w, "b"))
}

// TestSourceInUse: the first pod of a disk, for which the class may make the volume, waits while
// another pod writes to what the disk begins from.
func TestSourceInUse(t *testing.T) {
	golden := named(&corev1.PersistentVolumeClaim{}, "golden")
	golden.Status.Phase = corev1.ClaimBound
	class := controllertest.DefaultClass()
	class.Name, class.Provisioner = "csi", "csi.example.com"
	fromGolden := func(s *v1alpha1.VMIdentitySet) {
		s.Spec.Image, s.Spec.Population = "", v1alpha1.Snapshot
		s.Spec.Source = &v1alpha1.DiskSource{Claim: "golden"}
		s.Spec.StorageClassName = &class.Name
	}
	set := newSet(fromGolden)
	w, work := settled(t, golden, class, set,
		named(&storagev1.CSIDriver{}, class.Provisioner),
		newIdentity(types.NamespacedName{Namespace: "test", Name: "vm"}, set))
	require.True(t, identityOf(t, w, "vm").Status.Ready)
	writer := named(filled(gatedPod("writer", "")), "writer")
	writer.Labels, writer.Annotations = nil, nil
	writer.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "golden"}}}}
	w.Make(t, writer)
	w.Make(t, filled(gatedPod("a", "vm")))
	w.Settle(t, work, "vm")
	require.True(t, gated(t, w, "a"))
	require.Contains(t, w.Events(), "Normal SourceInUse")
	remove(t, w, writer)
	w.Settle(t, work, "vm")
	require.False(t, gated(t, w, "a"))

	remove(t, w, named(&corev1.Pod{}, "a"))
	w.Settle(t, work, "vm")
	both := filled(gatedPod("b", "vm"))
	both.Spec.Volumes = writer.Spec.Volumes
	w.Make(t, both)
	w.Settle(t, work, "vm")
	require.False(t, gated(t, w, "b"), "it has the source, too")
}

// TestHydrated: a pod without the image starts with a disk that does not need it, if that was said
// of the claim which is there now.
func TestHydrated(t *testing.T) {
	for what, uid := range map[string]types.UID{"its claim": "", "another claim": "other"} {
		w, work := settled(t, newSet(), gatedPod("a", "vm"))
		remove(t, w, named(&corev1.Pod{}, "a"))
		w.Settle(t, work, "vm")
		claim, _ := get(t, w, "vmid-vm", &corev1.PersistentVolumeClaim{})
		id := identityOf(t, w, "vm")
		id.Status.HydratedClaim = cmp.Or(uid, claim.UID)
		require.NoError(t, w.Base.Status().Update(t.Context(), id))
		w.Make(t, filled(gatedPod("b", "vm")))
		w.Settle(t, work, "vm")
		require.Equal(t, uid != "", gated(t, w, "b"), what)
		// A pod that has the image all the same starts, too.
		remove(t, w, named(&corev1.Pod{}, "b"))
		w.Make(t, gatedPod("c", "vm"))
		w.Settle(t, work, "vm")
		require.False(t, gated(t, w, "c"), what)
	}
}
