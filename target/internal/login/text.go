package login

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strings"
	"unicode/utf8"
)

const (
	maxKeyLen = 63 // bytes (RFC 7143 6.1, standard-label)
	// bytes of a value, or of one item of a list, unless the standard says otherwise (6.1)
	maxValueLen = 255
	maxNameLen  = 223 // bytes of an iSCSI name (4.2.7.2)
)

// These values can only be answers. They can be neither proposed nor declared (RFC 7143 6.2).
const (
	valueReject        = "Reject"
	valueIrrelevant    = "Irrelevant"
	valueNotUnderstood = "NotUnderstood"
	valueNone          = "None"
	valueYes           = "Yes"
	valueNo            = "No"
)

// Pair is one key=value.
type Pair struct{ Key, Value string }

// errUnended means that the last pair has no zero byte after it.
var errUnended = errors.New("the last key=value pair does not end in a zero byte")

// ParsePairs splits the text of one negotiation step (RFC 7143 6.1). Each pair has a key of at most
// 63 characters and a value of UTF-8 text, and ends with a zero byte. A key may be unknown, and may
// begin with a capital or a small letter. An extra zero byte is ignored, because some initiators
// count the padding of a data segment as text. Errors do not show values.
func ParsePairs(data []byte) ([]Pair, error) {
	var pairs []Pair
	for len(data) > 0 {
		end := bytes.IndexByte(data, 0)
		if end < 0 {
			return nil, errUnended
		}
		item := data[:end]
		data = data[end+1:]
		if len(item) == 0 {
			continue
		}
		key, value, found := bytes.Cut(item, []byte{'='})
		switch {
		case !found:
			return nil, errors.New("text without = where a key=value pair is expected")
		case len(key) == 0:
			return nil, errors.New("a key=value pair without a key")
		case len(key) > maxKeyLen:
			return nil, fmt.Errorf("key %s has %d characters, over the limit of %d",
				quote(string(key)), len(key), maxKeyLen)
		case bytes.ContainsFunc(key, notOfKey):
			return nil, fmt.Errorf("key %s has a character that is not allowed in a key",
				quote(string(key)))
		case !utf8.Valid(value):
			return nil, fmt.Errorf("the value of key %s is not UTF-8", key)
		}
		p := Pair{Key: string(key), Value: string(value)}
		if n, limit := longest(p), maxLen(p.Key); n > limit {
			return nil, fmt.Errorf("the value of key %s has %d bytes, over the limit of %d", p.Key,
				n, limit)
		}
		pairs = append(pairs, p)
	}
	return pairs, nil
}

// AppendPair appends key=value and its zero byte.
func AppendPair(dst []byte, key, value string) []byte {
	dst = append(dst, key...)
	dst = append(dst, '=')
	dst = append(dst, value...)
	return append(dst, 0)
}

// notOfKey finds characters that a key cannot have: a standard-label has letters, digits and a few
// marks. X#NodeArchitecture and similar keys also have a #.
func notOfKey(r rune) bool {
	switch {
	case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
		return false
	}
	return !strings.ContainsRune(".-+@_#", r)
}

// maxLen is the longest value of a key, in bytes.
func maxLen(key string) int {
	switch key {
	case keyChapC, keyChapR:
		return math.MaxInt // the decoder limits the length after decoding
	case keyInitiatorName, keyTargetName:
		return maxNameLen
	}
	return maxValueLen
}

// longest is the length that maxLen limits: of a value, or of a list's longest item.
func longest(p Pair) int {
	switch p.Key {
	case keyAuthMethod, keyChapA, keyHeaderDigest, keyDataDigest, keyTaskReporting:
		n := 0
		for item := range strings.SplitSeq(p.Value, ",") {
			n = max(n, len(item))
		}
		return n
	}
	return len(p.Value)
}

// checkPairs checks the rules for every negotiation: no key comes twice (RFC 7143 6.3, 6.4), and no
// reserved word is proposed (6.2). seen holds the keys of the negotiation so far; checkPairs adds
// the new ones.
func checkPairs(pairs []Pair, seen map[string]struct{}) *refusal {
	for _, p := range pairs {
		if _, twice := seen[p.Key]; twice {
			return refuse(StatusInitiatorError, "duplicate_key", "key %s was sent twice", p.Key)
		}
		seen[p.Key] = struct{}{}
		switch p.Key {
		case keyChapN, keyInitiatorAlias: // free text
			continue
		case keyAuthMethod: // it may answer the target's proposal
			continue
		}
		switch p.Value {
		case valueReject, valueIrrelevant, valueNotUnderstood:
			return refuse(StatusInitiatorError, "reserved_value",
				"key %s has the value %s, which can only be an answer", p.Key, p.Value)
		}
	}
	return nil
}
