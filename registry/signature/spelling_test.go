package signature

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/registry/transport"
)

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
		p, err := parsePolicy([]byte("default: allow\nimages: [{prefix: '"+prefix+
			"', action: deny}]"), t.TempDir())
		require.NoError(t, err, prefix)
		for text, want := range refs {
			ref, err := transport.ParseReference(text)
			if want == none {
				require.Error(t, err, text)
				continue
			}
			require.NoError(t, err, text)
			got := actionDeny
			if p.of(ref).allow {
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
		names, err := parsePrefix(ref.RepositoryText())
		require.NoError(t, err, text)
		require.Contains(t, names, ref.NormalName())
	})
}
