package admission

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// chart has the namespaces for a test.
type chart struct{ system, first, second string }

// The values of the chart in tests.
const (
	// all is everything that the chart can do for a few namespaces.
	all = `
crds: {install: false}
images: {server: "` + server + `", pullSecrets: [registry]}
usageTypes: {fast: ssd}
readWriteOnce: [old]
snapshotClass: snapshots
pullSecret: registry
pullCA: our-ca
followRegistries: [registry.example.com/vm]
signatures:
  policies: {default: {default: allow}, closed: "default: deny\n"}
  registrySecret: registry
  registryCA: our-ca
persistentVolumes: {create: true}
nodeSelector: {kubernetes.io/os: linux}
tolerations: [{operator: Exists}]
affinity: {}
serviceMonitor: {create: true, labels: {release: prometheus}}
prometheusRule: {create: true, labels: {release: prometheus}}
without: []
`
	// least has the fewest rights.
	least = `
crds: {install: false}
replicas: 1
without: [exports, pets, services, snapshots]
`
)

// monitoring has the types of the Prometheus operator, with the fields that we use: the API server
// refuses any other field.
const monitoring = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: servicemonitors.monitoring.coreos.com}
spec:
  group: monitoring.coreos.com
  names: {kind: ServiceMonitor, plural: servicemonitors}
  scope: Namespaced
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, properties: {
      selector: {type: object, properties: {matchLabels: {type: object,
        additionalProperties: {type: string}}}},
      endpoints: {type: array, items: {type: object, properties: {
        port: {type: string}, honorLabels: {type: boolean}, scheme: {type: string},
        bearerTokenFile: {type: string}, tlsConfig: {type: object, properties: {
          insecureSkipVerify: {type: boolean}}}}}}}}}}}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: prometheusrules.monitoring.coreos.com}
spec:
  group: monitoring.coreos.com
  names: {kind: PrometheusRule, plural: prometheusrules}
  scope: Namespaced
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, properties: {
      groups: {type: array, items: {type: object, required: [name, rules], properties: {
        name: {type: string}, rules: {type: array, items: {type: object, required: [alert, expr],
          properties: {alert: {type: string}, expr: {type: string}, for: {type: string},
            labels: {type: object, additionalProperties: {type: string}},
            annotations: {type: object, additionalProperties: {type: string}}}}}}}}}}}}}
