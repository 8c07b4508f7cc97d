package signature

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// TestPolicy: the longest prefix decides, whichever spelling of the name is used.
func TestPolicy(t *testing.T) {
	_, file := registrytest.NewSigner(t)
	inline := testtool.Must(os.ReadFile(file))(t)
	text := `
images:
  - prefix: Registry.example.com
    keys: ["` + file + `"]
  - {prefix: registry.example.com/vm/scratch, action: allow}
  - {prefix: registry.example.com/vm/scratch/old, action: deny}
  - prefix: docker.io/vm
    keys:
      - |
        ` + indent(string(inline)) + `
`
	for _, otherwise := range []string{actionDeny, actionAllow} {
		p := testtool.Must(parsePolicy([]byte("default: "+otherwise+text), t.TempDir()))(t)
		for name, want := range map[string]string{
			"registry.example.com/a":                    "keys",
			"REGISTRY.example.com:443/vm/a:1":           "keys",
			"registry.example.com./vm/a:1":              "keys",
			"docker://registry.example.com/vm/fedora:1": "keys",
			"registry.example.com/vm/scratch:1":         actionAllow,
			"registry.example.com/vm/scratch/a":         actionAllow,
			"registry.example.com/vm/scratchy":          "keys",
			"registry.example.com/vm/scratch/old/x":     actionDeny,
			"registry.example.com:5000/vm/scratch":      otherwise,
			"other.example.com/registry.example.com/a":  otherwise,
			"docker.io/vm/a":                            "keys",
			"vm/a":                                      "keys",
			"docker.io/vmx/a":                           otherwise,
			"oci:registry.example.com/vm/scratch":       otherwise,
		} {
			ref, err := transport.ParseReference(name)
			if err != nil { // then it is no spelling of it
				continue
			}
			r := p.ruleFor(ref)
			got := actionDeny
			if r.allow {
				got = actionAllow
			} else if len(r.keys) > 0 {
				got = "keys"
			}
			require.Equal(t, want, got, "%s, by default %s", name, otherwise)
		}
	}
}

func indent(text string) string {
	out := ""
	for _, c := range text {
		if out += string(c); c == '\n' {
			out += "        "
		}
	}
	return out
}

