package chap

import (
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzValues decodes numbers and binary values that a peer sends. An accepted value is within its
// bounds, and means the same when it is encoded again.
func FuzzValues(f *testing.F) {
	for _, seed := range []string{"", "0", "255", "256", "-1", "0x", "0xff", "0XfF", "0x123", "0b",
		"0bAQID", "0BAQ==", "0bAR==", "0b\n", "18446744073709551616",
		"0x" + strings.Repeat("00", MaxBinaryLen), "0x" + strings.Repeat("00", MaxBinaryLen+1)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, value string) {
		if b, err := ParseBinary(value, MaxBinaryLen); err == nil {
			require.NotEmpty(t, b)
			require.LessOrEqual(t, len(b), MaxBinaryLen)
			again, err := ParseBinary(FormatBinary(b), MaxBinaryLen)
			require.NoError(t, err)
			require.Equal(t, b, again)
		} else {
			require.Nil(t, b)
		}
		if n, err := ParseNumber(value); err == nil {
			again, err := ParseNumber(strconv.FormatUint(n, 10))
			require.NoError(t, err)
			require.Equal(t, n, again)
		}
	})
}

// FuzzExchange answers a challenge with anything. Nobody gets in, because the fuzzer cannot reach
// the right answer, and no error shows a secret.
func FuzzExchange(f *testing.F) {
	f.Add("5", "alice", "0x00", "1", "0x01", byte(15))
	f.Add("5,6,7,8", "storage", "0bAAAA", "256", "0x", byte(3))
	f.Add("", "", "", "", "", byte(0))
	auth := newAuth(f, Config{Initiator: aliceCred, Target: targetCred})
	f.Fuzz(func(t *testing.T, offer, name, response, identifier, challenge string, present byte) {
		e := auth.Begin(initiatorIQN)
		defer e.Close()
		var failure *Error
		if _, err := e.Start(offer); err != nil {
			require.ErrorAs(t, err, &failure)
		}
		var r Reply
		for i, field := range []struct {
			to   **string
			from string
		}{{&r.Name, name}, {&r.Response, response}, {&r.Identifier, identifier},
			{&r.Challenge, challenge}} {
			if present&(1<<i) != 0 {
				*field.to = &field.from
			}
		}
		proof, err := e.Verify(r)
		require.ErrorAs(t, err, &failure)
		require.Nil(t, proof)
		require.Empty(t, e.User())
		if !strings.Contains(name+offer, secretA) && !strings.Contains(name+offer, secretB) {
			require.NotContains(t, err.Error(), secretA)
			require.NotContains(t, err.Error(), secretB)
		}
	})
}
