package registry

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// The versions that scripts/build-client.sh builds.
const (
	cosignVersion  = "v2.6.5"
	cosign3Version = "v3.1.3"
	orasVersion    = "v1.3.6"
)

// generations of cosign, and how a person signs with each: with a key, and no log that is asked.
// services is a file that names no services.
var generations = []struct {
	name, version string
	ways          func(services string) []way
}{
	{"cosign", cosignVersion, func(string) []way {
		return []way{
			{"tag", "simple-signing", []string{"--new-bundle-format=false", "--tlog-upload=false"}},
			{"bundle", "sigstore-bundle", []string{"--new-bundle-format", "--tlog-upload=false"}},
		}
	}},
	{"cosign3", cosign3Version, func(services string) []way {
		return []way{
			{"tag", "simple-signing", []string{"--new-bundle-format=false", "--tlog-upload=false",
				"--use-signing-config=false"}},
			// What it does by itself, with nobody to ask.
			{"default", "sigstore-bundle", []string{"--signing-config=" + services}},
		}
	}},
}

type way struct {
	name, format string
	flags        []string
}

// noServices is what "cosign signing-config create" writes if no service is named.
const noServices = `{"mediaType":"application/vnd.dev.sigstore.signingconfig.v0.2+json",
"rekorTlogConfig":{},"tsaConfig":{}}`

// cosign is one of a generation, in a directory.
type cosign struct{ program, dir string }

func (c cosign) run(t *testing.T, args ...string) rig.Result {
	t.Helper()
	// It asks for no root of trust, and finds none on a machine without network.
	return rig.Client(t, []string{"COSIGN_PASSWORD=pa55word", "HOME=" + c.dir}, c.program, args...)
}

func (c cosign) must(t *testing.T, args ...string) string {
	t.Helper()
	r := c.run(t, args...)
	require.Zero(t, r.Status, "%s", r)
	return r.Output
}

// verify asks it whether a key has signed an image of a registry without TLS.
func (c cosign) verify(t *testing.T, key, ref string) rig.Result {
	t.Helper()
	return c.run(t, "verify", "--key="+key+".pub", "--insecure-ignore-tlog",
		"--allow-insecure-registry", ref)
}

// TestCosign signs with each cosign what we admit, in each format and with its own and with
// imported keys, and has it verify what push has signed.
func TestCosign(t *testing.T) {
	t.Parallel()
	for _, g := range generations {
		t.Run(g.version, func(t *testing.T) {
			t.Parallel()
			c := cosign{rig.BuiltClient(t, g.name, g.version), t.TempDir()}
			rig.Need(t, "docker-registry")
			services := filepath.Join(c.dir, "services.json")
			require.NoError(t, os.WriteFile(services, []byte(noServices), 0o600))
			c.test(t, g.ways(services))
		})
	}
}

func (c cosign) test(t *testing.T, ways []way) {
	own := filepath.Join(c.dir, "own")
	c.must(t, "generate-key-pair", "--output-key-prefix="+own)
	edwards := filepath.Join(c.dir, "edwards")
	_, private := testtool.Must2(ed25519.GenerateKey(rand.Reader))(t)
	der := testtool.Must(x509.MarshalPKCS8PrivateKey(private))(t)
	require.NoError(t, os.WriteFile(edwards+".pem",
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600))
	c.must(t, "import-key-pair", "--key="+edwards+".pem", "--output-key-prefix="+edwards)

	s := rig.StartRegistry(t, false, "")
	insecure := "--insecure-registry=" + s.Address
	raw := filepath.Join(c.dir, "a.raw")
	require.NoError(t, os.WriteFile(raw, make([]byte, 64<<10), 0o644))
	password := []string{"COSIGN_PASSWORD=pa55word"}
	for _, key := range []string{own, edwards} {
		name := s.Address + "/vm/" + filepath.Base(key)
		// Theirs, verified by us.
		for _, w := range ways {
			ref := name + "-" + w.name
			pushed := rig.MustRun(t, nil, "push", "--base=none", insecure, raw, ref+":1")
			digest := pushedDigest.FindString(pushed.Output)
			pull := []string{"pull", insecure, "--force", "--verify-key=" + key + ".pub",
				ref + ":1", filepath.Join(c.dir, filepath.Base(ref))}
			refused := rig.Run(t, nil, pull...)
			require.Equal(t, 1, refused.Status)
			require.Contains(t, refused.Output, "has no signature")
			c.must(t, append([]string{"sign", "--yes", "--key=" + key + ".key",
				"--allow-insecure-registry", ref + "@" + digest}, w.flags...)...)
			rig.MustRun(t, nil, pull...)
			shown := rig.MustRun(t, nil, "inspect", insecure, "--verify-key="+key+".pub", ref+":1")
			require.Contains(t, shown.Output, "("+w.format+"): verified")
		}
		// Ours, verified by them.
		ref := name + "-ours:1"
		rig.MustRun(t, password, "push", "--base=none", insecure, "--sign-key="+key+".key", raw,
			ref)
		out := c.verify(t, key, ref)
		require.Zero(t, out.Status, "%s", out)
		require.Contains(t, out.Output, "docker-manifest-digest")
	}
}