// TestPolicyRefused: a policy that does not say what its author means is an error.
func TestPolicyRefused(t *testing.T) {
	_, file := registrytest.NewSigner(t)
	secret := written(t, "secret.pem",
		"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
	const one = "images: [{prefix: a.b, "
	for text, want := range map[string]string{
		"defualt: deny":                           "field defualt not found",
		"default: maybe":                          `"maybe" is neither deny nor allow`,
		"default: deny\n---\ndefault: allow":      "more than one document",
		"default: &a deny\nimages: *a":            "line 2: a value begins with *",
		strings.Repeat("default:\n", 60000):       `line 2: "default" is already defined`,
		"images: [{prefix: a.b}]":                 "has neither keys nor an action",
		one + "keys: []}]":                        "has neither keys nor an action",
		one + "action: may}]":                     `"may" is neither allow nor deny`,
		"images: [{keys: [a]}]":                   `the prefix ""`,
		"images: [{prefix: 'a.b/c:1', keys: []}]": `the prefix "a.b/c:1"`,
		"images: [{prefix: 'a.b/*', keys: []}]":   `the prefix "a.b/*"`,
		"images: [{prefix: 'a.b/VM', keys: []}]":  "not an image reference",
		"images: [{prefix: 'LOCALHOST/a'}]":       "not an image reference",
		"images: [{prefix: 'a.b//c'}]":            "not the path of a repository",
		"images: [{prefix: 'a.b/../c'}]":          "not the path of a repository",
		"images: [{prefix: 'a.b:05000/c'}]":       "without leading zeros",
		"images: [{prefix: 'a.b:/c'}]":            "is not HOST or HOST:PORT",
		"images: [{prefix: '\uff41.b/c'}]":        "is not HOST or HOST:PORT",
		"images: [{prefix: 'oci:5/a'}]":           "in no registry",
		"images: [{prefix: 'oci:a'}]":             `the prefix "oci:a"`,
		"images: [{prefix: 'docker://a.b'}]":      `the prefix "docker://a.b"`,
		"images: [{prefix: 'https://a.b'}]":       `the prefix "https://a.b"`,
		"images: [{prefix: '/a.b'}]":              `the prefix "/a.b"`,
		"images: [{prefix: 'a.b@sha256:1'}]":      `the prefix "a.b@sha256:1"`,
		"images: [{prefix: ' a.b'}]":              `the prefix " a.b"`,
		"images: [{prefix: fedora, action: allow}, " +
			"{prefix: docker.io/library/fedora, action: deny}]": "two rules",
		"images: [{prefix: localhost, action: allow}, " +
			"{prefix: 127.0.0.1, action: deny}]": "two rules",
		one + "key: x}]":                   "field key not found",
		one + "keys: [gone]}]":             "no such file",
		one + "action: allow, keys: [k]}]": "leave out one",
		one + "keys: ['" + secret + "']}]": "it has a private key",
		one + "action: allow}, " +
			"{prefix: A.b, action: deny}]": "two rules",
	} {
		_, err := NewGate(Options{Policy: written(t, "policy.yaml", text)})
		require.ErrorContains(t, err, want, text)
	}
	_, err := NewGate(Options{Policy: written(t, "policy.yaml", ""), Keys: []string{file}})
	require.ErrorContains(t, err, "are both given")
	require.Nil(t, testtool.Must(NewGate(Options{}))(t))
}

// TestPolicyChanges: a policy that was changed counts for the next image, and one that cannot be
// read admits nothing.
func TestPolicyChanges(t *testing.T) {
	s := newImage(t)
	opt := Options{Policy: written(t, "policy.yaml", "default: allow")}
	gate := testtool.Must(NewGate(opt))(t)
	ask := func() error {
		_, err := gate.Admit(t.Context(), transport.Asked{Ref: s.ref(t, ":1"), Content: s.content})
		return err
	}
	require.NoError(t, ask())
	require.NoError(t, os.WriteFile(opt.Policy, []byte("default: deny"), 0o600))
	require.ErrorContains(t, ask(), "has no rule in the policy")
	require.NoError(t, os.WriteFile(opt.Policy, []byte("default: "), 0o600))
	require.ErrorContains(t, ask(), "has no rule in the policy")
	require.NoError(t, os.WriteFile(opt.Policy, []byte("garbage"), 0o600))
	require.ErrorContains(t, ask(), "nobody knows whose signature is asked for")
	require.NoError(t, os.WriteFile(opt.Policy,
		[]byte("images: [{prefix: '"+s.Host()+"', action: deny}]"), 0o600))
	require.ErrorContains(t, ask(), "is denied by the policy")
}

// TestAsk: what is asked of an image is known before anything of it is read.
func TestAsk(t *testing.T) {
	key, file := registrytest.NewSigner(t)
	opt := Options{Policy: written(t, "policy.yaml", `
images:
  - {prefix: registry.example.com/vm, keys: ["`+file+`"]}
  - {prefix: registry.example.com/open, action: allow}
  - {prefix: registry.example.com/closed, action: deny}
`)}
	for name, want := range map[string]struct {
		keys []string
		says string
	}{
		"registry.example.com/vm/a":     {keys: []string{registrytest.Fingerprint(t, key)}},
		"registry.example.com/open/a":   {},
		"registry.example.com/closed/a": {says: "is denied by the policy"},
		"registry.example.com/else":     {says: "has no rule in the policy"},
	} {
		keys, err := opt.Ask(testtool.Must(transport.ParseReference(name))(t))
		require.Equal(t, want.keys, keys, name)
		if want.says == "" {
			require.NoError(t, err, name)
			continue
		}
		var no *RefusedError
		require.ErrorAs(t, err, &no, name)
		require.ErrorContains(t, err, want.says)
	}
	_, err := Options{Policy: "/none"}.Ask(transport.Reference{})
	require.ErrorIs(t, err, os.ErrNotExist)
}

// TestSpellings: whatever spelling a rule and a reference have, the rule decides what it names, and
// nothing else. A reference that reaches a repository by an odd spelling is none.
func TestSpellings(t *testing.T) {
	const none = "" // the reference is refused
	for prefix, refs := range map[string]map[string]string{
		"docker.io/fedora": {"fedora:1": actionDeny, "docker.io/fedora": actionDeny,
			"library/fedora": actionDeny, "index.docker.io/library/fedora": actionDeny,
			"registry-1.docker.io/library/fedora": actionDeny, "Docker.io/fedora:1": actionDeny,
			"registry.hub.docker.com/library/fedora": actionDeny,
			"docker.io:443/fedora":                   actionDeny,
			"fedora/a":                               actionDeny, "fedorax": actionAllow,
			"x.io/library/fedora": actionAllow,
			"x/fedora":            actionAllow},
		"fedora": {"fedora:1": actionDeny, "fedora/coreos": actionDeny,
			"f": actionAllow},
		"library/fedora": {"fedora": actionDeny, "docker.io/fedora": actionDeny,
			"f": actionAllow},
		"docker.io/library": {"fedora": actionDeny, "vm/a": actionAllow, "library": actionDeny},
		"docker.io":         {"fedora": actionDeny, "vm/a": actionDeny, "x.io/a": actionAllow},
		"index.docker.io/vm/": {"vm/a": actionDeny, "vmware/a": actionAllow,
			"docker://docker.io/vm/a@sha256:" + zeros: actionDeny},
		"reg.example.com/vm": {"reg.example.com/vm/a": actionDeny, "REG.example.com/vm": actionDeny,
			"reg.example.com:443/vm/a": actionDeny, "reg.example.com.:443/vm/a": actionDeny,
			"reg.example.com:80/vm/a": actionDeny, "reg.example.com:0443/vm/a": none,
			"reg.example.com:/vm/a": none, "reg.example.com//vm/a": none,
			"reg.example.com/vm//a": none, "reg.example.com/x/../vm/a": none,
			"reg.example.com/./vm/a": none, "reg.example.com/vm./a": none,
			"\uff52eg.example.com/vm/a": none, "reg%2eexample.com/vm/a": none,
			"reg.example.com:5000/vm/a": actionAllow, "reg.example.com/vmware/a": actionAllow},
		"REG.example.com:443/vm/": {"reg.example.com/vm/a": actionDeny},
		"reg.example.com.":        {"reg.example.com/vm/a": actionDeny},
		"localhost:24092": {"localhost:24092/a": actionDeny, "LOCALHOST:24092/a": actionDeny,
			"localhost:024092/a": none, "\uff4cocalhost:24092/a": none,
			"127.0.0.1:24092/a": actionDeny, "127.1.2.3:24092/a": actionDeny,
			"[::1]:24092/a": actionDeny, "[0:0:0:0:0:0:0:1]:24092/a": actionDeny,
			"[::ffff:127.0.0.1]:24092/a": actionDeny, "a.localhost:24092/a": actionDeny,
			"localhost.:24092/a": actionDeny, "localhost:2409/a": actionAllow,
			"localhost/a": actionAllow},
		"[2001:db8::1]:5000/a": {"[2001:DB8:0::1]:5000/a/b": actionDeny,
			"[2001:db8::2]:5000/a/b": actionAllow},
	} {
		p := testtool.Must(parsePolicy([]byte("default: allow\nimages: [{prefix: '"+prefix+
			"', action: deny}]"), t.TempDir()))(t, prefix)
		for text, want := range refs {
			ref, err := transport.ParseReference(text)
			if want == none {
				require.Error(t, err, text)
				continue
			}
			require.NoError(t, err, text)
			got := actionDeny
			if p.ruleFor(ref).allow {
				got = actionAllow
			}
			require.Equal(t, want, got, "%s by %s", text, prefix)
		}
	}
}

const zeros = "0000000000000000000000000000000000000000000000000000000000000000"

// FuzzPrefix: a rule of any reference's repository decides about that reference.
func FuzzPrefix(f *testing.F) {
	for _, text := range []string{"fedora:1", "docker.io/vm/a", "LOCALHOST:5000/a", "a.b:443/c",
		"[::1]:1/x", "docker://x.y./z", "library/library"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		ref, err := transport.ParseReference(text)
		if err != nil || !ref.Remote() {
			return
		}
		names := testtool.Must(parsePrefix(ref.RepositoryText()))(t, text)
		require.Contains(t, names, ref.NormalName())
	})
}
