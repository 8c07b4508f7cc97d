package signature

import (
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"kubevirt.io/disk/registry/internal/bounded"
	"kubevirt.io/disk/registry/transport"
)

// Format is the format of a stored signature.
type Format string

const (
	FormatSimple Format = "simple-signing"  // the tag sha256-HEX.sig, or a manifest as below
	FormatBundle Format = "sigstore-bundle" // a manifest that refers to the image
)

const (
	maxPayload = 64 << 10 // bytes of a payload of simple signing
	maxBundle  = 1 << 20  // bytes of a bundle
	maxOfOne   = 16       // most signatures in one bundle

	mediaSimple = "application/vnd.dev.cosign.simplesigning.v1+json"
	mediaBundle = "application/vnd.dev.sigstore.bundle.v0.3+json"
	mediaInToto = "application/vnd.in-toto+json"

	typeCosign    = "cosign container image signature"
	typeStatement = "https://in-toto.io/Statement/"
	predicateSign = "https://sigstore.dev/cosign/sign/v1"
)

// evidence is a stored signature. As JSON it is the proof that is kept with an image.
type evidence struct {
	Format    Format `json:"format"`
	Payload   []byte `json:"payload,omitempty"`
	Signature []byte `json:"signature,omitempty"` // of the payload
	Bundle    []byte `json:"bundle,omitempty"`
}

// errOtherKey says that none of the keys has made the signature. Then the signed content proves
// nothing.
var errOtherKey = errors.New("is by another key")

// signedOther is a valid signature of something else.
type signedOther struct {
	key  Key
	what string
}

func (e *signedOther) Error() string {
	return fmt.Sprintf("by the key %s is of %s", e.key.Fingerprint, e.what)
}

// check returns which of the keys has signed the image. content is the image's manifest or index.
// An error completes "its signature ...".
func (e evidence) check(keys []Key, content []byte) (Key, error) {
	switch e.Format {
	case FormatSimple:
		return checkSimple(e.Payload, e.Signature, keys, content)
	case FormatBundle:
		return checkBundle(e.Bundle, keys, content)
	}
	return Key{}, fmt.Errorf("is in the format %q, which is not known", e.Format)
}

func signer(keys []Key, message, signature []byte) (Key, bool) {
	for _, k := range keys {
		if k.signed(message, signature) {
			return k, true
		}
	}
	return Key{}, false
}

// payload is the signed text of simple signing (containers-signature(5)).
type payload struct {
	Critical critical `json:"critical"`
	Optional any      `json:"optional"`
}

type critical struct {
	Identity struct {
		Reference string `json:"docker-reference"`
	} `json:"identity"`
	Image struct {
		Digest string `json:"docker-manifest-digest"`
	} `json:"image"`
	Type string `json:"type"`
}

func checkSimple(text, signature []byte, keys []Key, content []byte) (Key, error) {
	key, ok := signer(keys, text, signature)
	if !ok {
		return Key{}, errOtherKey
	}
	var p payload
	if err := decode(text, &p); err != nil {
		return Key{}, fmt.Errorf("has a payload that cannot be read: %w", err)
	}
	if p.Critical.Type != typeCosign {
		return Key{}, &signedOther{key, fmt.Sprintf("a %q, and not of an image", p.Critical.Type)}
	}
	return key, sameDigest(key, p.Critical.Image.Digest, content)
}

func sameDigest(key Key, signed string, content []byte) error {
	if signed == transport.DigestOf(content) {
		return nil
	}
	return &signedOther{key, fmt.Sprintf("another digest, %q: that is another image, or its list "+
		"of images for several platforms, or one of such a list", shortened(signed))}
}

// bundle has the fields that are used. The tlogEntries of verificationMaterial are not: keys need
// no log.
type bundle struct {
	MediaType string `json:"mediaType"`
	Material  struct {
		PublicKey   *struct{}    `json:"publicKey"`
		Certificate *certificate `json:"certificate"`
		Chain       *struct {
			Certificates []certificate `json:"certificates"`
		} `json:"x509CertificateChain"`
	} `json:"verificationMaterial"`
	Envelope *envelope         `json:"dsseEnvelope"`
	Message  *messageSignature `json:"messageSignature"`
}

type certificate struct {
	Raw []byte `json:"rawBytes"`
}

// envelope is a DSSE envelope.
type envelope struct {
	Payload     []byte `json:"payload"`
	PayloadType string `json:"payloadType"`
	Signatures  []struct {
		Sig []byte `json:"sig"`
	} `json:"signatures"`
}

// messageSignature is a signature of the manifest's bytes.
type messageSignature struct {
	Digest struct {
		Algorithm string `json:"algorithm"`
		Digest    []byte `json:"digest"`
	} `json:"messageDigest"`
	Signature []byte `json:"signature"`
}

