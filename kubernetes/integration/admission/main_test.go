// Package admission tests on a real API server how pods get their disks when they are made, with
// the chart in several forms. Each applies to the whole cluster, so these tests have a control
// plane of their own.
package admission

import (
	"context"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/admission"
	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

func TestMain(m *testing.M) { plane.Main(m) }

// timeout is how long anything may take on a busy machine before it counts as broken.
const timeout = 2 * time.Minute

const (
	system     = "kubevirt-disk-system"
	account    = "kubevirt-disk-controller"
	server     = "registry.example.com/kubevirt.io/disk:1"
	repository = "registry.example.com:5000/disks/fedora"
)

var (
	digest = "@sha256:" + strings.Repeat("a", 64)
	other  = "@sha256:" + strings.Repeat("b", 64)
)

// install applies the manifest, and runs its webhook.
func install(t testing.TB, p *plane.Plane) {
	t.Helper()
	apply(t, p)
	p.ServeWebhook(t, system, account, server)
}

// apply applies the manifest. The controller that it is for is not there.
func apply(t testing.TB, p *plane.Plane) {
	t.Helper()
	p.Kubectl(t, "apply", "--server-side", "--force-conflicts", "-f", controllertest.Manifest(t))
}

// sets are VMIdentitySets by their names.
func sets(namespace string) map[string]*api.VMIdentitySet {
	all := map[string]*api.VMIdentitySet{}
	for name, change := range map[string]func(*api.DiskSpec){
		"fedora":   func(*api.DiskSpec) {},
		"tagged":   func(s *api.DiskSpec) { s.Image = repository + ":42" + digest },
		"bare":     func(s *api.DiskSpec) { s.Image = "fedora" + digest },
		"odd":      func(s *api.DiskSpec) { s.Size = quantity("1000000001") },
		"large":    func(s *api.DiskSpec) { s.Size = quantity("20Gi") },
		"fraction": func(s *api.DiskSpec) { s.Size = quantity("1500500m") },
		"blocks":   func(s *api.DiskSpec) { s.BlockSize = 4096 },
		"snapshot": func(s *api.DiskSpec) { s.Population = api.Snapshot },
		"follows": func(s *api.DiskSpec) {
			s.Population, s.Follow = api.Snapshot, &api.FollowSpec{Tag: "stable"}
		},
		"claim": func(s *api.DiskSpec) {
			s.Image, s.Population = "", api.Snapshot
			s.Source = &api.DiskSource{Claim: "golden"}
		},
		"clone": func(s *api.DiskSpec) {
			s.Source = &api.DiskSource{Identity: "web-0"}
		},
		"local":                 func(s *api.DiskSpec) { s.Type = api.Local },
		"service":               func(s *api.DiskSpec) { s.Attachment = api.Service },
		strings.Repeat("s", 63): func(*api.DiskSpec) {},
		strings.Repeat("s", 64): func(*api.DiskSpec) {},
	} {
		set := &api.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
			Spec: api.DiskSpec{Image: repository + digest}}
		change(&set.Spec)
		all[name] = set
	}
	return all
}

func quantity(text string) *resource.Quantity {
	q := resource.MustParse(text)
	return &q
}

// aPod fits into a namespace with pod security `restricted`.
func aPod(namespace, set string) *corev1.Pod {
	yes, no := true, false
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "vm",
			Annotations: map[string]string{api.AnnotationSet: set}},
		Spec: corev1.PodSpec{
			// The token's volume and mounts would be at other places in the lists.
			AutomountServiceAccountToken: &no,
			SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: &yes,
				SeccompProfile: &corev1.SeccompProfile{
					Type: corev1.SeccompProfileTypeRuntimeDefault}},
			Containers: []corev1.Container{container("vm")},
		},
	}
}

func container(name string) corev1.Container {
	no := false
	return corev1.Container{Name: name, Image: "registry.example.com/qemu:1",
		SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: &no,
			Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}}
}

// podCase is a new pod and the outcome.
type podCase struct {
	set    string
	change func(*corev1.Pod)
	// The pod is refused with a message that contains this text; "": it gets its disk.
	refused string
}

func annotate(pairs ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		for i := 0; i < len(pairs); i += 2 {
			p.Annotations[pairs[i]] = pairs[i+1]
		}
	}
}

// had changes a pod as admission does, and then as the cluster or a person does.
func had(change func(*corev1.Pod)) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		set := sets(p.Namespace)[admission.SetName(p, 0)]
		if err := admission.Pod(p, "registry.example.com/older", []admission.Wanted{
			{Disk: admission.Disks(p)[0], Set: set}}); err != nil {
			panic(err)
		}
		if change != nil {
			change(p)
		}
	}
}

// only leaves a pod one annotation.
func only(key, value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Annotations = map[string]string{key: value} }
}

func image(name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Containers[0].Image = name }
}

// podCases are cases in which package admission and the API server with the webhook agree.
func podCases() map[string]podCase {
	long := strings.Repeat("n", api.MaxNameLength)
	group := int64(3000)
	legacy := func(name string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Annotations = map[string]string{api.AnnotationSetLegacy: "fedora"}
			if name != "" {
				p.Annotations[api.AnnotationNameLegacy] = name
			}
		}
	}
	all := map[string]podCase{
		"plain":     {set: "fedora"},
		"odd size":  {set: "odd"},
		"large":     {set: "large"},
		"fraction":  {set: "fraction"},
		"blocks":    {set: "blocks"},
		"snapshot":  {set: "snapshot"},
		"claim":     {set: "claim"},
		"clone":     {set: "clone"},
		"local":     {set: "local"},
		"service":   {set: "service"},
		"long set":  {set: strings.Repeat("s", 63)},
		"named":     {set: "fedora", change: annotate(api.AnnotationName, "kept.1")},
		"long name": {set: "fedora", change: annotate(api.AnnotationName, long)},
		"004":       {change: legacy("")},
		"004 named": {change: legacy("kept")},
		"both agree": {set: "fedora", change: annotate(api.AnnotationSetLegacy, "fedora",
			api.AnnotationName, "a", api.AnnotationNameLegacy, "a")},
		"labels and gates of its own": {set: "fedora", change: func(p *corev1.Pod) {
			p.Labels = map[string]string{"app": "x", api.LabelIdentity: "forged"}
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "other.example.com/gate"}}
		}},
		"the gate already": {set: "fedora", change: func(p *corev1.Pod) {
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: api.Gate}}
		}},
		"group of its own": {set: "fedora", change: func(p *corev1.Pod) {
			p.Spec.SecurityContext.FSGroup = &group
		}},
		"more containers": {set: "fedora", change: func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{container("first"), container("second")}
			p.Spec.Containers = append(p.Spec.Containers, container("log"))
			p.Spec.Volumes = []corev1.Volume{{Name: "own", VolumeSource: corev1.VolumeSource{
				EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{
				{Name: "own", MountPath: "/own"}}
		}},
		"generated name": {set: "fedora", change: func(p *corev1.Pod) {
			p.Name, p.GenerateName = "", "vm-"
			p.Annotations[api.AnnotationName] = "one"
		}},
		"another image of a set that follows a tag": {set: "follows",
			change: image(repository + other)},
		"image of the set":     {set: "fedora", change: image(repository + digest)},
		"image with a tag":     {set: "fedora", change: image(repository + ":1" + digest)},
		"image of a neighbour": {set: "fedora", change: image(repository + "-tools:1")},
		"image of a lower repository": {set: "fedora",
			change: image(repository + "/tools" + other)},
		"bare image": {set: "bare", change: image("fedora:5000/x" + other)},

		"exported": {set: "fedora", change: had(nil)},
		"exported while it ran": {set: "fedora", change: had(func(p *corev1.Pod) {
			p.Spec.NodeName, p.Spec.SchedulingGates = "n1", nil
			p.Annotations[api.AnnotationSize] = "512"
		})},
		"exported, of a Service":  {set: "service", change: had(nil)},
		"exported, of a snapshot": {set: "snapshot", change: had(nil)},
		"exported, of a claim":    {set: "claim", change: had(nil)},
		"copied for another disk": {set: "fedora", change: had(
			annotate(api.AnnotationName, "other")), refused: "came from another pod with a disk"},
		"exported, of another image": {set: "fedora", change: had(func(p *corev1.Pod) {
			p.Spec.Volumes[len(p.Spec.Volumes)-1].Image.Reference = "registry.example.com/x" + other
		}), refused: "came from another pod with a disk"},
		"exported, with a container that has no credential": {set: "fedora",
			change: had(func(p *corev1.Pod) {
				p.Spec.Containers = append(p.Spec.Containers, container("log"))
			}), refused: "came from another pod with a disk"},
		"a name that looks like ours": {change: only(api.Group+"/identityset", "fedora"),
			refused: `the annotation "disk.kubevirt.io/identityset" looks like one`},
		"another name that looks like ours": {set: "fedora",
			change:  annotate(api.Group+"/Identity-Name", "x"),
			refused: `the annotation "disk.kubevirt.io/Identity-Name" looks like one`},
		"one without its prefix": {change: only("identityset", "fedora"),
			refused: `the annotation "identityset" looks like one`},
		"one of 004 in lower case": {change: only("virtletVMIdentitySet", "fedora"),
			refused: `the annotation "virtletVMIdentitySet" looks like one`},
		"one with the prefix of KubeVirt": {change: only("kubevirt.io/identity-set", "fedora"),
			refused: `the annotation "kubevirt.io/identity-set" looks like one`},
		"a name without a set": {change: only(api.AnnotationName, "vm"),
			refused: "and no VMIdentitySet: add the annotation disk.kubevirt.io/identity-set"},

		"another digest": {set: "fedora", change: image(repository + other),
			refused: "the pod has image " + repository + other + `, and VMIdentitySet "fedora" has ` +
				repository + digest + ": name the image of the set, by its digest"},
		"a tag":  {set: "tagged", change: image(repository + ":42"), refused: "the pod has image"},
		"no tag": {set: "fedora", change: image(repository), refused: "the pod has image"},
		"another digest in a volume": {set: "fedora", change: func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "own", VolumeSource: corev1.VolumeSource{
				Image: &corev1.ImageVolumeSource{Reference: repository + other}}}}
		}, refused: "the pod has image"},
		"another digest in an init container": {set: "fedora", change: func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{container("first")}
			p.Spec.InitContainers[0].Image = repository + other
		}, refused: "the pod has image"},
		"no such set": {set: "none", refused: `there is no VMIdentitySet "none" in namespace "`},
		"no set":      {set: "", refused: `there is no VMIdentitySet "" in namespace "`},
		"no such set of 004": {change: func(p *corev1.Pod) {
			p.Annotations = map[string]string{api.AnnotationSetLegacy: "none"}
		}, refused: `there is no VMIdentitySet "none"`},
		"a set with a long name": {set: strings.Repeat("s", 64),
			refused: "has more than 63 characters"},
		"two sets": {set: "fedora", change: annotate(api.AnnotationSetLegacy, "large"),
			refused: "the annotations disk.kubevirt.io/identity-set and VirtletVMIdentitySet " +
				"differ"},
		"two names": {set: "fedora", change: annotate(api.AnnotationName, "a",
			api.AnnotationNameLegacy, "b"), refused: `VirtletVMIdentityName differ, "a" and "b"`},
		"no name": {set: "fedora", change: func(p *corev1.Pod) {
			p.Name, p.GenerateName = "", "vm-"
		}, refused: "the pod has no name yet"},
		"no name, and a long one later": {set: "fedora", change: func(p *corev1.Pod) {
			p.Name, p.GenerateName = "", strings.Repeat("n", 70)+"-"
		}, refused: "the pod has no name yet"},
		"a pod with a long name": {set: "fedora",
			change:  func(p *corev1.Pod) { p.Name = long + "n" },
			refused: `n" cannot be the name of a VMIdentity: want at most 58 characters`},
		"a long name": {set: "fedora", change: annotate(api.AnnotationName, long+"n"),
			refused: "cannot be the name of a VMIdentity"},
		"an empty name": {set: "fedora", change: annotate(api.AnnotationName, ""),
			refused: `"" cannot be the name of a VMIdentity`},
		"a name in capitals": {set: "fedora", change: annotate(api.AnnotationName, "VM"),
			refused: `"VM" cannot be the name of a VMIdentity`},
		"a name that ends in a dot": {set: "fedora", change: annotate(api.AnnotationName, "vm."),
			refused: `"vm." cannot be the name of a VMIdentity`},
		"a container of that name": {set: "fedora", change: func(p *corev1.Pod) {
			p.Spec.Containers = append(p.Spec.Containers, container(api.DiskContainer))
		}, refused: `the pod has a container or a volume "disk-vda" already: rename it`},
		"a volume of that name": {set: "service", change: func(p *corev1.Pod) {
			p.Labels = map[string]string{api.LabelIdentity: "vm", api.LabelSet: "service"}
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: api.Gate}}
			p.Spec.Volumes = []corev1.Volume{{Name: "disk-vda-chap",
				VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		}, refused: `the pod has a container or a volume "disk-vda-chap" already: rename it`},
		"a mount of that path": {set: "fedora", change: func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "own", VolumeSource: corev1.VolumeSource{
				EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "own",
				MountPath: admission.CredentialDir}}
		}, refused: `container "vm" mounts a volume on /var/run/secrets/disk.kubevirt.io/vda`},
		"a pod for a node": {set: "fedora", change: func(p *corev1.Pod) { p.Spec.NodeName = "n1" },
			refused: "spec.nodeName is set, so the pod cannot wait for its disk"},
	}
	maps.Copy(all, launcherCases())
	maps.Copy(all, severalCases())
	return all
}

