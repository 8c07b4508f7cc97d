package chap

import (
	"crypto/subtle"
	"fmt"
	"io"
)

// redacted is shown in place of a secret.
const redacted = "[redacted]"

// Secret is a CHAP secret. Printing or marshalling never shows it. The zero value is no secret.
type Secret struct {
	// It is a pointer because fmt does not call the methods below for an unexported field of
	// somebody's struct, and does not follow pointers there either.
	value *string
}

// NewSecret returns the secret with these bytes.
func NewSecret(value string) Secret {
	if value == "" {
		return Secret{}
	}
	return Secret{value: &value}
}

// IsZero says whether there is no secret.
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

// MarshalText does not show the secret, nor does JSON by it.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }
