package client

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"hash"
	"io"
)

// pieceSize is how much of a file is read at once: bytes.
const pieceSize = 512 << 10

// hashed reads a file that is being sent, parts of it possibly several times, and computes the
// digest of the whole file at the same time. It hashes a piece while the piece is being sent.
type hashed struct {
	from io.ReaderAt
	size int64
	off  int64 // offset of the next read

	memory []byte
	piece  []byte // the last piece that was read
	at     int64  // where the piece lies in the file

	sum  hash.Hash
	done int64         // how much of the file the digest has, or will have soon
	busy chan struct{} // closed when the digest has that much; nil: it does
}

func (h *hashed) reset() { h.sum, h.done = sha256.New(), 0 }

func (h *hashed) Read(p []byte) (int, error) {
	if h.off >= h.size {
		return 0, io.EOF
	}
	if h.off < h.at || h.off >= h.at+int64(len(h.piece)) {
		if err := h.load(); err != nil {
			return 0, err
		}
	}
	n := copy(p, h.piece[h.off-h.at:])
	h.off += int64(n)
	return n, nil
}

// load reads the piece at off.
func (h *hashed) load() error {
	h.settle()
	if h.memory == nil {
		h.memory = make([]byte, pieceSize)
	}
	p := h.memory[:min(pieceSize, h.size-h.off)]
	h.piece, h.at = nil, h.off
	if n, err := h.from.ReadAt(p, h.off); n < len(p) {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF // the file has become shorter
		}
		return err
	}
	h.piece = p
	end := h.off + int64(len(p))
	if h.done < h.off || h.done >= end {
		return nil
	}
	rest, busy := p[h.done-h.off:], make(chan struct{})
	h.done, h.busy = end, busy
	go func() {
		defer close(busy)
		h.sum.Write(rest) // never fails
	}()
	return nil
}

// settle waits until the digest has all data.
func (h *hashed) settle() {
	if h.busy != nil {
		<-h.busy
		h.busy = nil
	}
}

// seek goes to off. It reads and hashes everything before off that is not in the digest yet.
func (h *hashed) seek(ctx context.Context, off int64) error {
	for h.done < off {
		if err := ctx.Err(); err != nil {
			return err
		}
		h.off = h.done
		if err := h.load(); err != nil {
			return err
		}
	}
	h.off = off
	return nil
}

// digest returns the digest of the whole file, in the form of Repr-Digest (RFC 9530).
func (h *hashed) digest(ctx context.Context) (string, error) {
	if err := h.seek(ctx, h.size); err != nil {
		return "", err
	}
	h.settle()
	return "sha-256=:" + base64.StdEncoding.EncodeToString(h.sum.Sum(nil)) + ":", nil
}
