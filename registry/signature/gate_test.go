package signature

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha512"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// TestSigned: an image with a signature in each format and by each kind of key may be read, and the
// image names the key.
func TestSigned(t *testing.T) {
	curve := testtool.Must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	factors := testtool.Must(rsa.GenerateKey(rand.Reader, 2048))(t)
	_, edwards := testtool.Must2(ed25519.GenerateKey(rand.Reader))(t)
	_, stranger := registrytest.NewSigner(t)
	for name, key := range map[string]crypto.Signer{"ECDSA": curve, "RSA": factors,
		"Ed25519": edwards} {
		t.Run(name, func(t *testing.T) {
			opt := Options{Keys: []string{stranger, registrytest.PublicKey(t, key)}}
			for how, sign := range map[string]func(s *signedImage){
				"tag": func(s *signedImage) { s.Sign(t, s.digest, key) },
				"message": func(s *signedImage) {
					s.Refer(t, s.digest, registrytest.Message(t, key, s.content))
				},
				"envelope": func(s *signedImage) {
					s.Referrers = true
					s.Refer(t, s.digest, registrytest.Envelope(t, key, registrytest.Statement(
						s.digest, registrytest.SignPredicate), registrytest.ByKey))
				},
			} {
				s := newImage(t)
				s.refused(t, opt, "has no signature (asked for: sha256:")
				sign(s)
				img := testtool.Must(s.resolve(t, opt))(t, how)
				require.Equal(t, registrytest.Fingerprint(t, key), img.Admitted.Key)
				require.Equal(t, s.digest, img.Named)
			}
		})
	}
}

// TestHashedEd25519: cosign has signed the hash of a message (Ed25519ph), too.
func TestHashedEd25519(t *testing.T) {
	_, key := testtool.Must2(ed25519.GenerateKey(rand.Reader))(t)
	s := newImage(t)
	payload := registrytest.SimplePayload(s.digest)
	hash := sha512.Sum512(payload)
	sig := testtool.Must(key.Sign(rand.Reader, hash[:], crypto.SHA512))(t)
	s.Simple(t, s.digest, s.SimpleLayer(payload, sig))
	_, err := s.resolve(t, Options{Keys: []string{registrytest.PublicKey(t, key)}})
	require.NoError(t, err)
}

// TestRefused has a registry with each signature that does not count. Each is refused with its
// words.
func TestRefused(t *testing.T) {
	key, file := registrytest.NewSigner(t)
	other, _ := registrytest.NewSigner(t)
	const elsewhere = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	envelope := func(digest, predicate, material string) []byte {
		return registrytest.Envelope(t, key, registrytest.Statement(digest, predicate), material)
	}
	for name, c := range map[string]struct {
		make func(s *signedImage)
		why  string
	}{
		"another key": {func(s *signedImage) { s.Sign(t, s.digest, other) }, "is by another key"},
		"another digest": {func(s *signedImage) {
			text := registrytest.SimplePayload(elsewhere)
			s.Simple(t, s.digest, s.SimpleLayer(text, registrytest.SignatureOf(t, key, text)))
		}, `is of another digest, "` + elsewhere},
		"another kind of payload": {func(s *signedImage) {
			text := []byte(strings.Replace(string(registrytest.SimplePayload(s.digest)),
				"cosign container image", "atomic container", 1))
			s.Simple(t, s.digest, s.SimpleLayer(text, registrytest.SignatureOf(t, key, text)))
		}, "is of a \"atomic container signature\", and not of an image"},
		"payload of a guest": {func(s *signedImage) {
			text := []byte("garbage")
			s.Simple(t, s.digest, s.SimpleLayer(text, registrytest.SignatureOf(t, key, text)))
		}, "has a payload that cannot be read"},
		"no base64": {func(s *signedImage) {
			l := s.SimpleLayer(registrytest.SimplePayload(s.digest), nil)
			l.Annotations["dev.cosignproject.cosign/signature"] = "%%%"
			s.Simple(t, s.digest, l)
		}, "cannot be read: it is not in base64"},
		"another type": {func(s *signedImage) {
			l := s.SimpleLayer(registrytest.SimplePayload(s.digest), []byte("x"))
			l.MediaType = "text/plain"
			s.Simple(t, s.digest, l)
		}, `is of the type "text/plain"`},
		"huge payload": {func(s *signedImage) {
			l := s.SimpleLayer(registrytest.SimplePayload(s.digest), []byte("x"))
			l.Size = 1 << 40
			s.Simple(t, s.digest, l)
		}, "has a payload of 1099511627776 bytes, more than 65536"},
		"missing payload": {func(s *signedImage) {
			l := s.SimpleLayer([]byte("payload"), []byte("x"))
			delete(s.Store, l.Digest.String())
			s.Simple(t, s.digest, l)
		}, "is incomplete"},
		"wrong payload": {func(s *signedImage) {
			l := s.SimpleLayer([]byte("payload"), []byte("x"))
			s.Store[l.Digest.String()] = []byte("another")
			s.Simple(t, s.digest, l)
		}, "is incomplete"},
		"garbage": {func(s *signedImage) {
			s.Tags[sigTag(s.digest)] = s.Add([]byte("garbage"))
		}, "cannot be read"},
		"too long": {func(s *signedImage) {
			s.Tags[sigTag(s.digest)] = s.Add(make([]byte, 5<<20))
		}, "more than 4194304 bytes"},
		"10,000 signatures": {func(s *signedImage) {
			l := s.SimpleLayer(registrytest.SimplePayload(s.digest), []byte("x"))
			layers := make([]v1.Descriptor, 10000)
			for i := range layers {
				layers[i] = l
			}
			s.Simple(t, s.digest, layers...)
		}, "it has 10000 layers, more than 1024"},
		"10,000 bundles": {func(s *signedImage) {
			index := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex}
			for range 10000 {
				index.Manifests = append(index.Manifests, s.Tags["1"])
			}
			s.Tags[strings.Replace(s.digest, ":", "-", 1)] = s.Manifest(t, index)
		}, "10000 manifests refer to the image, more than 4096"},
		"bundle of another key": {func(s *signedImage) {
			s.Refer(t, s.digest, registrytest.Message(t, other, s.content))
		}, "is by another key"},
		"bundle of another digest": {func(s *signedImage) {
			s.Refer(t, s.digest, envelope(elsewhere, registrytest.SignPredicate,
				registrytest.ByKey), registrytest.Message(t, key, []byte("another manifest")))
		}, `is of another digest, "` + elsewhere},
		"attestation": {func(s *signedImage) {
			s.Refer(t, s.digest, envelope(s.digest, "https://slsa.dev/provenance/v1",
				registrytest.ByKey))
		}, `a statement of the type "https://slsa.dev/provenance/v1", which does not say`},
		"expired": {func(s *signedImage) {
			s.Refer(t, s.digest, envelope(s.digest, registrytest.SignPredicate,
				`{"certificate":{"rawBytes":"`+expired(t, key)+`"}}`))
		}, "is by a certificate that expired on 2020-01-02"},
		"no key": {func(s *signedImage) {
			s.Refer(t, s.digest, envelope(s.digest, registrytest.SignPredicate, `{}`))
		}, "names no key"},
		"garbage bundle": {func(s *signedImage) {
			s.Refer(t, s.digest, []byte("garbage"), []byte(`{"mediaType":"x"}`))
		}, "is a bundle that cannot be read"},
		"huge bundle": {func(s *signedImage) {
			s.Refer(t, s.digest, make([]byte, maxBundle+1))
		}, "is a bundle of 1048577 bytes, more than 1048576"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newImage(t)
			c.make(s)
			s.refused(t, Options{Keys: []string{file}}, c.why)
		})
	}
}

// expired is a certificate of the key that nobody trusts any more.
func expired(t testing.TB, key crypto.Signer) string {
	t.Helper()
	c := &x509.Certificate{SerialNumber: big.NewInt(1),
		NotAfter: time.Date(2020, 1, 2, 0, 0, 0, 0, time.UTC)}
	der := testtool.Must(x509.CreateCertificate(rand.Reader, c, c, key.Public(), key))(t)
	return base64.StdEncoding.EncodeToString(der)
}

// TestListOfImages: a signature of a list covers its images. One of an image does not cover the
// list, and one of the list does not cover an image that is named by its own digest.
func TestListOfImages(t *testing.T) {
	key, file := registrytest.NewSigner(t)
	s := newImage(t)
	image := s.Tags["1"]
	image.Platform = &v1.Platform{OS: "linux", Architecture: "amd64"}
	arm := image
	arm.Platform = &v1.Platform{OS: "linux", Architecture: "arm64"}
	s.Tags["1"] = s.Manifest(t, v1.IndexManifest{SchemaVersion: 2,
		MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{image, arm}})
	list := s.Tags["1"].Digest.String()
	opt := Options{Keys: []string{file}}

	s.Sign(t, s.digest, key)
	s.refused(t, opt, "a list of images for several platforms, which a signature of one of them "+
		"does not cover: sign the list (kubevirt-disk sign), or name a signed image of it")
	img := testtool.Must(s.resolveRef(t, s.ref(t, "@"+s.digest), opt))(t)
	require.Equal(t, s.digest, img.Digest)
	// The signature of the image, stored as one of the list, is not one.
	s.Tags[sigTag(list)] = s.Tags[sigTag(s.digest)]
	s.refused(t, opt, "is of another digest")

	delete(s.Tags, sigTag(s.digest))
	s.Sign(t, list, key)
	img = testtool.Must(s.resolve(t, opt))(t)
	require.Equal(t, list, img.Named)
	require.Equal(t, s.digest, img.Digest)
	_, err := s.resolveRef(t, s.ref(t, "@"+s.digest), opt)
	require.ErrorContains(t, err, "If it is one of a signed list of images, name the list")
}

