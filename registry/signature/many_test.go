package signature

import (
	"bytes"
	"crypto"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
)

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
