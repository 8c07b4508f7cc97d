package pdu

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDigest runs the examples of RFC 7143 A.4, with the digests as bytes on the wire.
func TestDigest(t *testing.T) {
	up, down := make([]byte, 32), make([]byte, 32)
	for i := range up {
		up[i], down[i] = byte(i), byte(31-i)
	}
	read10 := []byte{0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x14, 0, 0, 0, 0, 0,
		0x04, 0, 0, 0, 0, 0x14,
		0, 0, 0, 0x18, 0x28, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0, 0, 0, 0}
	for _, tt := range []struct {
		name string
		data []byte
		want []byte
	}{
		{"32 bytes of zeros", make([]byte, 32), []byte{0xaa, 0x36, 0x91, 0x8a}},
		{"32 bytes of ones", bytes.Repeat([]byte{0xff}, 32), []byte{0x43, 0xab, 0xa8, 0x62}},
		{"32 bytes up", up, []byte{0x4e, 0x79, 0xdd, 0x46}},
		{"32 bytes down", down, []byte{0x5c, 0xdb, 0x3f, 0x11}},
		{"SCSI Command READ(10)", read10, []byte{0x56, 0x3a, 0x96, 0xd9}},
	} {
		t.Run("A.4/"+tt.name, func(t *testing.T) {
			d := Digest(tt.data)
			require.Equal(t, tt.want, AppendDigest(nil, d))
			var wire [4]byte
			PutDigest(wire[:], d)
			require.Equal(t, tt.want, wire[:])
			require.Equal(t, d, Digest(tt.data[:5], nil, tt.data[5:]), "in pieces")
			require.Equal(t, d, UpdateDigest(UpdateDigest(0, tt.data[:7]), tt.data[7:]),
				"continued")
			require.NotEqual(t, d, Digest(append([]byte{tt.data[0] ^ 1}, tt.data[1:]...)),
				"a flipped bit must change the digest")
		})
	}
}

func TestSerialNumbers(t *testing.T) {
	for _, tt := range []struct {
		a, b uint32
		less bool
	}{
		{0, 0, false}, {0, 1, true}, {1, 0, false}, {0xffffffff, 0, true}, {0, 0xffffffff, false},
		{0xfffffff0, 0x10, true}, {0x10, 0xfffffff0, false}, {0, 0x7fffffff, true},
		{0x7fffffff, 0, false},
	} {
		require.Equal(t, tt.less, SNLess(tt.a, tt.b), "%#x < %#x", tt.a, tt.b)
	}
}
