package chap

import (
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// maxBinaryLen is the longest challenge or response, in bytes after decoding (RFC 7143 12.1.3).
const maxBinaryLen = 1024

var (
	errNotBinary   = errors.New("is neither hexadecimal (0x...) nor base64 (0b...)")
	errEmptyBinary = errors.New("is empty")
	errBadHex      = errors.New("contains a character that is not a hexadecimal digit")
	errBadBase64   = errors.New("is not well-formed base64")
	errLongBinary  = fmt.Errorf("is longer than %d bytes", maxBinaryLen)
	errNotNumber   = errors.New("is not a number")
)

// ParseBinary decodes a binary-value of RFC 7143 6.1: a hex-constant or a base64-constant of at
// least one and at most maxBinaryLen bytes. Errors do not show the value.
func ParseBinary(value string) ([]byte, error) {
	if len(value) < 2 || value[0] != '0' {
		return nil, errNotBinary
	}
	digits, bad := value[2:], errBadHex
	var out []byte
	var err error
	switch value[1] {
	case 'x', 'X':
		if len(digits)%2 != 0 { // the first byte lacks its leading zero
			digits = "0" + digits
		}
		out, err = hex.DecodeString(digits)
	case 'b', 'B':
		out, err = base64.StdEncoding.Strict().DecodeString(digits)
		if bad = errBadBase64; strings.ContainsAny(digits, "\r\n") { // the decoder skips them
			err = bad
		}
	default:
		return nil, errNotBinary
	}
	switch {
	case err != nil:
		return nil, bad
	case len(out) == 0:
		return nil, errEmptyBinary
	case len(out) > maxBinaryLen:
		return nil, errLongBinary
	}
	return out, nil
}

// FormatBinary encodes b as a hex-constant, which every initiator reads.
func FormatBinary(b []byte) string { return "0x" + hex.EncodeToString(b) }

// ParseNumber decodes a numerical-value of RFC 7143 6.1: a decimal-constant without leading zeros,
// or a hex-constant. Errors do not show the value.
func ParseNumber(value string) (uint64, error) {
	digits, base := value, 10
	switch {
	case len(value) > 2 && value[0] == '0' && (value[1] == 'x' || value[1] == 'X'):
		digits, base = value[2:], 16
	case len(value) > 1 && value[0] == '0':
		return 0, errNotNumber
	}
	n, err := strconv.ParseUint(digits, base, 64)
	if err != nil {
		return 0, errNotNumber
	}
	return n, nil
}

// redacted is shown in place of a secret.
const redacted = "[redacted]"

// Secret is a CHAP secret. Printing or marshalling never shows it. The zero value is no secret.
type Secret struct {
	// It is a pointer because fmt does not call the methods below for an unexported field of
	// another struct, and does not follow pointers there either.
	value *string
}

// NewSecret returns the secret with these bytes.
func NewSecret(value string) Secret {
	if value == "" {
		return Secret{}
	}
	return Secret{value: &value}
}

// IsZero reports whether there is no secret.
func (s Secret) IsZero() bool { return s.value == nil }

// Equal compares two secrets in a time that depends only on their lengths.
func (s Secret) Equal(o Secret) bool {
	return subtle.ConstantTimeCompare(s.bytes(), o.bytes()) == 1
}

func (s Secret) bytes() []byte {
	if s.value == nil {
		return nil
	}
	return []byte(*s.value)
}

// String does not show the secret.
func (s Secret) String() string {
	if s.IsZero() {
		return ""
	}
	return redacted
}

// Format does not show the secret, whatever the verb.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, s.String()) }

// MarshalText does not show the secret. JSON uses it, too.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }
