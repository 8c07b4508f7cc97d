package signature

import (
	"crypto/ed25519"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// FuzzEvidence: whatever a registry sends as a signature is refused without a panic, unless it is
// one that a key has made of this content.
func FuzzEvidence(f *testing.F) {
	// The same one in each process of the fuzz test.
	key := ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	text := testtool.Must(os.ReadFile(registrytest.PublicKey(f, key)))(f)
	keys := testtool.Must(ParseKeys(text))(f)
	content := []byte("a manifest")
	digest := transport.DigestOf(content)
	good := registrytest.SimplePayload(digest)
	sig := registrytest.SignatureOf(f, key, good)
	f.Add(good, sig)
	f.Add(registrytest.Message(f, key, content), []byte(nil))
	f.Add(registrytest.Envelope(f, key, registrytest.Statement(digest, registrytest.SignPredicate),
		registrytest.ByKey), []byte(nil))
	f.Add(registrytest.Envelope(f, key, []byte("{}"), `{"certificate":{"rawBytes":"AAAA"}}`),
		[]byte(nil))
	other := []byte("another manifest")
	f.Fuzz(func(t *testing.T, text, sig []byte) {
		for _, e := range []evidence{{Format: FormatSimple, Payload: text, Signature: sig},
			{Format: FormatBundle, Bundle: text}} {
			// Nobody has signed the other content.
			if _, err := e.check(keys, other); err == nil {
				t.Fatalf("%s counts as a signature: %q", e.Format, text)
			}
			_, _ = e.check(keys, content)
		}
		_, _ = parseProof(text)
		_, _ = signaturesIn(text)
	})
}

// FuzzKeys reads keys and policies. People write them, and a typing error is no panic.
func FuzzKeys(f *testing.F) {
	_, file := registrytest.NewSigner(f)
	f.Add(testtool.Must(os.ReadFile(file))(f))
	f.Add([]byte("default: allow\nimages:\n- {prefix: a.b/c, action: deny}\n"))
	f.Add([]byte("-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\neyJrZGYiOnt9fQ==\n" +
		"-----END ENCRYPTED SIGSTORE PRIVATE KEY-----\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		if keys, err := ParseKeys(text); err == nil {
			require.NotEmpty(t, keys)
		}
		_, _ = ParsePrivateKey(text, nil)
		_, _ = parsePolicy(text, t.TempDir())
	})
}
