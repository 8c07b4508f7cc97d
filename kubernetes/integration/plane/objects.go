package plane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// fieldManager owns the fields that a test applies.
const fieldManager = "test"

// Decode returns the objects of a YAML file with any number of documents.
func Decode(r io.Reader) (objects []*unstructured.Unstructured, err error) {
	for decoder := yaml.NewYAMLOrJSONDecoder(r, 4096); ; {
		u := &unstructured.Unstructured{}
		if err := decoder.Decode(u); errors.Is(err, io.EOF) {
			return objects, nil
		} else if err != nil {
			return nil, err
		}
		if len(u.Object) > 0 {
			objects = append(objects, u)
		}
	}
}

// Apply applies objects as the administrator, as `kubectl apply --server-side` does. An object
// without a namespace gets the given one if its kind has namespaces.
func (p *Plane) Apply(ctx context.Context, namespace string,
	objects ...*unstructured.Unstructured) error {
	for _, u := range objects {
		u = u.DeepCopy()
		namespaced, err := p.Client.IsObjectNamespaced(u)
		if err != nil {
			return fmt.Errorf("%s %s: %w", u.GetKind(), u.GetName(), err)
		}
		if namespaced && u.GetNamespace() == "" {
			u.SetNamespace(namespace)
		}
		if err := p.Client.Apply(ctx, client.ApplyConfigurationFromUnstructured(u),
			client.FieldOwner(fieldManager), client.ForceOwnership); err != nil {
			return fmt.Errorf("%s %s: %w", u.GetKind(), u.GetName(), err)
		}
	}
	return nil
}

// installCRDs installs the CRDs of this product and waits for their types.
func (p *Plane) installCRDs(ctx context.Context) error {
	root, err := Root()
	if err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(root, "kubernetes/chart/files/crd/*.yaml"))
	if err != nil {
		return err
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := p.InstallCRDs(ctx, bytes.NewReader(data)); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}

// InstallCRDs installs the CRDs of a YAML file and waits until the server has their types.
func (p *Plane) InstallCRDs(ctx context.Context, r io.Reader) error {
	objects, err := Decode(r)
	if err != nil {
		return err
	}
	if err := p.Apply(ctx, "", objects...); err != nil {
		return err
	}
	for _, u := range objects {
		if err := p.served(ctx, u); err != nil {
			return err
		}
	}
	return nil
}

// served waits until the server lists objects of all versions of a CRD. A CRD is established before
// the server's handler and its discovery know the type. Clients find it by discovery first.
func (p *Plane) served(ctx context.Context, crd *unstructured.Unstructured) error {
	group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
	kind, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "kind")
	versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
	for _, one := range versions {
		version, _ := one.(map[string]any)
		if version["served"] == false {
			continue
		}
		name, _ := version["name"].(string)
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(schema.GroupVersionKind{Group: group, Version: name,
			Kind: kind + "List"})
		var last error
		answers := 0 // in a row: the server may replace a new handler once more
		err := p.until("objects of "+crd.GetName()+" can be listed", func() bool {
			answers++
			if last = p.Client.List(ctx, list, client.Limit(1)); last != nil {
				answers = 0
			}
			return answers == 3
		})
		if err != nil {
			return errors.Join(err, last)
		}
	}
	return nil
}

// Namespace makes a namespace with pod security `restricted`, in which pods can be made. It is
// deleted after the test, without waiting for that. If the test failed, it logs what is in it.
func (p *Plane) Namespace(t testing.TB) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-",
		Labels: map[string]string{"pod-security.kubernetes.io/enforce": "restricted"}}}
	require.NoError(t, p.Client.Create(ctx, ns))
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(p.describe(ns.Name))
		}
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		if err := p.Client.Delete(ctx, ns); err != nil {
			t.Log(err)
		}
	})
	key := client.ObjectKey{Namespace: ns.Name, Name: "default"}
	err := p.until("the namespace has its service account", func() bool {
		return p.Client.Get(ctx, key, &corev1.ServiceAccount{}) == nil
	})
	require.NoError(t, err)
	return ns.Name
}

// describe returns the first things that a person would look at after a failure.
func (p *Plane) describe(namespace string) string {
	var b strings.Builder
	for _, args := range [][]string{
		{"get", "vmid,vmidset,vmpet,pods,pvc,jobs,deployments,statefulsets", "-o", "wide"},
		{"get", "vm", "-o", "yaml"},
		{"get", "events", "--sort-by=.lastTimestamp"},
	} {
		out, _ := p.kubectl(nil, append(args, "-n", namespace)...) // the error is in out
		fmt.Fprintf(&b, "kubectl %s:\n%s\n", strings.Join(args, " "), out)
	}
	return b.String()
}

// ServiceAccount returns the config of a pod with a service account. It makes the account if there
// is none; the caller makes the roles.
func (p *Plane) ServiceAccount(t testing.TB, namespace, name string) *rest.Config {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	account := &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	require.NoError(t, client.IgnoreAlreadyExists(p.Client.Create(ctx, account)))
	token := &authenticationv1.TokenRequest{}
	require.NoError(t, p.Client.SubResource("token").Create(ctx, account, token))
	config := rest.CopyConfig(p.Config)
	config.BearerToken = token.Status.Token
	return config
}

// Kubectl runs kubectl as the administrator, and fails the test if that fails. It returns kubectl's
// output.
func (p *Plane) Kubectl(t testing.TB, args ...string) string {
	t.Helper()
	out, err := p.kubectl(nil, args...)
	require.NoError(t, err, "kubectl %s\n%s", strings.Join(args, " "), out)
	return out
}

// TryKubectl is Kubectl with a standard input, and it may fail.
func (p *Plane) TryKubectl(stdin io.Reader, args ...string) (string, error) {
	return p.kubectl(stdin, args...)
}

func (p *Plane) kubectl(stdin io.Reader, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(p.Bin, "kubectl"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+p.path("admin.kubeconfig"), "HOME="+p.Dir)
	cmd.Stdin = stdin
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// Volume makes a volume for a claim, of a driver that is not there, until the test ends.
func (p *Plane) Volume(t testing.TB, name, namespace, claim string) {
	t.Helper()
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}}
	v.Spec.Capacity = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("100Gi")}
	v.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}
	v.Spec.ClaimRef = &corev1.ObjectReference{Namespace: namespace, Name: claim}
	v.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	v.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: "example.com", VolumeHandle: name}
	require.NoError(t, p.Client.Create(t.Context(), v))
	t.Cleanup(func() { p.Kubectl(t, "delete", "pv", name, "--wait=false") })
}

// Pod is a pod that fits into a namespace with pod security `restricted`. It has no volume with a
// token, which would be at other places in the lists. Without names of containers, it has one, vm.
func Pod(namespace, name string, annotations map[string]string, containers ...string) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Annotations: annotations},
		Spec: corev1.PodSpec{AutomountServiceAccountToken: new(false),
			SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: new(true),
				RunAsUser: new(int64(107)), SeccompProfile: &corev1.SeccompProfile{
					Type: corev1.SeccompProfileTypeRuntimeDefault}}}}
	if len(containers) == 0 {
		containers = []string{"vm"}
	}
	for _, name := range containers {
		pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{Name: name,
			Image: "registry.example.com/qemu:1", SecurityContext: &corev1.SecurityContext{
				AllowPrivilegeEscalation: new(false),
				Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}})
	}
	return pod
}
