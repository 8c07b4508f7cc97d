package identities

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/disk/disktest/filetest"
	diskimage "kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// localVolume is a volume on a node. Its class would remove it.
func (w *world) localVolume(name, node, class string) (dir string) {
	w.t.Helper()
	dir = w.t.TempDir()
	mode := corev1.PersistentVolumeFilesystem
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: corev1.ResourceList{
				corev1.ResourceStorage: resource.MustParse("2Gi")},
			AccessModes: []corev1.PersistentVolumeAccessMode{
				corev1.ReadWriteOncePod},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			StorageClassName:              class, VolumeMode: &mode,
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				Local: &corev1.LocalVolumeSource{Path: dir}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{
					MatchExpressions: []corev1.NodeSelectorRequirement{{
						Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn,
						Values: []string{node}}}}}}}}}
	require.NoError(w.t, w.Client.Create(w.t.Context(), v))
	// The scheduler may not try again soon if a volume becomes available a moment later.
	w.until("the volume can be had", func() bool {
		return w.Client.Get(w.t.Context(), client.ObjectKeyFromObject(v), v) == nil &&
			v.Status.Phase == corev1.VolumeAvailable
	})
	return dir
}

// machine makes a pod that gets its disk from the webhook. It has to run on a node,
// unless that is "". If the pod named its claim twice, the scheduler would look for two volumes.
func (w *world) machine(name, node string) {
	w.t.Helper()
	p := plane.Pod(w.ns, name, map[string]string{v1alpha1.AnnotationSet: "set"})
	if node != "" {
		p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node}
	}
	require.NoError(w.t, w.Client.Create(w.t.Context(), p))
}

// TestLocalMoves moves an overlay that still needs its image, with its pod, to another node: on the
// real API server, scheduler and controllers of claims and Jobs, with real data.
func TestLocalMoves(t *testing.T) {
	p := plane.Get(t)
	w := &world{Plane: p, t: t, ns: p.Namespace(t)}
	run(t, p, w.ns, "kubevirt.io:disk-controller")
	class, one, two := w.ns, w.ns+"-1", w.ns+"-2"
	// The rights from the chart's localDisks.move.
	p.Grant(t, w.ns+"-move", system, account, rbacv1.PolicyRule{APIGroups: []string{""},
		Resources: []string{"persistentvolumes"}, Verbs: []string{"get", "patch"}},
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"nodes"},
			Verbs: []string{"get"}})
	newNodes(w, one, two)
	late := storagev1.VolumeBindingWaitForFirstConsumer
	require.NoError(t, p.Client.Create(t.Context(), &storagev1.StorageClass{
		ObjectMeta:  metav1.ObjectMeta{Name: class},
		Provisioner: "kubernetes.io/no-provisioner", VolumeBindingMode: &late}))
	from := w.localVolume(w.ns+"-from", one, class)
	w.set(func(s *v1alpha1.DiskSpec) { s.Type, s.StorageClassName = v1alpha1.Local, &class })
	w.machine("vm", "")
	nodeOf := func(want string) func() bool {
		return func() bool {
			id := &v1alpha1.VMIdentity{}
			return w.get("vm", id) && id.Status.NodeName == want && id.Status.Move == nil &&
				w.free("vm")
		}
	}
	w.until("the pod runs on the node of the volume", nodeOf(one))

	const size = 64 << 20
	content := filetest.Sample(size, 1)
	path := filepath.Join(t.TempDir(), "a.raw")
	require.NoError(t, os.WriteFile(path, content, 0o600))
	open := func(dir string) *instance.Instance {
		img, err := diskimage.Open(path, diskimage.Options{})
		require.NoError(t, err)
		t.Cleanup(func() { _ = img.Close() })
		disk, err := instance.Open(t.Context(), img, instance.Options{PersistentDir: dir,
			Mode: instance.CopyOnWrite})
		require.NoError(t, err)
		return disk
	}
	disk := open(from)
	for at := int64(512); at < size; at += 7 << 20 {
		data := filetest.Sample(5000/512*512, uint64(at))
		_, err := disk.WriteAt(t.Context(), data, at)
		require.NoError(t, err)
		copy(content[at:], data)
	}
	require.NoError(t, disk.Flush())
	require.NoError(t, disk.Close())

	w.remove("vm", &corev1.Pod{})
	w.until("the pod has ended", func() bool { return !w.get("vm", &corev1.Pod{}) })
	to := w.localVolume(w.ns+"-to", two, class)
	w.machine("vm", two)
	w.until("the pod runs on the other node", nodeOf(two))
	w.until("the scheduler takes it there", func() bool {
		p := &corev1.Pod{}
		return w.get("vm", p) && p.Spec.NodeName == two
	})
	w.until("it is said", w.says("vm", v1alpha1.ConditionMoving, v1alpha1.ReasonMoved))
	claim := &corev1.PersistentVolumeClaim{}
	require.True(t, w.get("vmid-vm", claim))
	require.Equal(t, w.ns+"-to", claim.Spec.VolumeName)
	for _, name := range []string{w.ns + "-from", w.ns + "-to"} {
		v := &corev1.PersistentVolume{}
		require.NoError(t, p.Client.Get(t.Context(), client.ObjectKey{Name: name}, v))
		require.Equal(t, corev1.PersistentVolumeReclaimDelete,
			v.Spec.PersistentVolumeReclaimPolicy)
		require.NotContains(t, v.Annotations, v1alpha1.Group+"/reclaim-policy")
	}
	require.False(t, w.get("vmmove-vm", &corev1.PersistentVolumeClaim{}))

	disk = open(to)
	defer disk.Close()
	require.Equal(t, -1, filetest.FirstDifference(content, filetest.ReadAll(t, disk, size)))
	require.Less(t, filetest.Allocated(t, filepath.Join(to, "disk.img")), int64(size/8),
		"of an overlay only what it has is moved")
}
