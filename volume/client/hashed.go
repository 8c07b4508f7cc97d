package client

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"hash"
	"io"
)

// hashed reads a file that is sent, perhaps parts of it several times, and computes the digest of
// all of it on the way.
type hashed struct {
	from io.ReaderAt
	size int64
	off  int64 // what is read next

	sum  hash.Hash
	done int64 // how much the digest has of the file
}

func (h *hashed) reset() { h.sum, h.done = sha256.New(), 0 }

func (h *hashed) Read(p []byte) (int, error) {
	if h.off >= h.size {
		return 0, io.EOF
	}
	p = p[:min(int64(len(p)), h.size-h.off)]
	n, err := h.from.ReadAt(p, h.off)
	if n == len(p) {
		err = nil
	} else if err == io.EOF {
		err = io.ErrUnexpectedEOF // somebody has made it shorter
	}
	if skip := h.done - h.off; skip >= 0 && skip < int64(n) {
		h.sum.Write(p[skip:n]) // never fails
		h.done += int64(n) - skip
	}
	h.off += int64(n)
	return n, err
}

// seek goes on at off. What lies before it is read, if that has not been yet.
func (h *hashed) seek(ctx context.Context, off int64) error {
	if h.done < off {
		if err := h.upTo(ctx, off); err != nil {
			return err
		}
	}
	h.off = off
	return nil
}

func (h *hashed) upTo(ctx context.Context, off int64) error {
	buf := make([]byte, 1<<20)
	for h.off = h.done; h.done < off; {
		if err := ctx.Err(); err != nil {
			return err
		}
		if _, err := h.Read(buf[:min(int64(len(buf)), off-h.done)]); err != nil {
			return err
		}
	}
	return nil
}

// digest is that of the whole file, as Repr-Digest has it (RFC 9530).
func (h *hashed) digest(ctx context.Context) (string, error) {
	if err := h.seek(ctx, h.size); err != nil {
		return "", err
	}
	return "sha-256=:" + base64.StdEncoding.EncodeToString(h.sum.Sum(nil)) + ":", nil
}
