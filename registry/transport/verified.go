package transport

import (
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"hash"
	"io"
)

// Verified reads the whole blob. At its end the error is io.EOF only if the digest is right, and
// otherwise a *DigestError.
func (b *Blob) Verified(ctx context.Context) io.ReadCloser {
	v := &verifier{inner: b.Stream(ctx, 0, b.Desc.Size), hash: sha256.New(), of: b}
	if b.sum512 != "" {
		v.hash512 = sha512.New()
	}
	return v
}

// Read calls read with the whole blob, and verifies it.
func (b *Blob) Read(ctx context.Context, read func(in io.Reader) error) error {
	in := b.Verified(ctx)
	err := read(in)
	if _, wrong := io.Copy(io.Discard, in); wrong != nil {
		err = wrong // so read may have seen wrong content
	}
	return errors.Join(err, in.Close())
}

type verifier struct {
	inner   run
	hash    hash.Hash
	hash512 hash.Hash // nil: the SHA-512 is unknown
	of      *Blob
	failed  error // error of the first Read that failed, and of all after it
}

func (v *verifier) Read(p []byte) (int, error) {
	if v.failed != nil {
		return 0, v.failed
	}
	n, err := v.read(p)
	v.failed = err
	return n, err
}

func (v *verifier) read(p []byte) (int, error) {
	n, err := v.inner.Read(p)
	v.hash.Write(p[:n])
	if v.hash512 != nil {
		v.hash512.Write(p[:n])
	}
	if err == io.EOF {
		if wrong := v.wrong(); wrong != nil {
			v.inner.Doubt(func() error { return wrong })
			return n, wrong
		}
	}
	return n, err
}

// wrong compares the digest of all that was read.
func (v *verifier) wrong() error {
	if v.hash512 != nil {
		if got := hex.EncodeToString(v.hash512.Sum(nil)); got != v.of.sum512 {
			return &DigestError{Want: "sha512:" + v.of.sum512, Got: "sha512:" + got}
		}
	}
	got, want := DigestIn(v.hash), v.of.Desc.Digest.String()
	if v.of.learned != nil {
		want = v.of.learned.orFirst(got)
	}
	if got != want {
		return &DigestError{Want: want, Got: got}
	}
	return nil
}

func (v *verifier) Close() error { return v.inner.Close() }
