package pdu

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzDecode decodes any header by its opcode, and encodes accepted ones.
func FuzzDecode(f *testing.F) {
	for _, g := range goldens {
		h := header(f, g.hex)
		f.Add(h[:])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < HeaderLen {
			return
		}
		h := Header(b[:HeaderLen])
		p := newByOpcode(h.Opcode())
		if p == nil {
			return
		}
		if err := p.Decode(&h); err != nil {
			var fe *FieldError
			require.True(t, errors.As(err, &fe))
			return
		}
		var again Header
		p.Encode(&again)
		q := fresh(p)
		require.NoError(t, q.Decode(&again))
		require.Equal(t, p, q)
	})
}
