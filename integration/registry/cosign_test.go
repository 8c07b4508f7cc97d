package registry

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

// cosign runs it in a directory. The test is skipped if nobody has built it.
func cosign(t *testing.T, dir string, args ...string) rig.Result {
	t.Helper()
	// It asks for no root of trust, and finds none on a machine without network.
	env := []string{"COSIGN_PASSWORD=pa55word", "HOME=" + dir}
	return rig.Client(t, env, rig.BuiltClient(t, "cosign", cosignVersion), args...)
}

// TestCosign signs with cosign what we admit, in both formats and with its own and with imported
// keys, and has cosign verify what push has signed.
func TestCosign(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cosign(t, dir, "version")
	rig.Need(t, "docker-registry")
	must := func(args ...string) string {
		t.Helper()
		r := cosign(t, dir, args...)
		require.Zero(t, r.Status, "%s", r)
		return r.Output
	}
	own := filepath.Join(dir, "own")
	must("generate-key-pair", "--output-key-prefix="+own)
	edwards := filepath.Join(dir, "edwards")
	_, private, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	der, err := x509.MarshalPKCS8PrivateKey(private)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(edwards+".pem",
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600))
	must("import-key-pair", "--key="+edwards+".pem", "--output-key-prefix="+edwards)

	s := rig.StartRegistry(t, false, "")
	insecure := "--insecure-registry=" + s.Address
	raw := filepath.Join(dir, "a.raw")
	require.NoError(t, os.WriteFile(raw, make([]byte, 64<<10), 0o644))
	password := []string{"COSIGN_PASSWORD=pa55word"}
	for _, key := range []string{own, edwards} {
		name := s.Address + "/vm/" + filepath.Base(key)
		// Theirs, verified by us.
		for i, format := range []string{"--new-bundle-format=false", "--new-bundle-format"} {
			ref := name + []string{"-tag", "-bundle"}[i]
			pushed := rig.MustRun(t, nil, "push", "--base=none", insecure, raw, ref+":1")
			digest := pushedDigest.FindString(pushed.Output)
			pull := []string{"pull", insecure, "--force", "--verify-key=" + key + ".pub",
				ref + ":1", filepath.Join(dir, filepath.Base(ref))}
			refused := rig.Run(t, nil, pull...)
			require.Equal(t, 1, refused.Status)
			require.Contains(t, refused.Output, "has no signature")
			must("sign", "--yes", "--key="+key+".key", "--tlog-upload=false",
				"--allow-insecure-registry", format, ref+"@"+digest)
			rig.MustRun(t, nil, pull...)
			shown := rig.MustRun(t, nil, "inspect", insecure, "--verify-key="+key+".pub", ref+":1")
			want := []string{"(simple-signing): verified", "(sigstore-bundle): verified"}[i]
			require.Contains(t, shown.Output, want)
		}
		// Ours, verified by them.
		ref := name + "-ours:1"
		rig.MustRun(t, password, "push", "--base=none", insecure, "--sign-key="+key+".key", raw,
			ref)
		out := must("verify", "--key="+key+".pub", "--insecure-ignore-tlog",
			"--allow-insecure-registry", ref)
		require.True(t, strings.Contains(out, "docker-manifest-digest"), out)
	}
}

// The versions that scripts/build-client.sh builds.
const (
	cosignVersion = "v2.6.5"
	orasVersion   = "v1.3.6"
)
