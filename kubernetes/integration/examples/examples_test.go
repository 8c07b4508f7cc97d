// Package examples checks the manifests of the examples with Kubernetes' own types, and makes what
// tests without a cluster run. It has only tests.
package examples

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// kubernetesExamples are the objects in the examples for Kubernetes.
type kubernetesExamples struct {
	// by the name of the pod, or of the object that makes the pod
	pods     map[string]*corev1.PodTemplateSpec
	deployed map[string]*appsv1.Deployment
	services []*corev1.Service
	policies []*networkingv1.NetworkPolicy
	secrets  map[string]*corev1.Secret
	claims   map[string]*corev1.PersistentVolumeClaim
	volumes  map[string]*corev1.PersistentVolume
}

// readKubernetesExamples decodes every document as the API server does with strict field
// validation: an unknown or duplicate field is an error.
func readKubernetesExamples(t *testing.T) kubernetesExamples {
	t.Helper()
	all := kubernetesExamples{pods: map[string]*corev1.PodTemplateSpec{},
		deployed: map[string]*appsv1.Deployment{}, secrets: map[string]*corev1.Secret{},
		claims:  map[string]*corev1.PersistentVolumeClaim{},
		volumes: map[string]*corev1.PersistentVolume{}}
	files, err := filepath.Glob("../../../examples/kubernetes/*.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		objects, err := decodeStrictly(text)
		require.NoError(t, err, file)
		for _, object := range objects {
			switch o := object.(type) {
			case *corev1.Pod:
				all.pods[o.Name] = &corev1.PodTemplateSpec{ObjectMeta: o.ObjectMeta, Spec: o.Spec}
			case *appsv1.Deployment:
				all.pods[o.Name], all.deployed[o.Name] = &o.Spec.Template, o
			case *corev1.Service:
				all.services = append(all.services, o)
			case *networkingv1.NetworkPolicy:
				all.policies = append(all.policies, o)
			case *corev1.PersistentVolumeClaim:
				all.claims[o.Name] = o
			case *corev1.PersistentVolume:
				all.volumes[o.Name] = o
			case *corev1.Secret:
				all.secrets[o.Name] = o
			default:
				t.Errorf("%s: no test checks a %T", file, object)
			}
		}
	}
	return all
}

func decodeStrictly(text []byte) (objects []runtime.Object, err error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), appsv1.AddToScheme(scheme),
		batchv1.AddToScheme(scheme), networkingv1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	decoder := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme,
		json.SerializerOptions{Yaml: true, Strict: true})
	for documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text))); ; {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, err
		}
		object, _, err := decoder.Decode(document, nil, nil)
		if err != nil {
			return nil, err
		}
		objects = append(objects, object)
	}
}

// TestOtherExamples: the objects in the examples for other things are valid, too. VirtualMachines
// are KubeVirt's.
func TestOtherExamples(t *testing.T) {
	for _, file := range []string{"registry/pull.yaml", "container/kernelboot.yaml"} {
		text, err := os.ReadFile("../../../examples/" + file)
		require.NoError(t, err)
		looked := 0
		for document := range strings.SplitSeq(string(text), "\n---\n") {
			if strings.Contains(document, "kind: VirtualMachine\n") {
				continue
			}
			objects, err := decodeStrictly([]byte(document))
			require.NoError(t, err, file)
			looked += len(objects)
		}
		require.Positive(t, looked, file)
	}
}

func TestStrictDecodingBites(t *testing.T) {
	const pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: x}\nspec:\n  containers:\n  - name: " +
		"x\n    image: x\n"
	_, err := decodeStrictly([]byte(pod))
	require.NoError(t, err)
	for _, wrong := range []string{"    imagepullPolicy: Never\n",
		"    readonlyRootFilesystem: true\n", "    image: y\n"} {
		_, err := decodeStrictly([]byte(pod + wrong))
		require.Error(t, err, wrong)
	}
}

// containersOf returns all containers of a pod.
func containersOf(pod *corev1.PodTemplateSpec) []corev1.Container {
	return slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers)
}

// diskContainer returns the container that serves the disk.
func diskContainer(t *testing.T, pod *corev1.PodTemplateSpec) *corev1.Container {
	t.Helper()
	for _, c := range containersOf(pod) {
		if c.Name == "disk" {
			return &c
		}
	}
	t.Fatal("no container is named disk")
	return nil
}

// TestKubernetesExamples checks the examples like a cluster's API server and admission: strict
// types, the restricted pod security standard, and that every reference has a target.
func TestKubernetesExamples(t *testing.T) {
	all := readKubernetesExamples(t)
	require.ElementsMatch(t, []string{"vm-env", "vm-files", "my-fedora-disk", "upload"},
		keys(all.pods))
	for name, pod := range all.pods {
		t.Run(name, func(t *testing.T) {
			require.Empty(t, restrictedViolations(&pod.Spec))
			require.Empty(t, brokenReferences(pod, all))
			c := diskContainer(t, pod)
			require.True(t, *c.SecurityContext.ReadOnlyRootFilesystem)
			for probe, want := range map[*corev1.Probe]string{c.StartupProbe: "/readyz",
				c.ReadinessProbe: "/readyz", c.LivenessProbe: "/healthz"} {
				require.NotNil(t, probe)
				require.Equal(t, want, probe.HTTPGet.Path)
			}
			for _, c := range containersOf(pod) {
				require.NotEmpty(t, c.Resources.Requests, c.Name)
				require.NotEmpty(t, c.Resources.Limits, c.Name)
			}
			// The daemon takes up to 10 seconds to drain.
			require.Greater(t, *pod.Spec.TerminationGracePeriodSeconds, int64(10))
			port := pod.Annotations["prometheus.io/port"]
			require.True(t, slices.ContainsFunc(c.Ports,
				func(p corev1.ContainerPort) bool { return fmt.Sprint(p.ContainerPort) == port }),
				port)
		})
	}
	for name, d := range all.deployed {
		require.Equal(t, d.Spec.Selector.MatchLabels, d.Spec.Template.Labels)
		require.EqualValues(t, 1, *d.Spec.Replicas,
			"two replicas would be two disks behind one name: %s",
			name)
		require.Equal(t, appsv1.RecreateDeploymentStrategyType, d.Spec.Strategy.Type)
	}
	for _, s := range all.services {
		require.Equal(t, all.pods[s.Name].Labels, s.Spec.Selector)
		for _, p := range s.Spec.Ports {
			require.Contains(t, portNames(all.pods[s.Name]), p.TargetPort.String())
		}
	}
	for _, p := range all.policies {
		require.Equal(t, all.pods[p.Name].Labels, p.Spec.PodSelector.MatchLabels)
		for _, rule := range p.Spec.Ingress {
			require.NotEmpty(t, rule.From)
			for _, port := range rule.Ports {
				require.Contains(t, portNames(all.pods[p.Name]), port.Port.String())
			}
		}
	}
	for _, s := range all.secrets {
		require.EqualValues(t, "kubernetes.io/iscsi-chap", s.Type)
	}
}

// TestInitiatorNames: each machine of an example has an initiator name of its own. A disk takes two
// machines with one name for one, and lets both write.
func TestInitiatorNames(t *testing.T) {
	found := 0
	require.NoError(t, filepath.WalkDir("../../../examples/kubernetes", func(path string,
		_ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" {
			return err
		}
		text, err := os.ReadFile(path)
		for _, name := range initiatorName.FindAllStringSubmatch(string(text), -1) {
			found++
			require.Regexp(t, `[.:]\$\(POD_UID\)$`, name[1], path)
			require.Regexp(t, `- name: POD_UID\n +valueFrom:\n +fieldRef:\n `+
				`+fieldPath: metadata.uid\n`, string(text), path)
		}
		return err
	}))
	require.GreaterOrEqual(t, found, 5)
}

var initiatorName = regexp.MustCompile(`initiator-name=([^,\s]*)`)

func keys[V any](m map[string]V) (names []string) {
	for name := range m {
		names = append(names, name)
	}
	return names
}

func portNames(pod *corev1.PodTemplateSpec) (names []string) {
	for _, c := range containersOf(pod) {
		for _, p := range c.Ports {
			names = append(names, p.Name)
		}
	}
	return names
}

