package signature

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"

	"github.com/secure-systems-lab/go-securesystemslib/encrypted"
)

// minRSA is the smallest RSA key that is accepted, in bits.
const minRSA = 2048

// Key is a public key.
type Key struct {
	// Fingerprint is the SHA-256 of the key in the form of certificates (SPKI, RFC 5280, section
	// 4.1), as sha256:HEX.
	Fingerprint string
	public      crypto.PublicKey
}

// PEM is the key in the form that ParseKeys parses.
func (k Key) PEM() (string, error) {
	spki, err := x509.MarshalPKIXPublicKey(k.public)
	return string(pem.EncodeToMemory(&pem.Block{Type: pemPublic, Bytes: spki})), err
}

// The types of PEM blocks.
const (
	pemPublic      = "PUBLIC KEY"
	pemPublicRSA   = "RSA PUBLIC KEY"
	pemPrivate     = "PRIVATE KEY"
	pemPrivateEC   = "EC PRIVATE KEY"
	pemPrivateRSA  = "RSA PRIVATE KEY"
	pemSigstore    = "ENCRYPTED SIGSTORE PRIVATE KEY"
	pemCosign      = "ENCRYPTED COSIGN PRIVATE KEY"
	pemCertificate = "CERTIFICATE"
)

// ParseKeys parses public keys: PEM, as "cosign generate-key-pair" and "openssl pkey -pubout" write
// them.
func ParseKeys(text []byte) (keys []Key, err error) {
	for rest := text; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		var public any
		switch {
		case block.Type == pemPublic:
			public, err = x509.ParsePKIXPublicKey(block.Bytes)
		case block.Type == pemPublicRSA:
			public, err = x509.ParsePKCS1PublicKey(block.Bytes)
		case strings.HasSuffix(block.Type, pemPrivate):
			err = errors.New("it has a private key, and nobody needs that to verify: name the " +
				"public one, and keep this one secret")
		case block.Type == pemCertificate:
			err = errors.New("it has a certificate: take the public key out of it, with " +
				"\"openssl x509 -pubkey -noout\"")
		default:
			err = fmt.Errorf("it has a %q, which is no public key", block.Type)
		}
		if err != nil {
			return nil, err
		}
		key, err := newKey(public)
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	if len(keys) == 0 {
		return nil, errors.New("it has no public key in PEM, which begins with " +
			"-----BEGIN PUBLIC KEY-----")
	}
	return keys, nil
}

func newKey(public crypto.PublicKey) (Key, error) {
	switch k := public.(type) {
	case *ecdsa.PublicKey:
		if k.Curve != elliptic.P256() {
			return Key{}, fmt.Errorf("its key is on the curve %s: use P-256", k.Params().Name)
		}
	case *rsa.PublicKey:
		if k.N.BitLen() < minRSA {
			return Key{}, fmt.Errorf("its RSA key has %d bits: use at least %d", k.N.BitLen(),
				minRSA)
		}
	case ed25519.PublicKey:
	default:
		return Key{}, errors.New("its key is of a kind that is not supported: use ECDSA on " +
			"P-256, RSA or Ed25519")
	}
	spki, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		return Key{}, err
	}
	sum := sha256.Sum256(spki)
	return Key{public: public, Fingerprint: "sha256:" + hex.EncodeToString(sum[:])}, nil
}

func (k Key) signed(message, signature []byte) bool {
	sum := sha256.Sum256(message)
	switch public := k.public.(type) {
	case *ecdsa.PublicKey:
		return ecdsa.VerifyASN1(public, sum[:], signature)
	case *rsa.PublicKey:
		return rsa.VerifyPKCS1v15(public, crypto.SHA256, sum[:], signature) == nil
	case ed25519.PublicKey:
		// Cosign signs the message, or its hash (RFC 8032, Ed25519ph) if it is for a log.
		hash := sha512.Sum512(message)
		return ed25519.Verify(public, message, signature) || ed25519.VerifyWithOptions(public,
			hash[:], signature, &ed25519.Options{Hash: crypto.SHA512}) == nil
	}
	return false
}

// PrivateKey signs.
type PrivateKey struct {
	Key
	signer crypto.Signer
}

// Encrypted reports whether a private key in PEM needs a password.
func Encrypted(text []byte) bool {
	block, _ := pem.Decode(text)
	return block != nil && (block.Type == pemSigstore || block.Type == pemCosign)
}

// ParsePrivateKey parses a private key: cosign's, which is encrypted by the password, or plain PEM
// of PKCS #8, PKCS #1 (RSA) or SEC 1 (EC). No error shows a part of it.
func ParsePrivateKey(text, password []byte) (*PrivateKey, error) {
	block, rest := pem.Decode(text)
	for block != nil && block.Type == "EC PARAMETERS" { // openssl puts them first
		block, rest = pem.Decode(rest)
	}
	if block == nil {
		return nil, errors.New("it has no private key in PEM")
	}
	var private any
	var err error
	switch block.Type {
	case pemSigstore, pemCosign:
		var der []byte
		if der, err = encrypted.Decrypt(block.Bytes, password); err != nil {
			return nil, errors.New("its key cannot be decrypted: the password is wrong, or the " +
				"file is damaged")
		}
		private, err = x509.ParsePKCS8PrivateKey(der)
	case pemPrivate:
		private, err = x509.ParsePKCS8PrivateKey(block.Bytes)
	case pemPrivateEC:
		private, err = x509.ParseECPrivateKey(block.Bytes)
	case pemPrivateRSA:
		private, err = x509.ParsePKCS1PrivateKey(block.Bytes)
	default:
		return nil, fmt.Errorf("it has a %q: a private key of cosign, or a plain one in PEM, "+
			"is needed", block.Type)
	}
	if err != nil {
		return nil, errors.New("its private key cannot be read: it is damaged, or of a kind that " +
			"is not supported")
	}
	signer, ok := private.(crypto.Signer)
	if !ok {
		return nil, errors.New("its key cannot sign: use ECDSA on P-256, RSA or Ed25519")
	}
	key, err := newKey(signer.Public())
	if err != nil {
		return nil, err
	}
	return &PrivateKey{Key: key, signer: signer}, nil
}

// GenerateKey makes a key as cosign does: ECDSA on P-256. private is PEM, encrypted by the
// password, which may be empty; public is plain PEM.
func GenerateKey(password []byte) (private, public []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	secret, err := encrypted.Encrypt(der, password)
	if err != nil {
		return nil, nil, err
	}
	own, err := newKey(key.Public())
	if err != nil {
		return nil, nil, err
	}
	text, err := own.PEM()
	return pem.EncodeToMemory(&pem.Block{Type: pemSigstore, Bytes: secret}), []byte(text), err
}

func (p *PrivateKey) sign(message []byte) ([]byte, error) {
	if _, ok := p.public.(ed25519.PublicKey); ok {
		return p.signer.Sign(rand.Reader, message, crypto.Hash(0))
	}
	sum := sha256.Sum256(message)
	return p.signer.Sign(rand.Reader, sum[:], crypto.SHA256)
}