// TestRegistryGoesAway: a registry that cannot be asked for signatures is no refusal, and no
// permission. When it is back, the image may be read.
func TestRegistryGoesAway(t *testing.T) {
	key, file := registrytest.NewSigner(t)
	for _, part := range []string{".sig", "/blobs/", "/referrers/"} {
		s := newImage(t)
		s.Sign(t, s.digest, key)
		if part == "/referrers/" {
			delete(s.Tags, sigTag(s.digest))
		}
		inner := s.Server.Config.Handler
		s.Server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.Contains(r.URL.Path, part) {
				w.WriteHeader(http.StatusServiceUnavailable)
				return
			}
			inner.ServeHTTP(w, r)
		})
		_, err := s.resolve(t, Options{Keys: []string{file}})
		require.ErrorContains(t, err, "its signatures cannot be read now, so it is not used yet",
			part)
		require.NotErrorAs(t, err, new(*RefusedError))
		s.Sign(t, s.digest, key)
		s.Server.Config.Handler = inner
		require.NoError(t, testtool.Err(s.resolve(t, Options{Keys: []string{file}})))
	}
}

// TestMirrorLacksSignature: what a mirror does not have, the registry is asked for. What the
// registry does not have is missing.
func TestMirrorLacksSignature(t *testing.T) {
	key, file := registrytest.NewSigner(t)
	other, _ := registrytest.NewSigner(t)
	s, mirror := newImage(t), registrytest.NewLying(t)
	mirror.NewImage(t, []byte("a disk"))
	s.opt.Mirrors = []string{s.Host() + "=" + mirror.Host()}
	s.opt.Insecure = append(s.opt.Insecure, mirror.Host())
	opt := Options{Policy: written(t, "policy.yaml", fmt.Sprintf(
		"images:\n- {prefix: %q, keys: [%q]}\n", s.Host()+"/vm", file))}
	s.refused(t, opt, "has no signature (")
	mirror.Sign(t, s.digest, other)
	s.Sign(t, s.digest, key)
	img := testtool.Must(s.resolve(t, opt))(t)
	require.Equal(t, registrytest.Fingerprint(t, key), img.Admitted.Key)
	require.Positive(t, mirror.Requests("/manifests/1"))
}

// TestLayout: the signatures of an image in a layout have their name there, and an archive of
// docker has no place for them.
func TestLayout(t *testing.T) {
	key, file := registrytest.NewSigner(t)
	opt := Options{Keys: []string{file}}
	s := newImage(t)
	s.Sign(t, s.digest, key)
	dir := s.Layout(t, s.Tags["1"])
	for name, signed := range map[string]bool{"another": false, sigTag(s.digest): true} {
		index := v1.IndexManifest{SchemaVersion: 2}
		for tag, desc := range map[string]v1.Descriptor{"1": s.Tags["1"],
			name: s.Tags[sigTag(s.digest)]} {
			desc.Annotations = map[string]string{"org.opencontainers.image.ref.name": tag}
			index.Manifests = append(index.Manifests, desc)
		}
		text := testtool.Must(json.Marshal(index))(t)
		require.NoError(t, os.WriteFile(filepath.Join(dir, "index.json"), text, 0o600))
		ref := testtool.Must(transport.ParseReference("oci:" + dir + ":1"))(t)
		_, err := s.resolveRef(t, ref, opt)
		if signed {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, "has no signature (")
	}
	_, err := testtool.Must(NewGate(opt))(t).Admit(t.Context(), transport.Asked{Content: s.content})
	require.ErrorContains(t, err, "lies where no signature can lie")
}

// referring stores a manifest of such layers, and returns it as an index of referrers names it.
func (s *signedImage) referring(t testing.TB, kind string, layers ...v1.Descriptor) v1.Descriptor {
	config := s.Add([]byte("{}"))
	config.MediaType = types.MediaType(kind)
	m := s.Manifest(t, v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1,
		Config: config, Layers: layers})
	m.ArtifactType = kind
	return m
}

