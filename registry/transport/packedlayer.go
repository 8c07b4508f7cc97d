package transport

import (
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/zstd"
)

// maxLayerWindow is how far back a layer in zstd may refer, in bytes.
const maxLayerWindow = 16 << 20

// packedDigest is the digest of a layer's file in an archive. The archive has the digest of the
// content. If the file is compressed, as crane, ko and kaniko write it, its own digest is another.
// Then all of it is read once, and its content compared.
func packedDigest(ctx context.Context, f *os.File, m member, content v1.Hash) (v1.Hash, error) {
	head := make([]byte, 6)
	n, err := f.ReadAt(head[:min(int64(len(head)), m.size)], m.off)
	kind := compression(head[:n])
	if kind == "" || err != nil && err != io.EOF {
		return content, err
	}
	file := sha256.New()
	in := io.TeeReader(&fileRun{ctx: ctx, file: f, off: m.off, left: m.size}, file)
	var out io.Reader
	switch kind {
	case "gzip":
		out, err = gzip.NewReader(in)
	case "zstd":
		var z *zstd.Decoder
		if z, err = zstd.NewReader(in, zstd.WithDecoderConcurrency(1),
			zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxLayerWindow)); err == nil {
			defer z.Close()
			out = z
		}
	default:
		err = errors.New("it is compressed by " + kind + ", and gzip and zstd are known")
	}
	if err != nil {
		return content, err
	}
	inside := sha256.New()
	if _, err := io.Copy(inside, out); err != nil {
		return content, err
	}
	if got := DigestIn(inside); got != content.String() {
		return content, &DigestError{Want: content.String(), Got: got}
	}
	if _, err := io.Copy(io.Discard, in); err != nil {
		return content, err
	}
	return v1.NewHash(DigestIn(file))
}
