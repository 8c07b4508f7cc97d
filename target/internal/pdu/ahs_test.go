package pdu

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCheckAHS(t *testing.T) {
	for _, tt := range []struct {
		name string
		in   []byte
		bad  bool
	}{
		{"none", nil, false},
		{"11.2.2.3/extended CDB of 17 bytes", []byte{0, 2, 1, 0, 0xaa, 0, 0, 0}, false},
		{"11.2.2.4/bidirectional", []byte{0, 5, 2, 0, 1, 2, 3, 4}, false},
		{"two", []byte{0, 5, 2, 0, 1, 2, 3, 4, 0, 2, 1, 0, 0xaa, 0, 0, 0}, false},
		{"empty", []byte{0, 0, 0, 0}, false},
		{"as many as there can be", bytes.Repeat([]byte{0, 1, 9, 0}, 255), false},
		{"no type", []byte{0, 0}, true},
		{"longer than its room", []byte{0, 6, 2, 0, 1, 2, 3, 4}, true},
		{"much longer than its room", []byte{0xff, 0xff, 9, 0}, true},
		{"the second one is cut off", []byte{0, 5, 2, 0, 1, 2, 3, 4, 0, 5, 2, 0}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := CheckAHS(tt.in)
			require.Equal(t, tt.bad, err != nil, err)
		})
	}
}
