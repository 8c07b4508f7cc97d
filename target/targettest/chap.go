package targettest

import (
	"bytes"
	"cmp"
	"crypto/md5"
	"crypto/rand"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha3"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"strconv"
	"strings"
)

// CHAP is the initiator's side of CHAP (RFC 7143 12.1.3).
type CHAP struct {
	Offer              string // CHAP_A; default "5"
	Username, Password string

	// For mutual CHAP: the name and secret that the target must prove.
	TargetUsername, TargetPassword string
	// Identifier goes with our challenge for the target.
	Identifier byte

	Base64 bool // encode binary values in base64, not in hexadecimal
}

// Digest returns the hash for an algorithm number of CHAP_A, or nil if there is none.
func Digest(algorithm int) hash.Hash {
	switch algorithm {
	case 5:
		return md5.New()
	case 6:
		return sha1.New()
	case 7:
		return sha256.New()
	case 8:
		return sha3.New256()
	}
	return nil
}

// Respond returns the response to a challenge: the digest of identifier, secret and challenge (RFC
// 1994 4.1).
func Respond(algorithm int, identifier byte, secret string, challenge []byte) []byte {
	h := Digest(algorithm)
	h.Write(append(append([]byte{identifier}, secret...), challenge...))
	return h.Sum(nil)
}

func (a *CHAP) encode(b []byte) string {
	if a.Base64 {
		return "0b" + base64.StdEncoding.EncodeToString(b)
	}
	return "0x" + hex.EncodeToString(b)
}

// DecodeBinary decodes a binary value of a key (RFC 7143 6.1).
func DecodeBinary(s string) ([]byte, error) {
	switch {
	case strings.HasPrefix(s, "0x"), strings.HasPrefix(s, "0X"):
		digits := s[2:]
		if len(digits)%2 != 0 {
			digits = "0" + digits
		}
		return hex.DecodeString(digits)
	case strings.HasPrefix(s, "0b"), strings.HasPrefix(s, "0B"):
		return base64.StdEncoding.DecodeString(s[2:])
	}
	return nil, fmt.Errorf("%q is neither hexadecimal nor base64", s)
}

func splitList(s string) []string { return strings.Split(s, ",") }

// run goes through the security stage with CHAP.
func (a *CHAP) run(l *login, first Keys) error {
	offer := cmp.Or(a.Offer, "5")
	keys := append(first, Key{"AuthMethod", "CHAP"}, Key{"CHAP_A", offer})
	r, err := l.do(LoginPDU{CSG: StageSecurity, NSG: StageOperational, Keys: keys})
	if err != nil {
		return err
	}
	if got := r.Keys.Get("AuthMethod"); got != "CHAP" {
		return fmt.Errorf("AuthMethod=CHAP is answered with %q", got)
	}
	algorithm, id, challenge, err := parseChallenge(offer, r.Keys)
	if err != nil {
		return err
	}
	response := Respond(algorithm, id, a.Password, challenge)
	keys = KV("CHAP_N", a.Username, "CHAP_R", a.encode(response))
	mutual, ours := a.TargetPassword != "", make([]byte, 16)
	if mutual {
		_, _ = rand.Read(ours)
		keys = append(keys, KV("CHAP_I", strconv.Itoa(int(a.Identifier)), "CHAP_C",
			a.encode(ours))...)
	}
	r, err = l.do(LoginPDU{CSG: StageSecurity, NSG: StageOperational, Transit: true, Keys: keys})
	if err != nil {
		return err
	}
	if mutual {
		got, err := DecodeBinary(r.Keys.Get("CHAP_R"))
		if err != nil || !bytes.Equal(got,
			Respond(algorithm, a.Identifier, a.TargetPassword, ours)) ||
			r.Keys.Get("CHAP_N") != a.TargetUsername {
			return fmt.Errorf("the target does not prove its secret: CHAP_N=%s",
				r.Keys.Get("CHAP_N"))
		}
	} else if _, ok := r.Keys.Lookup("CHAP_R"); ok {
		return errors.New("the target sent a CHAP_R without a challenge")
	}
	if !r.Transit {
		return errors.New("the target does not leave the security stage")
	}
	return nil
}

// parseChallenge decodes the algorithm that the target chose, and its challenge.
func parseChallenge(offer string, keys Keys) (algorithm int, id byte, challenge []byte, err error) {
	choice := keys.Get("CHAP_A")
	offered := false
	for _, v := range splitList(offer) {
		offered = offered || v == choice
	}
	if algorithm, err = strconv.Atoi(choice); err != nil || !offered || Digest(algorithm) == nil {
		return 0, 0, nil, fmt.Errorf("CHAP_A=%s is answered with %q", offer, choice)
	}
	n, err := strconv.ParseUint(keys.Get("CHAP_I"), 0, 8)
	if err != nil {
		return 0, 0, nil, fmt.Errorf("CHAP_I=%s is not an identifier", keys.Get("CHAP_I"))
	}
	if challenge, err = DecodeBinary(keys.Get("CHAP_C")); err != nil || len(challenge) < 8 ||
		len(challenge) > 1024 {
		return 0, 0, nil, fmt.Errorf("CHAP_C=%s is not a challenge (%v)", keys.Get("CHAP_C"), err)
	}
	return algorithm, byte(n), challenge, nil
}
