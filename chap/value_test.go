package chap

import (
	"encoding/base64"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

func TestParseBinary(t *testing.T) {
	full := sequence(1024)
	std := base64.StdEncoding
	for _, tt := range []struct {
		in   string
		want []byte // nil is an error
	}{
		{"0x00", []byte{0}},
		{"0xdeadBEEF", []byte{0xde, 0xad, 0xbe, 0xef}},
		{"0XDEADbeef", []byte{0xde, 0xad, 0xbe, 0xef}},
		{"0x1", []byte{1}}, // an odd constant lacks a leading zero: RFC 7143 6.1
		{"0x123", []byte{0x01, 0x23}},
		{"0b3q2+7w==", []byte{0xde, 0xad, 0xbe, 0xef}},
		{"0B3q2+7w==", []byte{0xde, 0xad, 0xbe, 0xef}},
		{"0x", nil},
		{"0b", nil},
		{"0b====", nil},
		{"", nil},
		{"0", nil},
		{"deadbeef", nil},
		{"1xdeadbeef", nil},
		{"0odeadbeef", nil},
		{"12345", nil},
		{"0xdeadbeeg", nil},
		{"0x de", nil},
		{"0x-1", nil},
		{"0b3q2+7w", nil},     // no padding
		{"0b3q2+7w=", nil},    // half of it
		{"0b3q2+7w===", nil},  // too much
		{"0b3q2-7w==", nil},   // the other alphabet
		{"0b3q2+\n7w==", nil}, // the decoder would skip it
		{"0b3q2+7x==", nil},   // bits that are not in the value
		{"0b3q2+7w==00", nil}, // something after it
		{"0xdeadbeef\x00", nil},
		{FormatBinary(full), full},
		{FormatBinary(append([]byte{0}, full...)), nil},
		{"0b" + std.EncodeToString(full), full},
		{"0b" + std.EncodeToString(append([]byte{0}, full...)), nil},
		{"0b" + std.EncodeToString(append([]byte{0, 0}, full...)), nil},
		{"0x0" + FormatBinary(full)[2:], nil}, // 2049 digits are 1025 bytes
		{"0x" + strings.Repeat("0", 1<<20), nil},
		{"0b" + strings.Repeat("A", 1<<20), nil},
	} {
		got, err := ParseBinary(tt.in, MaxBinaryLen)
		name := tt.in[:min(len(tt.in), 30)]
		if tt.want == nil {
			require.Error(t, err, name)
			require.Nil(t, got, name)
			if len(tt.in) > 4 {
				require.NotContains(t, err.Error(), tt.in[2:], "the error shows the value")
			}
			continue
		}
		require.NoError(t, err, name)
		require.Equal(t, tt.want, got, name)
	}
}

func TestParseNumber(t *testing.T) {
	for in, want := range map[string]uint64{"0": 0, "1": 1, "255": 255, "0x0": 0, "0xfF": 255,
		"0X10": 16, "0x001": 1,
		"18446744073709551615": 1<<64 - 1, "0xffffffffffffffff": 1<<64 - 1} {
		require.Equal(t, want, testtool.Must(ParseNumber(in))(t, in), in)
	}
	for _, in := range []string{"", "-1", "+1", "00", "01", "012", "0b1", "1 ", " 1", "1.0", "1_0",
		"0x", "0xg", "0x-1", "x1", "1~2", "Yes",
		"18446744073709551616", "0x10000000000000000"} {
		require.Error(t, testtool.Err(ParseNumber(in)), in)
	}
}
