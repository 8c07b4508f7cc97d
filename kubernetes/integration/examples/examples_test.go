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
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/yaml"

	"kubevirt.io/disk/internal/testtool"
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
	files := testtool.Must(filepath.Glob("../../../examples/kubernetes/*.yaml"))(t)
	require.NotEmpty(t, files)
	for _, file := range files {
		objects := testtool.Must(decodeStrictly(testtool.Must(os.ReadFile(file))(t)))(t, file)
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

// TestKubernetesExamples: every reference of the examples has a target. An API server looks at the
// rest: TestManifestsOfPages.
func TestKubernetesExamples(t *testing.T) {
	all := readKubernetesExamples(t)
	require.ElementsMatch(t, []string{"vm-env", "vm-files", "my-fedora-disk", "upload"},
		keys(all.pods))
	for name, pod := range all.pods {
		t.Run(name, func(t *testing.T) {
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
			"two replicas would be two disks behind one name: %s", name)
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

// brokenReferences lists the claims, secrets, keys and ports that a pod refers to but that do not
// exist, and the volumes that it does not use.
func brokenReferences(pod *corev1.PodTemplateSpec, all kubernetesExamples) (found []string) {
	bad := func(format string, args ...any) { found = append(found, fmt.Sprintf(format, args...)) }
	used := map[string]bool{}
	for _, c := range containersOf(pod) {
		for _, m := range c.VolumeMounts {
			used[m.Name] = true
		}
	}
	for _, v := range pod.Spec.Volumes {
		if !used[v.Name] {
			bad("nobody mounts volume %s", v.Name)
		}
		if v.Secret != nil && all.secrets[v.Secret.SecretName] == nil {
			bad("volume %s: no secret %s", v.Name, v.Secret.SecretName)
		}
		if c := v.PersistentVolumeClaim; c != nil && all.claims[c.ClaimName] == nil {
			bad("volume %s: no claim %s", v.Name, c.ClaimName)
		}
	}
	for _, c := range containersOf(pod) {
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
			if p != nil && !slices.ContainsFunc(c.Ports, func(port corev1.ContainerPort) bool {
				return port.Name == p.HTTPGet.Port.String()
			}) {
				bad("%s: a probe asks port %s", c.Name, p.HTTPGet.Port.String())
			}
		}
	}
	return found
}