func checkBundle(text []byte, keys []Key, content []byte) (Key, error) {
	var b bundle
	if err := decode(text, &b); err != nil {
		return Key{}, fmt.Errorf("is a bundle that cannot be read: %w", err)
	}
	if b.MediaType != mediaBundle {
		return Key{}, fmt.Errorf("is a bundle of the type %q: only %q is supported",
			shortened(b.MediaType), mediaBundle)
	}
	chain := b.Material.Certificate
	if b.Material.Chain != nil && len(b.Material.Chain.Certificates) > 0 {
		chain = &b.Material.Chain.Certificates[0]
	}
	switch {
	case chain != nil:
		return Key{}, byCertificate(chain.Raw)
	case b.Material.PublicKey == nil:
		return Key{}, errors.New("is a bundle that names no key")
	case b.Envelope != nil && b.Message == nil:
		return b.Envelope.check(keys, content)
	case b.Message != nil && b.Envelope == nil:
		return b.Message.check(keys, content)
	}
	return Key{}, errors.New("is a bundle with no signature, or with two kinds of them")
}

// byCertificate says that certificates are not verified.
func byCertificate(raw []byte) error {
	const says = "is by a certificate%s, which is not verified here (keyless): sign with a key"
	c, err := x509.ParseCertificate(raw)
	if err != nil {
		return fmt.Errorf(says, "")
	}
	return fmt.Errorf(says, " that expired on "+c.NotAfter.UTC().Format("2006-01-02"))
}

// statement is an in-toto statement.
type statement struct {
	Type    string `json:"_type"`
	Subject []struct {
		Digest map[string]string `json:"digest"`
	} `json:"subject"`
	PredicateType string `json:"predicateType"`
}

func (e *envelope) check(keys []Key, content []byte) (key Key, err error) {
	if len(e.Signatures) > maxOfOne {
		return Key{}, fmt.Errorf("is one of %d in a bundle, more than %d", len(e.Signatures),
			maxOfOne)
	}
	// The pre-authentication encoding of the DSSE protocol.
	message := fmt.Appendf(nil, "DSSEv1 %d %s %d %s", len(e.PayloadType), e.PayloadType,
		len(e.Payload), e.Payload)
	found := false
	for _, s := range e.Signatures {
		if key, found = signer(keys, message, s.Sig); found {
			break
		}
	}
	if !found {
		return Key{}, errOtherKey
	}
	if e.PayloadType != mediaInToto {
		return Key{}, &signedOther{key, fmt.Sprintf("a %q, and not of a statement about an image",
			shortened(e.PayloadType))}
	}
	var s statement
	if err := decode(e.Payload, &s); err != nil {
		return Key{}, fmt.Errorf("has a statement that cannot be read: %w", err)
	}
	if !strings.HasPrefix(s.Type, typeStatement) || s.PredicateType != predicateSign {
		return Key{}, &signedOther{key, fmt.Sprintf("a statement of the type %q, which does not "+
			"say that the image may be used", shortened(s.PredicateType))}
	}
	digest := strings.TrimPrefix(transport.DigestOf(content), "sha256:")
	other := ""
	for _, subject := range s.Subject {
		if other = subject.Digest["sha256"]; other == digest {
			return key, nil
		}
	}
	return Key{}, sameDigest(key, "sha256:"+other, content)
}

func (m *messageSignature) check(keys []Key, content []byte) (Key, error) {
	// The digest in the bundle is not signed. It only says which message is meant.
	digest := "sha256:" + hex.EncodeToString(m.Digest.Digest)
	if m.Digest.Algorithm != "SHA2_256" || digest != transport.DigestOf(content) {
		return Key{}, fmt.Errorf("is of another digest, %q (%s)", shortened(digest),
			shortened(m.Digest.Algorithm))
	}
	key, ok := signer(keys, content, m.Signature)
	if !ok {
		return Key{}, errOtherKey
	}
	return key, nil
}

// decode decodes untrusted JSON: one value, of a bounded depth and number of parts.
func decode(text []byte, to any) error {
	if err := bounded.Check(text); err != nil {
		return err
	}
	return json.Unmarshal(text, to)
}

// shortened bounds untrusted text in messages.
func shortened(text string) string { return text[:min(len(text), 100)] }

func parseProof(text []byte) (e evidence, err error) {
	if err = decode(text, &e); err != nil {
		return e, err
	}
	if len(e.Payload) > maxPayload || len(e.Bundle) > maxBundle {
		err = errors.New("it is too long")
	}
	return e, err
}

// signatureOf parses a signature in the annotation of a layer.
func signatureOf(annotation string) ([]byte, error) {
	sig, err := base64.StdEncoding.DecodeString(annotation)
	if err != nil || len(sig) == 0 {
		return nil, errors.New("cannot be read: it is not in base64")
	}
	return sig, nil
}
