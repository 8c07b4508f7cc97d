package kubernetes

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/kubernetes/plane"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
)

// signaturePolicies are those objects of the chart that only a chart with policies of signatures
// has, for the account and the namespaces of the manifest.
func signaturePolicies(t *testing.T) string {
	t.Helper()
	root, err := plane.Root()
	require.NoError(t, err)
	text, err := os.ReadFile(filepath.Join(root,
		"integration/kubernetes/admission/testdata/policy.yaml"))
	require.NoError(t, err)
	var all []string
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		if strings.Contains(document, "templates/signatures.yaml\n") &&
			!strings.Contains(document, "kind: ConfigMap\n") {
			all = append(all, document)
		}
	}
	require.Len(t, all, 4)
	return strings.ReplaceAll(strings.Join(all, "\n---\n"), "chart-system", systemNamespace) + `
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: signatures-test}
rules: [{apiGroups: [""], resources: [namespaces], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: signatures-test}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: signatures-test}
subjects: [{kind: ServiceAccount, name: ` + account + `, namespace: ` + systemNamespace + `}]
`
}

// plainPod makes a pod that asks for a disk of VMIdentitySet `set`, with nothing that admission
// adds.
func (w *world) plainPod(name string) {
	w.t.Helper()
	pod := gatedPod(w.ns, name, "set", name)
	pod.Labels, pod.Spec.InitContainers, pod.Spec.Volumes = nil, nil, nil
	pod.Spec.SchedulingGates, pod.Spec.Containers[0].VolumeMounts = nil, nil
	var err error
	testtool.Within(w.t, patience, func() bool {
		err = w.p.Client.Create(w.t.Context(), pod.DeepCopy())
		return err == nil
	}, "pod %s is made: %v", name, func() any { return err })
}

// TestSignatures: a pod waits until its image is signed, by the policy that the label of its
// namespace names. Whoever may edit the namespace can neither remove the gate, nor write what was
// verified, nor change the label.
func TestSignatures(t *testing.T) {
	p := plane.Get(t)
	install(t, p)
	objects, err := plane.Decode(strings.NewReader(signaturePolicies(t)))
	require.NoError(t, err)
	require.NoError(t, p.Apply(t.Context(), "", objects...))
	t.Cleanup(func() {
		for _, o := range objects {
			_, _ = p.TryKubectl(nil, "delete", o.GetKind(), o.GetName(), "--wait=false")
		}
	})
	registry := registrytest.NewLying(t)
	var mu sync.Mutex // held while the registry answers, and while it changes
	server := httptest.NewServer(http.HandlerFunc(func(res http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		registry.Handle(res, r)
	}))
	t.Cleanup(server.Close)
	host := server.Listener.Addr().String()
	registry.NewImage(t, []byte("a disk"))
	digest := registry.Tags["1"].Digest.String()
	key, file := registrytest.NewSigner(t)
	dir := t.TempDir()
	for name, text := range map[string]string{"default": "default: allow",
		"strict": "images: [{prefix: " + host + "/vm, keys: [" + file + "]}]"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(text), 0o600))
	}
	w := &world{t: t, p: p, ns: p.Namespace(t)}
	p.Kubectl(t, "label", "ns", w.ns, "disk.kubevirt.io/signature-policy=strict")
	w.c = runController(t, controllerBinary(t), p.ServiceAccount(t, systemNamespace, account),
		"--leader-elect=false", "--namespace="+w.ns, "--signature-policies="+dir,
		"--insecure-registry="+host, "--follow-registry="+host+"/vm")
	w.c.ready()
	w.apply(strings.Replace(set("set", ""), testImage, host+"/vm/a@"+digest, 1))
	w.plainPod("a")
	w.reasons("a", "NotSigned")
	verified := `jsonpath={.status.conditions[?(@.type=="Verified")].message}`
	w.until("has no signature (asked for: sha256:", "get", "vmid", "a", "-o", verified)
	w.until("NotSigned", "get", "events")

	as := []string{"-n", w.ns, "--as=tenant", "--as-group=system:authenticated"}
	p.Kubectl(t, "-n", w.ns, "create", "rolebinding", "tenant", "--clusterrole=admin",
		"--user=tenant")
	for what, args := range map[string][]string{
		"only the controller of kubevirt-disk removes": {"patch", "pod", "a", "--type=json", "-p",
			`[{"op": "remove", "path": "/spec/schedulingGates"}]`},
		`resource "vmidentities/status" in`: {"patch", "vmid", "a",
			"--subresource=status", "--type=merge", "-p", `{"status": {"signedBy": {}}}`},
		`resource "namespaces" in`: {"label", "ns", w.ns, "--overwrite",
			"disk.kubevirt.io/signature-policy=default"},
		"is immutable": {"patch", "vmid", "a", "--type=merge", "-p", `{"spec": {"image": "` +
			host + `/open@` + digest + `"}}`},
	} {
		var out string
		testtool.Within(t, patience, func() bool {
			out, err = p.TryKubectl(nil, append(slices.Clone(as), args...)...)
			require.Error(t, err, out)
			return strings.Contains(out, what)
		}, "want %q, is %q", what, func() any { return out })
	}
	out, err := p.TryKubectl(nil, "-n", w.ns, "patch", "vmid", "a", "--subresource=status",
		"--type=merge", "-p", `{"status": {"signedBy": {"image": "a", "key": "b"}}}`)
	require.Error(t, err)
	require.Contains(t, out, "status.signedBy says what the controller")
	require.Empty(t, w.free())

	mu.Lock()
	registry.Sign(t, digest, key)
	mu.Unlock()
	w.kubectl("annotate", "vmid", "a", "example.com/look=again")
	w.starts("a")
	w.until("Signed", "get", "vmid", "a", "-o",
		`jsonpath={.status.conditions[?(@.type=="Verified")].reason}`)
	w.until(registrytest.Fingerprint(t, key), "get", "vmid", "a", "-o",
		"jsonpath={.status.signedBy.key}")

	// A set finds what its tag names, and that it is signed.
	w.apply(strings.Replace(set("tagged", `, "attachment": "Service", "follow": {"tag": "1"}`),
		testImage, host+"/vm/a@sha256:"+strings.Repeat("a", 64), 1))
	w.until(host+"/vm/a@"+digest, "get", "vmidset", "tagged", "-o",
		"jsonpath={.status.followed.image}")
	w.until("Followed", "get", "events")

	// Another policy, of which no event tells, and a registry that is away: that is no matter for a
	// disk whose policy asks for nothing.
	server.Close()
	p.Kubectl(t, "label", "ns", w.ns, "--overwrite", "disk.kubevirt.io/signature-policy=none")
	w.plainPod("b")
	w.until("and there is none, so no image is used", "get", "vmid", "b", "-o", verified)
	p.Kubectl(t, "label", "ns", w.ns, "--overwrite", "disk.kubevirt.io/signature-policy=strict")
	w.plainPod("c")
	w.reasons("c", "Unverified")
	require.Equal(t, map[string]bool{"a": true}, w.free())
	p.Kubectl(t, "label", "ns", w.ns, "disk.kubevirt.io/signature-policy-")
	w.plainPod("d")
	w.starts("d")
	require.NotContains(t, w.c.logs(), "forbidden")
}
