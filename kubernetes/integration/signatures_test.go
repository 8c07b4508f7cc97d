package kubernetes

import (
	"crypto"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/integration/plane"
	"kubevirt.io/disk/registry/registrytest"
)

// signaturePolicies are those objects of the chart that only a chart with policies of signatures
// has, for the account and the namespaces of the manifest.
func signaturePolicies(t *testing.T) string {
	t.Helper()
	text := controllertest.Chart(t, systemNamespace,
		"signatures: {policies: {default: {default: allow}}}")
	var all []string
	for document := range strings.SplitSeq(text, "\n---\n") {
		if strings.Contains(document, "templates/signatures.yaml\n") &&
			!strings.Contains(document, "kind: ConfigMap\n") {
			all = append(all, document)
		}
	}
	require.Len(t, all, 4)
	return strings.Join(all, "\n---\n") + `
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
	require.NoError(w.t, w.p.Client.Create(w.t.Context(), pod))
}

// signedWorld is a world with a registry, and with a policy that wants the images of its namespace
// signed. The limits of the chart for such policies are there, too.
type signedWorld struct {
	*world
	server   *httptest.Server
	host     string // of the registry
	key      crypto.Signer
	registry *registrytest.Lying // guarded by mu
	flags    []string

	mu sync.Mutex // held while the registry answers
}

func newSignedWorld(t *testing.T) *signedWorld {
	t.Helper()
	p := plane.Get(t)
	install(t, p)
	objects := testtool.Must(plane.Decode(strings.NewReader(signaturePolicies(t))))(t)
	require.NoError(t, p.Apply(t.Context(), "", objects...))
	t.Cleanup(func() {
		for _, o := range objects {
			_, _ = p.TryKubectl(nil, "delete", o.GetKind(), o.GetName(), "--wait=false")
		}
	})
	w := &signedWorld{world: &world{t: t, p: p, ns: p.Namespace(t)},
		registry: registrytest.NewLying(t)}
	w.server = httptest.NewServer(http.HandlerFunc(func(res http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.registry.Handle(res, r)
	}))
	t.Cleanup(w.server.Close)
	w.host = w.server.Listener.Addr().String()
	key, file := registrytest.NewSigner(t)
	w.key = key
	dir := t.TempDir()
	for name, text := range map[string]string{"default": "default: allow",
		"strict": "images: [{prefix: " + w.host + "/vm, keys: [" + file + "]}]"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(text), 0o600))
	}
	p.Kubectl(t, "label", "ns", w.ns, "disk.kubevirt.io/signature-policy=strict")
	w.flags = []string{"--leader-elect=false", "--namespace=" + w.ns,
		"--signature-policies=" + dir, "--insecure-registry=" + w.host,
		"--follow-registry=" + w.host + "/vm"}
	w.start()
	return w
}

// start starts a controller.
func (w *signedWorld) start() {
	w.t.Helper()
	w.c = runController(w.t, controllerBinary(w.t),
		w.p.ServiceAccount(w.t, systemNamespace, account), w.flags...)
	w.c.ready()
}

// image lets tag 1 of the registry name an image that these keys have signed.
func (w *signedWorld) image(content string, keys ...crypto.Signer) (digest string) {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.registry.NewImage(w.t, []byte(content))
	digest = w.registry.Tags["1"].Digest.String()
	if len(keys) > 0 {
		w.registry.Sign(w.t, digest, keys...)
	}
	return digest
}

// user lets somebody have a role of Kubernetes in the namespace.
func (w *world) user(name, role string) {
	w.t.Helper()
	w.p.Kubectl(w.t, "-n", w.ns, "create", "rolebinding", name, "--clusterrole="+role,
		"--user="+name)
}

// as runs kubectl in the namespace as a user.
func (w *world) as(user string, args ...string) (string, error) {
	return w.p.TryKubectl(nil, append([]string{"-n", w.ns, "--as=" + user,
		"--as-group=system:authenticated"}, args...)...)
}

// refuses waits until the API server refuses something to a user for a reason. Roles and policies
// take effect a moment after they were made, so what is tried meanwhile must not change anything.
func (w *world) refuses(reason, user string, args ...string) {
	w.t.Helper()
	var out string
	testtool.Within(w.t, timeout, func() bool {
		var err error
		out, err = w.as(user, append(args, "--dry-run=server")...)
		return err != nil && strings.Contains(out, reason)
	}, "want %q, is %q", reason, func() any { return out })
	out, err := w.as(user, args...)
	require.Error(w.t, err, out)
	require.Contains(w.t, out, reason)
}

// TestSignatures: a pod waits until its image is signed, by the policy that the label of its
// namespace names. Whoever may edit the namespace can neither remove the gate, nor write what was
// verified, nor change the label.
func TestSignatures(t *testing.T) {
	w := newSignedWorld(t)
	p, host, digest := w.p, w.host, w.image("a disk")
	w.apply(strings.Replace(set("set", ""), testImage, host+"/vm/a@"+digest, 1))
	w.plainPod("a")
	w.reasons("a", "NotSigned")
	verified := `jsonpath={.status.conditions[?(@.type=="Verified")].message}`
	w.until("has no signature (asked for: sha256:", "get", "vmid", "a", "-o", verified)
	w.until("NotSigned", "get", "events")

	w.user("tenant", "admin")
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
		w.refuses(what, "tenant", args...)
	}
	w.user("owner", "cluster-admin")
	w.refuses("status.signedBy says what the controller", "owner", "patch", "vmid", "a",
		"--subresource=status", "--type=merge", "-p",
		`{"status": {"signedBy": {"image": "a", "key": "b"}}}`)
	require.Empty(t, w.free())

	require.Equal(t, digest, w.image("a disk", w.key))
	w.kubectl("annotate", "vmid", "a", "example.com/look=again")
	w.starts("a")
	w.until("Signed", "get", "vmid", "a", "-o",
		`jsonpath={.status.conditions[?(@.type=="Verified")].reason}`)
	w.until(registrytest.Fingerprint(t, w.key), "get", "vmid", "a", "-o",
		"jsonpath={.status.signedBy.key}")

	// A set finds what its tag names, and that it is signed.
	w.apply(strings.Replace(set("tagged", `, "attachment": "Service", "follow": {"tag": "1"}`),
		testImage, host+"/vm/a@sha256:"+strings.Repeat("a", 64), 1))
	w.until(host+"/vm/a@"+digest, "get", "vmidset", "tagged", "-o",
		"jsonpath={.status.followed.image}")
	w.until("Followed", "get", "events")

	// Another policy, of which no event tells, and a registry that is away: that is no matter for a
	// disk whose policy asks for nothing.
	w.server.Close()
	p.Kubectl(t, "label", "ns", w.ns, "--overwrite", "disk.kubevirt.io/signature-policy=none")
	w.plainPod("b")
	w.until("does not exist, so no image is used", "get", "vmid", "b", "-o", verified)
	p.Kubectl(t, "label", "ns", w.ns, "--overwrite", "disk.kubevirt.io/signature-policy=strict")
	w.plainPod("c")
	w.reasons("c", "Unverified")
	require.Equal(t, map[string]bool{"a": true}, w.free())
	p.Kubectl(t, "label", "ns", w.ns, "disk.kubevirt.io/signature-policy-")
	w.plainPod("d")
	w.starts("d")
	require.NotContains(t, w.c.logs(), "forbidden")
}