`

// TestChart applies the chart with two namespaces. The controllers have the
// rights from the chart. They work in these namespaces, and do not touch pods in others.
func TestChart(t *testing.T) {
	p := plane.Get(t)
	require.NoError(t, p.InstallCRDs(t.Context(), strings.NewReader(monitoring)))
	c := chart{system: p.Namespace(t), first: p.Namespace(t), second: p.Namespace(t)}
	t.Run("all", func(t *testing.T) {
		c.install(t, p, all)
		for what, where := range map[string]string{
			"list pods": c.first, "create secrets": c.second, "create persistentvolumes": "",
		} {
			require.True(t, c.allowed(t, p, what, where), "%s in %q", what, where)
			if where != "" {
				require.False(t, c.allowed(t, p, what, "default"), "%s in default", what)
				require.False(t, c.allowed(t, p, what, ""), "%s everywhere", what)
			}
		}
		for _, what := range workloads {
			require.True(t, c.allowed(t, p, what, c.first), what)
		}
		controllers(t, p, c.system, nil, c.first, c.second)
		p.ServeWebhook(t, c.system, account, server, c.first, c.second)
		inForce(t, p, c.first)
		machines(t, p, c.first)
	})
	t.Run("least", func(t *testing.T) {
		c.install(t, p, least)
		require.False(t, c.allowed(t, p, "create persistentvolumes", ""))
		for _, what := range workloads {
			require.False(t, c.allowed(t, p, what, c.second), what)
		}
		controllers(t, p, c.system, controller.Optional(), c.first, c.second)
		turnedOff(t, p, c.first)
		p.ServeWebhook(t, c.system, account, server, c.first, c.second)
		inForce(t, p, c.second)
		namespaceEnds(t, p, c.first)
	})
}

// workloads are the objects that the controllers may make, unless that is turned off. With these
// rights, one can run any pod.
var workloads = []string{"create statefulsets.apps", "create deployments.apps", "create services",
	"create jobs.batch", "create volumesnapshots.snapshot.storage.k8s.io"}

// turnedOff: an object that needs a feature that is turned off says so. The controllers work
// without the rights for that feature.
func turnedOff(t *testing.T, p *plane.Plane, namespace string) {
	t.Helper()
	image := `{image: "` + repository + digest + `", `
	applyTo(t, p, namespace, `
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMPet
metadata: {name: pet}
spec: {disk: `+image+`}, template: {spec: {containers: [{name: vm, image: vm}]}}}
---
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMIdentity
metadata: {name: served}
spec: `+image+`attachment: Service}
---
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMIdentity
metadata: {name: filled}
spec: `+image+`population: Snapshot}
---
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMIdentity
metadata: {name: plain}
spec: `+image+`}
`)
	for object, says := range map[string]string{
		"vmpet/pet":         "False pets are turned off (--without=pets)",
		"vmidentity/served": "False attachment Service is turned off (--without=services)",
		"vmidentity/filled": "False this controller has no snapshots",
		"vmidentity/plain":  "True a pod can use the disk",
	} {
		var is string
		eventually(t, object+" says "+says, func() bool {
			is = p.Kubectl(t, "get", object, "-n", namespace, "-o", `jsonpath={range `+
				`.status.conditions[?(@.type=="Ready")]}{.status} {.message}{end}`)
			return strings.HasPrefix(is, says)
		})
	}
}

// install applies the chart with values, and deletes it after the test. A field that the API server
// does not know is an error.
func (c chart) install(t *testing.T, p *plane.Plane, values string) {
	t.Helper()
	text := controllertest.Chart(t, c.system, values+
		fmt.Sprintf("namespaces: [%s, %s]\n", c.first, c.second))
	objects := testtool.Must(plane.Decode(strings.NewReader(text)))(t)
	kinds, roles := map[string]int{}, map[string]bool{}
	for _, o := range objects {
		kinds[o.GetKind()]++
		if o.GetKind() == "Role" && o.GetName() == account {
			roles[o.GetNamespace()] = true
		}
	}
	require.Zero(t, kinds["CustomResourceDefinition"], "crds.install is false")
	require.Equal(t, map[string]bool{c.first: true, c.second: true}, roles)
	if values == all {
		require.Equal(t, 1, kinds["ServiceMonitor"])
		require.Equal(t, 2, kinds["PrometheusRule"])
	}
	t.Cleanup(func() {
		p.NoWebhook()
		for _, o := range objects {
			ctx := context.WithoutCancel(t.Context())
			assert.NoError(t, client.IgnoreNotFound(p.Client.Delete(ctx, o)))
		}
	})
	out, err := p.TryKubectl(strings.NewReader(text), "apply", "--server-side",
		"--force-conflicts", "--validate=strict", "-f", "-")
	require.NoError(t, err, out)
}

// allowed returns whether the controller may do something.
func (c chart) allowed(t *testing.T, p *plane.Plane, what, namespace string) bool {
	t.Helper()
	return p.Allowed(t, c.system, account, what+" in "+namespace)
}

// inForce: pods of a namespace get their disks. In a namespace in which the controller does not
// work, those that ask for one are refused.
func inForce(t *testing.T, p *plane.Plane, namespace string) {
	t.Helper()
	elsewhere := p.Namespace(t)
	for _, where := range []string{namespace, elsewhere} {
		require.NoError(t, p.Client.Create(t.Context(), newSet(where, "fedora")))
	}
	pod := testtool.Must(dryRun(t.Context(), p, aPod(namespace, "fedora")))(t)
	require.Len(t, pod.Spec.InitContainers, 1)
	require.Equal(t, server, pod.Spec.InitContainers[0].Image)
	_, err := dryRun(t.Context(), p, aPod(namespace, "none"))
	require.ErrorContains(t, err, `there is no VMIdentitySet "none"`)
	for _, set := range []string{"fedora", "none"} {
		_, err := dryRun(t.Context(), p, aPod(elsewhere, set))
		require.ErrorContains(t, err, fmt.Sprintf("the controller of kubevirt-disk does not "+
			"work in namespace %q, so the pod would wait", elsewhere))
	}
	plain := aPod(elsewhere, "none")
	plain.Annotations = nil
	require.NoError(t, testtool.Err(dryRun(t.Context(), p, plain)))
}

// namespaceEnds: a listed namespace is deleted, and the Role of the controllers there goes before
// an identity. The identity does not hold up the namespace.
func namespaceEnds(t *testing.T, p *plane.Plane, namespace string) {
	t.Helper()
	applyTo(t, p, namespace, `
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMIdentity
metadata: {name: late}
spec: {image: "`+repository+digest+`"}
`)
	get := func(what ...string) string {
		out, _ := p.TryKubectl(nil, append([]string{"get", "-n", namespace}, what...)...)
		return out
	}
	eventually(t, "the identity is ready", func() bool {
		return get("vmid", "late", "-o", "jsonpath={.status.ready}") == "true"
	})
	p.Kubectl(t, "delete", "role,rolebinding", "-n", namespace, "--all")
	p.Kubectl(t, "delete", "namespace", namespace, "--wait=false")
	eventually(t, "the namespace is gone", func() bool {
		return strings.Contains(get("namespace", namespace), "NotFound")
	})
}

// machines runs the example of a StatefulSet, with the controllers of Kubernetes, on a node that
// KWOK simulates. Each machine has its own disk, and gets it again after the StatefulSet was scaled
// down and up.
func machines(t *testing.T, p *plane.Plane, namespace string) {
	const replicas = 3
	p.Nodes(t, "machines")
	for i := range replicas + 1 {
		claim := fmt.Sprintf("vmid-my-vms-%d", i)
		if i == replicas {
			claim = "vmid-my-vm"
		}
		p.Volume(t, fmt.Sprintf("%s-%d", namespace, i), namespace, claim)
	}
	for _, name := range []string{"set.yaml", "statefulset.yaml"} {
		applyTo(t, p, namespace, string(testtool.Must(os.ReadFile(examples+name))(t)))
	}
	running := func(want int) func() bool {
		return func() bool {
			var pods corev1.PodList
			require.NoError(t, p.Client.List(t.Context(), &pods, client.InNamespace(namespace),
				client.MatchingLabels{api.LabelSet: "my-fedora"}))
			n := 0
			for _, pod := range pods.Items {
				require.Equal(t, pod.Name, pod.Labels[api.LabelIdentity])
				if pod.Status.Phase == corev1.PodRunning {
					n++
				}
			}
			return n == want && len(pods.Items) == want
		}
	}
	disks := func() map[string]types.UID {
		found := map[string]types.UID{}
		for i := range replicas {
			key := client.ObjectKey{Namespace: namespace, Name: fmt.Sprintf("my-vms-%d", i)}
			identity := &api.VMIdentity{}
			require.NoError(t, p.Client.Get(t.Context(), key, identity))
			claim := &corev1.PersistentVolumeClaim{}
			require.NoError(t, p.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace,
				Name: identity.Status.ClaimName}, claim))
			require.Zero(t, claim.DeletionTimestamp)
			require.Equal(t, fmt.Sprintf("%s-%d", namespace, i), claim.Spec.VolumeName)
			found[identity.Name] = claim.UID
		}
		return found
	}
	user := func(i int) *corev1.ObjectReference {
		identity := &api.VMIdentity{}
		require.NoError(t, p.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace,
			Name: fmt.Sprintf("my-vms-%d", i)}, identity))
		return identity.Status.UsedBy
	}
	eventually(t, "all machines run", running(replicas))
	eventually(t, "it is said who uses a disk", func() bool { return user(2) != nil })
	first, former := disks(), user(2)
	require.Len(t, first, replicas)
	p.Kubectl(t, "scale", "statefulset", "my-vms", "-n", namespace, "--replicas=1")
	eventually(t, "one machine runs", running(1))
	eventually(t, "nobody uses the other disks", func() bool { return user(2) == nil })
	require.Equal(t, first, disks(), "the disks stay")
	p.Kubectl(t, "scale", "statefulset", "my-vms", "-n", namespace, "--replicas=3")
	eventually(t, "all machines run again", running(replicas))
	require.Equal(t, first, disks(), "each has its own disk")
	eventually(t, "it is said who uses it now", func() bool { return user(2) != nil })
	require.NotEqual(t, former.UID, user(2).UID, "the pod is another one")
	p.Kubectl(t, "delete", "statefulset", "my-vms", "-n", namespace)
	eventually(t, "no machine runs", running(0))
	require.Equal(t, first, disks(), "the disks outlive the StatefulSet")
	replaced(t, p, namespace)
}

// eventually waits for something that may take long on a busy machine.
func eventually(t *testing.T, what string, met func() bool) {
	t.Helper()
	testtool.Within(t, timeout, met, what)
}
