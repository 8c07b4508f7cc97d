package follow

import (
	"crypto"
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

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/verify"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// scene is a registry with two signed images, of which the tag `stable` names the first, and a set
// that follows the tag.
type scene struct {
	*controllertest.World
	t        *testing.T
	registry *registrytest.Lying
	key      crypto.Signer
	digests  []string
	r        *Reconciler
	server   *httptest.Server                 // in front of the registry
	instead  atomic.Pointer[http.HandlerFunc] // answers in place of the registry
}

const began = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

func newScene(t *testing.T) *scene {
	t.Helper()
	s := &scene{t: t, registry: registrytest.NewLying(t)}
	s.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if other := s.instead.Load(); other != nil {
			(*other)(w, r)
			return
		}
		s.registry.Handle(w, r)
	}))
	t.Cleanup(s.server.Close)
	var file string
	s.key, file = registrytest.NewSigner(t)
	for _, content := range []string{"first", "second"} {
		s.digests = append(s.digests, s.image(content))
		s.registry.Sign(t, s.image(content), s.key)
	}
	s.names(s.digests[0])
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "default.yaml"), []byte("images: [{prefix: "+
		s.host()+", keys: [\""+file+"\"]}]"), 0o600))
	set := &v1alpha1.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Name: "set"}}
	set.Spec.Image = s.host() + "/vm/a:1@" + began
	set.Spec.Follow = &v1alpha1.FollowSpec{Tag: "stable"}
	s.World = controllertest.New(t, nil, set,
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: controllertest.Namespace}})
	s.Allow(t, controllertest.Settings{Signatures: true})
	s.r = &Reconciler{Kit: objects.Kit{Client: s.Client, Events: s.World,
		Options: objects.Options{Follow: []string{s.host() + "/vm"}}},
		Verifier: &verify.Verifier{Live: s.Live, Options: verify.Options{Policies: dir,
			Registry: transport.Options{Insecure: []string{s.host()},
				Timeout: time.Second, Idle: time.Second}}}}
	return s
}

func (s *scene) host() string { return s.server.Listener.Addr().String() }

// image stores an image, and returns its digest.
func (s *scene) image(content string) string {
	s.registry.NewImage(s.t, []byte(content))
	return s.registry.Tags["1"].Digest.String()
}

// names lets the tag name a digest.
func (s *scene) names(digest string) {
	desc := s.registry.Tags["1"]
	require.NoError(s.t, desc.Digest.UnmarshalText([]byte(digest)))
	s.registry.Tags["stable"] = desc
}

func (s *scene) set() *v1alpha1.VMIdentitySet {
	s.t.Helper()
	return controllertest.Get(s.t, s.Base, controllertest.Namespace, "set",
		&v1alpha1.VMIdentitySet{})
}

// look reconciles, and compares the reason, a part of the message, and the digest for new disks.
func (s *scene) look(reason, says, digest string) time.Duration {
	s.t.Helper()
	result := testtool.Must(controllertest.Once(s.t, s.r, "set"))(s.t)
	c := meta.FindStatusCondition(s.set().Status.Conditions, v1alpha1.ConditionFollowed)
	require.NotNil(s.t, c)
	require.Equal(s.t, reason, c.Reason, c.Message)
	require.Contains(s.t, c.Message, says)
	require.Equal(s.t, reason == "Followed" || reason == "WentBack",
		c.Status == metav1.ConditionTrue)
	require.Equal(s.t, digest, v1alpha1.DigestOf(s.set().NewImage()))
	return result.RequeueAfter
}

