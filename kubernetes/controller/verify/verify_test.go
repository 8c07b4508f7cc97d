package verify

import (
	"crypto"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/signature"
	"kubevirt.io/disk/registry/transport"
)

// scene is a registry with an image, a key, and an identity `vm` with that image in a namespace.
type scene struct {
	*controllertest.World
	t        *testing.T
	registry *registrytest.Lying
	digest   string
	key      crypto.Signer
	dir      string // of policies
	r        *Reconciler
	server   *httptest.Server                 // in front of the registry
	instead  atomic.Pointer[http.HandlerFunc] // answers in place of the registry
}

// newScene has a default policy that asks for the key.
func newScene(t *testing.T) *scene {
	t.Helper()
	s := &scene{t: t, registry: registrytest.NewLying(t), dir: t.TempDir()}
	s.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if other := s.instead.Load(); other != nil {
			(*other)(w, r)
			return
		}
		s.registry.Handle(w, r)
	}))
	t.Cleanup(s.server.Close)
	s.registry.NewImage(t, []byte("a disk"))
	s.digest = s.registry.Tags["1"].Digest.String()
	var file string
	s.key, file = registrytest.NewSigner(t)
	s.policy(defaultPolicy, "images: [{prefix: "+s.host()+"/vm, keys: ["+file+"]}]")
	s.World = controllertest.New(t, nil,
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: controllertest.Namespace}})
	s.Allow(t, controllertest.Settings{Signatures: true})
	s.identity(s.image())
	s.r = &Reconciler{objects.Kit{Client: s.Client, Events: s.World}, &Verifier{Live: s.Live,
		Options: Options{Policies: s.dir, Registry: transport.Options{
			Insecure: []string{s.host()}, Timeout: time.Second, Idle: time.Second}}}}
	require.NoError(t, s.r.Verifier.Options.Check())
	return s
}

func (s *scene) host() string { return s.server.Listener.Addr().String() }

func (s *scene) image() string { return s.host() + "/vm/a@" + s.digest }

// policy writes a policy, as the kubelet does with a ConfigMap.
func (s *scene) policy(name, text string) {
	s.t.Helper()
	require.NoError(s.t, os.WriteFile(filepath.Join(s.dir, name+".yaml"), []byte(text), 0o600))
}

func (s *scene) identity(image string) {
	s.t.Helper()
	id := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{
		Namespace: controllertest.Namespace, Name: "vm"}}
	_ = s.Base.Delete(s.t.Context(), id.DeepCopy()) // there may be none yet
	id.Spec.Image = image
	s.Make(s.t, id)
}

func (s *scene) get() *v1alpha1.VMIdentity {
	s.t.Helper()
	return controllertest.Get(s.t, s.Base, controllertest.Namespace, "vm", &v1alpha1.VMIdentity{})
}

func (s *scene) label(value string) {
	s.t.Helper()
	ns := &corev1.Namespace{}
	require.NoError(s.t, s.Base.Get(s.t.Context(),
		client.ObjectKey{Name: controllertest.Namespace}, ns))
	ns.Labels = map[string]string{v1alpha1.LabelSignaturePolicy: value}
	require.NoError(s.t, s.Base.Update(s.t.Context(), ns))
}

func (s *scene) reconcile() time.Duration {
	s.t.Helper()
	return testtool.Must(controllertest.Once(s.t, s.r, "vm"))(s.t).RequeueAfter
}

func (s *scene) held() (reason, message string) {
	s.t.Helper()
	reason, message = testtool.Must2(s.r.Verifier.Refuse(s.t.Context(), s.get()))(s.t)
	return reason, message
}

// require reconciles, and compares the reason why the image is held ("": it may be used), and a
// part of what people are told.
func (s *scene) require(reason, says string) {
	s.t.Helper()
	s.reconcile()
	held, message := s.held()
	require.Equal(s.t, reason, held, message)
	require.Contains(s.t, message, says)
	c := meta.FindStatusCondition(s.get().Status.Conditions, v1alpha1.ConditionVerified)
	if c != nil {
		require.Equal(s.t, held == "", c.Status == metav1.ConditionTrue, c.Message)
	}
	require.False(s.t, held != "" && c == nil, "nobody is told")
}

// TestSigned: an image may be used when its signature was found, and then the registry is needed no
// more. The status and an event tell about it.
func TestSigned(t *testing.T) {
	s := newScene(t)
	reason, _ := s.held()
	require.Equal(t, "Verifying", reason, "before anybody has looked")
	s.require("NotSigned", "has no signature (asked for: sha256:")
	require.Equal(t, []string{"Warning NotSigned"}, s.Events())
	s.registry.Sign(t, s.digest, s.key)
	s.require("", "")
	print := registrytest.Fingerprint(t, s.key)
	require.Equal(t, &v1alpha1.SignedBy{Image: s.image(), Key: print}, s.get().Status.SignedBy)
	require.Contains(t, meta.FindStatusCondition(s.get().Status.Conditions,
		v1alpha1.ConditionVerified).Message, print)
	asked, writes := s.registry.Requests(""), s.Writes()
	s.server.Close()
	s.require("", "")
	require.Equal(t, asked, s.registry.Requests(""))
	require.Equal(t, writes, s.Writes(), "nothing is written while nothing changes")
}