func (c podCase) pod(namespace string) *corev1.Pod {
	pod := aPod(namespace, c.set)
	if c.change != nil {
		c.change(pod)
	}
	return pod
}

// dryRun returns what the API server would make from a new pod.
func dryRun(ctx context.Context, p *plane.Plane, pod *corev1.Pod) (*corev1.Pod, error) {
	pod = pod.DeepCopy()
	err := p.Client.Create(ctx, pod, client.DryRunAll)
	return pod, err
}

// setOf reads a set.
func setOf(t *testing.T, p *plane.Plane, namespace, name string) *api.VMIdentitySet {
	t.Helper()
	set := &api.VMIdentitySet{}
	require.NoError(t, p.Client.Get(t.Context(),
		client.ObjectKey{Namespace: namespace, Name: name}, set))
	return set
}

// comparable removes the differences between any two pods.
func comparable(pod *corev1.Pod) *corev1.Pod {
	pod = pod.DeepCopy()
	pod.ObjectMeta, pod.Status = metav1.ObjectMeta{Labels: pod.Labels}, corev1.PodStatus{}
	return pod
}

// agree makes each pod of the table, and compares the result with that of package admission.
func agree(t *testing.T, p *plane.Plane, namespace string) {
	all := sets(namespace)
	for name, c := range podCases() {
		t.Run(name, func(t *testing.T) {
			pod := c.pod(namespace)
			changed := pod.DeepCopy()
			var disks []admission.Wanted
			for _, d := range admission.Disks(pod) {
				w := admission.Wanted{Disk: d}
				if all[d.SetName] != nil {
					w.Set = setOf(t, p, namespace, d.SetName)
				}
				disks = append(disks, w)
			}
			want := admission.Pod(changed, server, disks)
			got, err := dryRun(t.Context(), p, pod)
			if c.refused != "" {
				require.ErrorContains(t, want, c.refused)
				require.ErrorContains(t, err, want.Error())
				return
			}
			require.NoError(t, want)
			require.NoError(t, err)
			// The API server's result without the annotations, so that it adds nothing.
			changed.Annotations = nil
			expect, err := dryRun(t.Context(), p, changed)
			require.NoError(t, err)
			require.Equal(t, comparable(expect), comparable(got))
		})
	}
}

// begin makes a namespace with all sets.
func begin(t *testing.T, p *plane.Plane) string {
	t.Helper()
	namespace := p.Namespace(t)
	for _, set := range sets(namespace) {
		require.NoError(t, p.Client.Create(t.Context(), set))
	}
	return namespace
}
