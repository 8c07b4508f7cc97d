package signature

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// TestPolicy: the longest prefix decides, whichever spelling of the name is used.
func TestPolicy(t *testing.T) {
	_, file := registrytest.NewSigner(t)
	inline, err := os.ReadFile(file)
	require.NoError(t, err)
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
		p, err := parsePolicy([]byte("default: "+otherwise+text), t.TempDir())
		require.NoError(t, err)
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
			r := p.of(ref)
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
	gate, err := NewGate(Options{})
	require.NoError(t, err)
	require.Nil(t, gate)
}

// TestPolicyChanges: a policy that was changed counts for the next image, and one that cannot be
// read admits nothing.
func TestPolicyChanges(t *testing.T) {
	s := newImage(t)
	opt := Options{Policy: written(t, "policy.yaml", "default: allow")}
	gate, err := NewGate(opt)
	require.NoError(t, err)
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
		ref, err := transport.ParseReference(name)
		require.NoError(t, err)
		keys, err := opt.Ask(ref)
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