// TestFollow: new disks begin from what the tag names. Each change has an event, and a tag that
// goes back is reported until it moves again.
func TestFollow(t *testing.T) {
	s := newScene(t)
	first, second := s.digests[0], s.digests[1]
	require.Equal(t, began, v1alpha1.DigestOf(s.set().NewImage()))
	require.Equal(t, time.Hour, s.look("Followed", "names "+first, first))
	require.Equal(t, s.host()+"/vm/a@"+first, s.set().NewImage())
	s.names(second)
	s.look("Followed", "names "+second+" now, and before it was "+first, second)
	require.Equal(t, []string{first}, s.set().Status.Followed.Earlier)
	writes := s.Writes()
	s.look("Followed", "and before it was "+first, second)
	require.Equal(t, writes, s.Writes(), "nothing is written while nothing changes")
	s.names(first)
	s.look("WentBack", "went back to "+first+", and before it was "+second, first)
	s.look("WentBack", "went back to", first)
	s.names(second)
	s.look("WentBack", "", second)
	require.Equal(t, []string{"Normal Followed", "Normal Followed", "Warning WentBack",
		"Warning WentBack"}, s.Events())

	// Another tag begins anew, and without one, it is as it was.
	set := s.set()
	set.Spec.Follow.Tag = "other"
	require.NoError(t, s.Base.Update(t.Context(), set))
	require.Equal(t, began, v1alpha1.DigestOf(s.set().NewImage()), "before anybody has looked")
	s.look("TagMissing", "there is no such tag; new disks begin from "+began, began)
	set = s.set()
	set.Spec.Follow = nil
	require.NoError(t, s.Base.Update(t.Context(), set))
	require.NoError(t, testtool.Err(controllertest.Once(t, s.r, "set")))
	require.Nil(t, s.set().Status.Followed)
	require.Nil(t, meta.FindStatusCondition(s.set().Status.Conditions, v1alpha1.ConditionFollowed))
}

// TestWithoutPolicies: where no signature is asked for, none is needed.
func TestWithoutPolicies(t *testing.T) {
	s := newScene(t)
	s.r.Verifier.Options.Policies = ""
	third := s.image("third")
	s.names(third)
	s.look("Followed", "", third)
}

// TestWentBackToTheBeginning: the image with which the set was made is an earlier one, too.
func TestWentBackToTheBeginning(t *testing.T) {
	s := newScene(t)
	set := s.set()
	set.Spec.Image = s.host() + "/vm/a@" + s.digests[1]
	require.NoError(t, s.Base.Update(t.Context(), set))
	s.look("Followed", "", s.digests[0])
	s.names(s.digests[1])
	s.look("WentBack", "", s.digests[1])
}

// TestNothingIsTaken: whatever a registry does, new disks begin from the last image that was
// admitted.
func TestNothingIsTaken(t *testing.T) {
	for what, c := range map[string]struct {
		change func(s *scene)
		reason string
	}{
		"not signed": {func(s *scene) { s.names(s.image("third")) }, "NotSigned"},
		"the signature of another image": {func(s *scene) {
			digest := s.image("third")
			tag := func(d string) string { return strings.Replace(d, ":", "-", 1) + ".sig" }
			s.registry.Tags[tag(digest)] = s.registry.Tags[tag(s.digests[1])]
			s.names(digest)
		}, "NotSigned"},
		"deleted": {func(s *scene) { delete(s.registry.Tags, "stable") }, "TagMissing"},
		"away": {func(s *scene) {
			s.instead.Store(new(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
				panic(http.ErrAbortHandler)
			})))
		}, "Unverified"},
		"a huge manifest": {func(s *scene) {
			s.instead.Store(new(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				for p := make([]byte, 1<<20); r.URL.Path != "/v2/"; {
					if _, err := w.Write(p); err != nil {
						return
					}
				}
			})))
		}, "Unverified"},
		"no manifest": {func(s *scene) {
			s.registry.Tags["stable"] = s.registry.Add([]byte("<html>"))
		}, "NotSigned"},
		"no manifest, where no signature is asked for": {func(s *scene) {
			s.r.Verifier.Options.Policies = ""
			s.registry.Tags["stable"] = s.registry.Add([]byte("<html>"))
		}, "Invalid"},
		"another registry": {func(s *scene) { s.r.Options.Follow = []string{"a.example.com"} },
			"Invalid"},
		"the beginning of a name": {func(s *scene) {
			s.r.Options.Follow = []string{s.host() + "/v"}
		}, "Invalid"},
	} {
		t.Run(what, func(t *testing.T) {
			s := newScene(t)
			s.look("Followed", "", s.digests[0])
			c.change(s)
			s.look(c.reason, "new disks begin from "+s.digests[0], s.digests[0])
			require.Equal(t, []string{"Normal Followed", "Warning " + c.reason}, s.Events())
			s.look(c.reason, "", s.digests[0])
			require.Len(t, s.Events(), 2, "it is told once")
		})
	}
}