// restrictedViolations lists the violations of the restricted pod security standard (policy
// "restricted" of Kubernetes 1.25 and later).
func restrictedViolations(pod *corev1.PodSpec) (found []string) {
	bad := func(format string, args ...any) { found = append(found, fmt.Sprintf(format, args...)) }
	if pod.HostNetwork || pod.HostPID || pod.HostIPC {
		bad("a namespace of the host")
	}
	shared := pod.SecurityContext
	if shared == nil {
		shared = &corev1.PodSecurityContext{}
	}
	for _, v := range pod.Volumes {
		s := v.VolumeSource
		if s.ConfigMap == nil && s.CSI == nil && s.DownwardAPI == nil && s.EmptyDir == nil &&
			s.Ephemeral == nil && s.PersistentVolumeClaim == nil &&
			s.Projected == nil && s.Secret == nil {
			bad("volume %s has a kind that is not allowed", v.Name)
		}
	}
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		own := c.SecurityContext
		if own == nil {
			own = &corev1.SecurityContext{}
		}
		if own.Privileged != nil && *own.Privileged {
			bad("%s: privileged", c.Name)
		}
		if own.AllowPrivilegeEscalation == nil || *own.AllowPrivilegeEscalation {
			bad("%s: privilege escalation", c.Name)
		}
		if own.Capabilities == nil || !slices.Contains(own.Capabilities.Drop, "ALL") {
			bad("%s: capabilities are not dropped", c.Name)
		} else if slices.ContainsFunc(own.Capabilities.Add,
			func(c corev1.Capability) bool { return c != "NET_BIND_SERVICE" }) {
			bad("%s: capabilities are added", c.Name)
		}
		nonRoot := shared.RunAsNonRoot
		if own.RunAsNonRoot != nil {
			nonRoot = own.RunAsNonRoot
		}
		if nonRoot == nil || !*nonRoot {
			bad("%s: may run as root", c.Name)
		}
		for _, user := range []*int64{shared.RunAsUser, own.RunAsUser} {
			if user != nil && *user == 0 {
				bad("%s: runs as root", c.Name)
			}
		}
		seccomp := shared.SeccompProfile
		if own.SeccompProfile != nil {
			seccomp = own.SeccompProfile
		}
		if seccomp == nil || seccomp.Type != corev1.SeccompProfileTypeRuntimeDefault &&
			seccomp.Type != corev1.SeccompProfileTypeLocalhost {
			bad("%s: no seccomp profile", c.Name)
		}
		if own.ProcMount != nil && *own.ProcMount != corev1.DefaultProcMount {
			bad("%s: proc mount", c.Name)
		}
		for _, p := range c.Ports {
			if p.HostPort != 0 {
				bad("%s: host port", c.Name)
			}
		}
	}
	return found
}

func TestRestrictedRulesBite(t *testing.T) {
	no := false
	pod := corev1.PodSpec{
		HostNetwork:     true,
		SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: &no},
		Volumes: []corev1.Volume{
			{Name: "v", VolumeSource: corev1.VolumeSource{
				HostPath: &corev1.HostPathVolumeSource{Path: "/"}}}},
		Containers: []corev1.Container{
			{Name: "c", Ports: []corev1.ContainerPort{{HostPort: 1}}}},
	}
	require.Equal(t, []string{"a namespace of the host",
		"volume v has a kind that is not allowed", "c: privilege escalation",
		"c: capabilities are not dropped", "c: may run as root", "c: no seccomp profile",
		"c: host port"}, restrictedViolations(&pod))
}

// brokenReferences lists the volumes, claims, secrets, keys and ports that a pod refers to but that
// do not exist.
func brokenReferences(pod *corev1.PodTemplateSpec, all kubernetesExamples) (found []string) {
	bad := func(format string, args ...any) { found = append(found, fmt.Sprintf(format, args...)) }
	volumes, used := map[string]bool{}, map[string]bool{}
	for _, v := range pod.Spec.Volumes {
		volumes[v.Name] = true
		if v.Secret != nil && all.secrets[v.Secret.SecretName] == nil {
			bad("volume %s: no secret %s", v.Name, v.Secret.SecretName)
		}
		if c := v.PersistentVolumeClaim; c != nil && all.claims[c.ClaimName] == nil {
			bad("volume %s: no claim %s", v.Name, c.ClaimName)
		}
	}
	for _, c := range containersOf(pod) {
		for _, m := range c.VolumeMounts {
			used[m.Name] = true
			if !volumes[m.Name] {
				bad("%s: no volume %s", c.Name, m.Name)
			}
		}
		for _, from := range c.EnvFrom {
			if from.SecretRef == nil || all.secrets[from.SecretRef.Name] == nil {
				bad("%s: envFrom without its secret", c.Name)
			}
		}
		for _, e := range c.Env {
			if e.ValueFrom == nil || e.ValueFrom.FieldRef != nil {
				continue
			}
			if s := all.secrets[e.ValueFrom.SecretKeyRef.Name]; s == nil ||
				s.StringData[e.ValueFrom.SecretKeyRef.Key] == "" {
				bad("%s: %s has no such key of a secret", c.Name, e.Name)
			}
		}
		for _, p := range []*corev1.Probe{c.StartupProbe, c.ReadinessProbe, c.LivenessProbe} {
			if p != nil && !slices.ContainsFunc(c.Ports,
				func(port corev1.ContainerPort) bool {
					return port.Name ==
						p.HTTPGet.Port.String()
				}) {
				bad("%s: a probe asks port %s", c.Name, p.HTTPGet.Port.String())
			}
		}
	}
	for name := range volumes {
		if !used[name] {
			bad("nobody mounts volume %s", name)
		}
	}
	return found
}
