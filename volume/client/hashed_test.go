package client

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestHashed: the digest is right, whichever parts of the file are read and however often.
func TestHashed(t *testing.T) {
	data := make([]byte, 3*pieceSize+1000)
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(data)
	sum := sha256.Sum256(data)
	want := "sha-256=:" + base64.StdEncoding.EncodeToString(sum[:]) + ":"
	pick := rand.New(random)
	for range 50 {
		h := &hashed{from: bytes.NewReader(data), size: int64(len(data))}
		h.reset()
		for range pick.IntN(6) {
			off := pick.Int64N(int64(len(data)) + 1)
			require.NoError(t, h.seek(t.Context(), off))
			n := pick.IntN(len(data) - int(off) + 1)
			got := make([]byte, n)
			_, err := io.ReadFull(h, got)
			require.NoError(t, err)
			require.True(t, bytes.Equal(data[off:int(off)+n], got))
		}
		digest, err := h.digest(t.Context())
		require.NoError(t, err)
		require.Equal(t, want, digest)
	}
	short := &hashed{from: bytes.NewReader(data), size: int64(len(data)) + 1}
	short.reset()
	_, err := short.digest(t.Context())
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}