// TestPolicyChanges: the policy of the moment counts, also for an image that was verified.
func TestPolicyChanges(t *testing.T) {
	s := newScene(t)
	s.registry.Sign(t, s.digest, s.key)
	s.require("", "")
	_, other := registrytest.NewSigner(t)
	s.policy(defaultPolicy, "images: [{prefix: "+s.host()+", keys: ["+other+"]}]")
	reason, _ := s.held()
	require.Equal(t, "Verifying", reason, "at once, before anybody has looked again")
	s.require("NotSigned", "is by another key")
	s.policy(defaultPolicy, "default: deny")
	s.require("NotSigned", "has no rule in the policy")
	s.policy(defaultPolicy, "default: allow")
	s.require("", "")
	require.Nil(t, meta.FindStatusCondition(s.get().Status.Conditions, v1alpha1.ConditionVerified))
	s.policy(defaultPolicy, "default: perhaps")
	s.require("NotSigned", "cannot be read")
	require.NoError(t, os.Remove(filepath.Join(s.dir, defaultPolicy+".yaml")))
	s.require("NotSigned", "does not exist, so no image is used")
	s.r.Verifier.Options.Policies = "" // without any, nothing is left of them
	s.require("", "")
	require.Nil(t, meta.FindStatusCondition(s.get().Status.Conditions, v1alpha1.ConditionVerified))
}

// TestLabel: the label of the namespace chooses the policy, and one that does not exist admits
// nothing.
func TestLabel(t *testing.T) {
	s := newScene(t)
	s.require("NotSigned", "")
	s.policy("open", "default: allow")
	s.label("open")
	s.require("", "")
	for _, name := range []string{"none", "", "..", "Open"} {
		s.label(name)
		s.require("NotSigned", "does not exist, so no image is used")
	}
}

// TestWhoIsNotAsked: no request goes to a registry for which the policy names no keys, and no
// policy is passed by a reference that is none of a registry.
func TestWhoIsNotAsked(t *testing.T) {
	s := newScene(t)
	digest := "@sha256:" + strings.Repeat("a", 64)
	for image, says := range map[string]string{
		s.host() + "/other/a" + digest:     "has no rule in the policy",
		s.host() + "/vmx" + digest:         "has no rule in the policy",
		"oci:" + s.dir + digest:            "cannot be verified: name one in a registry",
		"docker-archive:" + s.dir + digest: "cannot be verified: name one in a registry",
		s.host() + "/vm/a:1":               "has no digest",
		s.host() + "/vm/a:1@sha256:aaaa":   "cannot be verified",
		"":                                 "",
	} {
		s.identity(image)
		reason, message := s.held()
		require.Equal(t, says != "", reason == "NotSigned", image)
		require.Contains(t, message, says, image)
		s.reconcile()
	}
	require.Zero(t, s.registry.Requests(""))
}

// TestRegistryIsAway: a registry that does not answer, or answers wrongly, is no reason to use an
// image, and it is asked again.
func TestRegistryIsAway(t *testing.T) {
	for what, handle := range map[string]http.HandlerFunc{
		"down":      nil,
		"an error":  func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) },
		"forbidden": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(403) },
		"another image": func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprint(w, `{"schemaVersion": 2, "layers": []}`)
		},
		"a huge manifest": func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/v2/" {
				for p := make([]byte, 1<<20); ; {
					if _, err := w.Write(p); err != nil {
						return
					}
				}
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			s := newScene(t)
			s.registry.Sign(t, s.digest, s.key)
			if handle == nil {
				handle = func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }
			}
			s.instead.Store(&handle)
			s.require("Unverified", "its image is not used before its signature was verified")
			require.LessOrEqual(t, s.reconcile(), late)
			require.Nil(t, s.get().Status.SignedBy)
			message := meta.FindStatusCondition(s.get().Status.Conditions,
				v1alpha1.ConditionVerified).Message
			require.Less(t, len(message), 2*maxText)
			s.instead.Store(nil)
			s.require("", "")
		})
	}
}

// TestForgedStatus: a status that is about another image, or that names another key, counts for
// nothing.
func TestForgedStatus(t *testing.T) {
	s := newScene(t)
	id := s.get()
	for _, by := range []v1alpha1.SignedBy{
		{Image: "registry.example.com/b" + s.digest, Key: registrytest.Fingerprint(t, s.key)},
		{Image: id.Spec.Image, Key: "sha256:" + strings.Repeat("0", 64)}, {},
	} {
		id.Status.SignedBy = &by
		reason, _ := testtool.Must2(s.r.Verifier.Refuse(t.Context(), id))(t)
		require.Equal(t, "Verifying", reason)
	}
}

func TestCheck(t *testing.T) {
	require.NoError(t, Options{}.Check())
	dir := t.TempDir()
	require.ErrorContains(t, Options{Policies: dir}.Check(), "signature-policies: ")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "default.yaml"), []byte("x: y"), 0o600))
	require.ErrorContains(t, Options{Policies: dir}.Check(), "default.yaml")
}

// TestKeys: whoever fetches an image in a namespace is told the keys of the namespace's policy.
func TestKeys(t *testing.T) {
	s := newScene(t)
	keys := func(image, reason, says string) []signature.Key {
		t.Helper()
		keys, why, message, err := s.r.Verifier.Keys(t.Context(), controllertest.Namespace, image)
		require.NoError(t, err)
		require.Equal(t, reason, why, message)
		require.Contains(t, message, says)
		return keys
	}
	host, _, _ := strings.Cut(s.image(), "/")
	tag := host + "/vm/a:1"
	require.Len(t, keys(tag, "", ""), 1)
	require.Empty(t, keys(host+"/other/a:1", "NotSigned", ""))
	require.Empty(t, keys("https://example.com/a.qcow2", "NotSigned", ""))
	require.Empty(t, keys("no image: @", "Invalid", ""))
	s.label("gone")
	require.Empty(t, keys(tag, "NotSigned", `the signature policy "gone" of the namespace does not exist`))
}