// refer makes the index of referrers have these, the newest one last.
func (s *signedImage) refer(t testing.TB, all ...v1.Descriptor) {
	desc := s.Manifest(t, v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex,
		Manifests: all})
	desc.MediaType = types.OCIImageIndex
	s.Tags[strings.Replace(s.digest, ":", "-", 1)] = desc
}

// bundled is a layer with a bundle.
func (s *signedImage) bundled(text []byte) v1.Descriptor {
	layer := s.Add(text)
	layer.MediaType = mediaBundle
	return layer
}

func (s *signedImage) envelope(t testing.TB, key crypto.Signer, predicate string) []byte {
	return registrytest.Envelope(t, key, registrytest.Statement(s.digest, predicate),
		registrytest.ByKey)
}

// TestAmongOthers: a good signature counts among many others that are newer, wherever it lies.
func TestAmongOthers(t *testing.T) {
	key, file := registrytest.NewSigner(t)
	other, _ := registrytest.NewSigner(t)
	opt := Options{Keys: []string{file}}
	s := newImage(t)
	text := registrytest.SimplePayload(s.digest)
	good := s.SimpleLayer(text, registrytest.SignatureOf(t, key, text))
	bad := s.SimpleLayer(text, registrytest.SignatureOf(t, other, text))
	layers := []v1.Descriptor{good}
	for range 200 {
		layers = append(layers, bad)
	}
	s.Simple(t, s.digest, layers...)
	require.NoError(t, testtool.Err(s.resolve(t, opt)))
	require.LessOrEqual(t, s.Requests("/blobs/"), 1, "the payload is fetched once for each image")

	delete(s.Tags, sigTag(s.digest))
	s.refused(t, opt, "has no signature (asked for")
	const attestation = "https://slsa.dev/provenance/v1"
	signed := s.referring(t, mediaBundle, s.bundled(s.envelope(t, key, predicateSign)))
	all := []v1.Descriptor{signed}
	for range 50 {
		all = append(all, s.referring(t, mediaBundle, s.bundled(s.envelope(t, key, attestation))),
			s.referring(t, mediaBundle, s.bundled(s.envelope(t, other, predicateSign))))
	}
	s.refer(t, all...)
	require.NoError(t, testtool.Err(s.resolve(t, opt)))
	s.refer(t, all[1:]...)
	s.refused(t, opt, "has no signature that counts")

	// More than is read at all. What says that it is something else is read last.
	huge := s.envelope(t, key, attestation)
	huge = append(huge, bytes.Repeat([]byte(" "), maxBundle-len(huge))...)
	big := s.referring(t, mediaBundle, s.bundled(huge))
	all = []v1.Descriptor{signed}
	for range maxRead/maxBundle + 1 {
		all = append(all, big)
	}
	s.refer(t, all...)
	s.refused(t, opt, "others were not looked at")
	for i := range all[1:] {
		all[i+1].Annotations = map[string]string{annotationPredicate: attestation}
	}
	s.refer(t, all...)
	require.NoError(t, testtool.Err(s.resolve(t, opt)))
}

// TestSimpleReferrer: a signature as it lies under the tag counts in a manifest that refers to the
// image, too, whatever a client takes for the type of the artifact.
func TestSimpleReferrer(t *testing.T) {
	key, file := registrytest.NewSigner(t)
	other, _ := registrytest.NewSigner(t)
	opt := Options{Keys: []string{file}}
	for _, kind := range []string{mediaSignature, mediaSimple, mediaEmpty, "",
		string(types.OCIConfigJSON)} {
		s := newImage(t)
		text := registrytest.SimplePayload(s.digest)
		of := func(text []byte, key crypto.Signer) v1.Descriptor {
			return s.SimpleLayer(text, registrytest.SignatureOf(t, key, text))
		}
		s.refer(t, s.referring(t, kind, of(text, other)))
		s.refused(t, opt, "is by another key")
		s.refer(t, s.referring(t, kind, of(text, key)), s.referring(t, "text/plain"),
			s.referring(t, kind, of(text, other)))
		img := testtool.Must(s.resolve(t, opt))(t, kind)
		require.Equal(t, registrytest.Fingerprint(t, key), img.Admitted.Key)
	}
	s := newImage(t)
	text := registrytest.SimplePayload("sha256:" + zeros)
	s.refer(t, s.referring(t, mediaSignature, s.SimpleLayer(text,
		registrytest.SignatureOf(t, key, text))))
	s.refused(t, opt, "is of another digest")
}
