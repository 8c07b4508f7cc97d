package registrytest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"
)

// The formats of cosign's signatures, as it describes them.
const (
	simpleSigning = "application/vnd.dev.cosign.simplesigning.v1+json"
	bundleType    = "application/vnd.dev.sigstore.bundle.v0.3+json"
	inToto        = "application/vnd.in-toto+json"
)

// NewSigner makes a key, and a file with its public part.
func NewSigner(t testing.TB) (key crypto.Signer, file string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	return key, PublicKey(t, key)
}

// PublicKey writes the public part of a key.
func PublicKey(t testing.TB, key crypto.Signer) (file string) {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	require.NoError(t, err)
	file = filepath.Join(t.TempDir(), "key.pub")
	text := pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
	require.NoError(t, os.WriteFile(file, text, 0o644))
	return file
}

// Fingerprint is that of the key's public part.
func Fingerprint(t testing.TB, key crypto.Signer) string {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	require.NoError(t, err)
	return fmt.Sprintf("sha256:%x", sha256.Sum256(der))
}

// SignatureOf signs a message as cosign does.
func SignatureOf(t testing.TB, key crypto.Signer, message []byte) []byte {
	t.Helper()
	sum, opt := sha256.Sum256(message), crypto.SignerOpts(crypto.SHA256)
	hash := sum[:]
	if _, ok := key.(ed25519.PrivateKey); ok {
		hash, opt = message, crypto.Hash(0)
	}
	sig, err := key.Sign(rand.Reader, hash, opt)
	require.NoError(t, err)
	return sig
}

// SimplePayload is what is signed in the format of simple signing.
func SimplePayload(digest string) []byte {
	return fmt.Appendf(nil, `{"critical":{"identity":{"docker-reference":"example.com/vm"},`+
		`"image":{"docker-manifest-digest":"%s"},"type":"cosign container image signature"},`+
		`"optional":null}`, digest)
}

// Sign stores a signature of a digest by each key, under its tag.
func (l *Lying) Sign(t testing.TB, digest string, keys ...crypto.Signer) {
	t.Helper()
	payload := SimplePayload(digest)
	var layers []v1.Descriptor
	for _, key := range keys {
		layers = append(layers, l.SimpleLayer(payload, SignatureOf(t, key, payload)))
	}
	l.Simple(t, digest, layers...)
}

// SimpleLayer is a payload with its signature.
func (l *Lying) SimpleLayer(payload, signature []byte) v1.Descriptor {
	desc := l.Add(payload)
	desc.MediaType = simpleSigning
	desc.Annotations = map[string]string{
		"dev.cosignproject.cosign/signature": base64.StdEncoding.EncodeToString(signature)}
	return desc
}

// Simple stores such layers as the signatures of a digest.
func (l *Lying) Simple(t testing.TB, digest string, layers ...v1.Descriptor) {
	t.Helper()
	config := l.Add([]byte("{}"))
	config.MediaType = types.OCIConfigJSON
	l.Tags[strings.Replace(digest, ":", "-", 1)+".sig"] = l.Manifest(t,
		v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Config: config,
			Layers: layers})
}

// Statement is what cosign signs in a bundle.
func Statement(digest, predicate string) []byte {
	return fmt.Appendf(nil, `{"_type":"https://in-toto.io/Statement/v1","subject":[{"digest":`+
		`{"sha256":"%s"}}],"predicateType":"%s","predicate":{}}`,
		strings.TrimPrefix(digest, "sha256:"), predicate)
}

// SignPredicate is the type of the statement that an image is signed.
const SignPredicate = "https://sigstore.dev/cosign/sign/v1"

// Envelope is a bundle with an envelope of DSSE. material says who has signed it.
func Envelope(t testing.TB, key crypto.Signer, statement []byte, material string) []byte {
	t.Helper()
	message := fmt.Appendf(nil, "DSSEv1 %d %s %d %s", len(inToto), inToto, len(statement),
		statement)
	return bundled(t, material, "dsseEnvelope", map[string]any{"payload": statement,
		"payloadType": inToto, "signatures": []any{map[string]any{
			"sig": SignatureOf(t, key, message)}}})
}

// ByKey is the material of a bundle that a key has signed.
const ByKey = `{"publicKey":{"hint":"a key"}}`

// Message is a bundle with a signature of the manifest itself.
func Message(t testing.TB, key crypto.Signer, manifest []byte) []byte {
	t.Helper()
	sum := sha256.Sum256(manifest)
	return bundled(t, ByKey, "messageSignature", map[string]any{
		"messageDigest": map[string]any{"algorithm": "SHA2_256", "digest": sum[:]},
		"signature":     SignatureOf(t, key, manifest)})
}

func bundled(t testing.TB, material, kind string, content any) []byte {
	t.Helper()
	text, err := json.Marshal(map[string]any{"mediaType": bundleType,
		"verificationMaterial": json.RawMessage(material), kind: content})
	require.NoError(t, err)
	return text
}

// Refer stores bundles that refer to a digest.
func (l *Lying) Refer(t testing.TB, digest string, bundles ...[]byte) {
	t.Helper()
	index := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex}
	subject, err := v1.NewHash(digest)
	require.NoError(t, err)
	for _, b := range bundles {
		layer := l.Add(b)
		layer.MediaType = bundleType
		config := l.Add([]byte("{}"))
		config.MediaType = "application/vnd.oci.empty.v1+json"
		m := l.Manifest(t, v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1,
			Config: config, Layers: []v1.Descriptor{layer}, ArtifactType: bundleType,
			Subject: &v1.Descriptor{MediaType: types.OCIManifestSchema1, Digest: subject}})
		m.ArtifactType = bundleType
		index.Manifests = append(index.Manifests, m)
	}
	desc := l.Manifest(t, index)
	desc.MediaType = types.OCIImageIndex
	l.Tags[strings.Replace(digest, ":", "-", 1)] = desc
}
