package admission

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// own: an annotation of our own objects that looks like one of ours and is none is refused, when
// the object is made and later. Everybody else's annotations are left alone.
func own(t *testing.T, p *plane.Plane, namespace string) {
	t.Helper()
	spec := api.DiskSpec{Image: repository + digest}
	const pet = `{"metadata": {}, "spec": {"containers": []}}`
	kinds := map[string]func() client.Object{
		"VMIdentity": func() client.Object {
			return &api.VMIdentity{Spec: api.VMIdentitySpec{DiskSpec: spec}}
		},
		"VMIdentitySet": func() client.Object { return &api.VMIdentitySet{Spec: spec} },
		"VMPet": func() client.Object {
			o := &api.VMPet{Spec: api.VMPetSpec{Disk: spec}}
			o.Spec.Template.Raw = []byte(pet)
			return o
		},
	}
	create := func(kind string, annotations map[string]string) error {
		o := kinds[kind]()
		o.SetNamespace(namespace)
		o.SetName("own")
		o.SetAnnotations(annotations)
		return p.Client.Create(t.Context(), o, client.DryRunAll)
	}
	const says = " looks like one of this product, and is none: "
	eventually(t, "the policy is in force", func() bool {
		return create("VMPet", map[string]string{api.Group + "/x": ""}) != nil
	})
	for _, c := range []struct{ kind, annotation, refused string }{
		{"VMIdentity", api.Group + "/move_to", "a VMIdentity has disk.kubevirt.io/move-to, "},
		{"VMIdentity", api.Group + "/identityset", "a VMIdentity has disk.kubevirt.io/move-to, "},
		{"VMIdentity", "kubevirt.io/volume-claim", "a VMIdentity has "},
		{"VMIdentity", "Handover-To", "a VMIdentity has "},
		{"VMIdentity", "DISK.kubevirt.io/handover-step", "a VMIdentity has "},
		{"VMIdentity", api.AnnotationHandoverRequest, "a VMIdentity has "},
		{"VMIdentity", api.AnnotationMoveTo, ""},
		{"VMIdentity", api.AnnotationVolumeClaim, ""},
		{"VMIdentity", api.AnnotationVolumeAccess, ""},
		{"VMIdentity", api.AnnotationHandoverTo, ""},
		{"VMIdentity", api.AnnotationHandoverStep, ""},
		{"VMIdentity", "example.com/volume", ""},
		{"VMIdentitySet", api.AnnotationMoveTo, "a VMIdentitySet has no annotations to set"},
		{"VMIdentitySet", api.Group + "/applied", ""},
		{"VMPet", api.AnnotationSet, "a VMPet has no annotations to set"},
		{"VMPet", "example.com/any", ""},
	} {
		err := create(c.kind, map[string]string{c.annotation: "x"})
		if c.refused == "" {
			require.NoError(t, err, "%s %s", c.kind, c.annotation)
			continue
		}
		require.ErrorContains(t, err, `"`+c.annotation+`"`+says+c.refused, c.kind)
	}
	id := kinds["VMIdentity"]()
	id.SetNamespace(namespace)
	id.SetName("own")
	require.NoError(t, p.Client.Create(t.Context(), id))
	t.Cleanup(func() { p.Kubectl(t, "delete", "-n", namespace, "vmid", "own", "--wait=false") })
	out, err := p.TryKubectl(nil, "annotate", "-n", namespace, "vmid", "own",
		api.Group+"/moveto=node-2")
	require.Error(t, err)
	require.Contains(t, out, says)
	p.Kubectl(t, "annotate", "-n", namespace, "vmid", "own", api.AnnotationMoveTo+"=node-2")
}

// replaced runs the command of docs/kubernetes.md that makes a pod again from what the API server
// says of it, while it runs. The pod waits at its gate and starts with the same disk.
func replaced(t *testing.T, p *plane.Plane, namespace string) {
	t.Helper()
	page := testtool.Must(os.ReadFile("../../../docs/kubernetes.md"))(t)
	_, command, found := strings.Cut(string(page), "`kubectl get pod my-vm ")
	require.True(t, found)
	command, _, _ = strings.Cut(command, "`")
	get, replace, found := strings.Cut("get pod my-vm "+command, " | kubectl ")
	require.True(t, found, command)

	applyTo(t, p, namespace, string(testtool.Must(os.ReadFile(examples+"vm.yaml"))(t)))
	var pod corev1.Pod
	running := func() bool {
		pod = corev1.Pod{}
		key := client.ObjectKey{Namespace: namespace, Name: "my-vm"}
		err := p.Client.Get(t.Context(), key, &pod)
		return err == nil && pod.Status.Phase == corev1.PodRunning
	}
	eventually(t, "the machine runs", running)
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace,
		Name: "vmid-my-vm"}}
	require.NoError(t, p.Client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim))
	first, disk := pod, claim.UID

	in := []string{"-n", namespace}
	was := p.Kubectl(t, append(in, strings.Fields(get)...)...)
	out, err := p.TryKubectl(strings.NewReader(was), append(in, strings.Fields(replace)...)...)
	require.NoError(t, err, out)
	require.Contains(t, out, "pod/my-vm replaced")
	eventually(t, "the machine runs again", running)
	require.NotEqual(t, first.UID, pod.UID)
	require.Len(t, pod.Spec.InitContainers, len(first.Spec.InitContainers))
	require.Len(t, pod.Spec.Volumes, len(first.Spec.Volumes))
	require.NoError(t, p.Client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim))
	require.Equal(t, disk, claim.UID)
	eventually(t, "the disk is the new pod's", func() bool {
		id := &api.VMIdentity{}
		key := client.ObjectKey{Namespace: namespace, Name: "my-vm"}
		require.NoError(t, p.Client.Get(t.Context(), key, id))
		return id.Status.UsedBy != nil && id.Status.UsedBy.UID == pod.UID
	})
	p.Kubectl(t, append(in, "delete", "pod", "my-vm")...)
}
