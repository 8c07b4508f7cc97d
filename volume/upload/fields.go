package upload

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// The header fields of draft-ietf-httpbis-resumable-upload-12.
const (
	fieldComplete = "Upload-Complete"
	fieldOffset   = "Upload-Offset"
	fieldLength   = "Upload-Length"
	fieldLimit    = "Upload-Limit"

	// partialUpload is the media type of appended content (section 6).
	partialUpload = "application/partial-upload"

	// statusResumable is "104 (Upload Resumption Supported)".
	statusResumable = 104
)

// boolField reads a Boolean (RFC 9651 3.3.6). Any other value counts as a missing field, as the
// draft demands.
func boolField(h http.Header, name string) (value, ok bool) {
	switch item(h, name) {
	case "?1":
		return true, true
	case "?0":
		return false, true
	}
	return false, false
}

// intField reads an Integer that is not negative (RFC 9651 3.3.1), or returns -1.
func intField(h http.Header, name string) int64 {
	text := item(h, name)
	if text == "" || len(text) > 15 || strings.Trim(text, "0123456789") != "" {
		return -1
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return -1
	}
	return n
}

// item returns a bare item without its parameters, which are not used here; "" if there are several
// items.
func item(h http.Header, name string) string {
	values := h.Values(name)
	if len(values) != 1 {
		return ""
	}
	bare, _, _ := strings.Cut(values[0], ";")
	return strings.Trim(bare, " ")
}

func formatBool(b bool) string {
	if b {
		return "?1"
	}
	return "?0"
}

// digests are digests of RFC 9530 with an algorithm that can be checked, by algorithm.
type digests map[string][]byte

// algorithms are the lengths of the digests, in bytes.
var algorithms = map[string]int{"sha-256": 32, "sha-512": 64}

// digestField reads Content-Digest or Repr-Digest: a dictionary of byte sequences. It returns nil
// if there is no such field. If it cannot check any of the digests, it returns an error, because
// the sender relies on the check.
func digestField(h http.Header, name string) (digests, error) {
	values := h.Values(name)
	if len(values) == 0 {
		return nil, nil
	}
	found := digests{}
	for member := range strings.SplitSeq(strings.Join(values, ","), ",") {
		key, value, _ := strings.Cut(strings.Trim(member, " \t"), "=")
		value, _, _ = strings.Cut(value, ";")
		length, known := algorithms[key]
		if !known {
			continue
		}
		text, begins := strings.CutPrefix(strings.Trim(value, " "), ":")
		text, ends := strings.CutSuffix(text, ":")
		sum, err := base64.StdEncoding.DecodeString(text)
		if !begins || !ends || err != nil || len(sum) != length {
			return nil, fmt.Errorf("%s: the value of %s is not a digest: write it as "+
				"%s=:BASE64:, with %d bytes", name, key, key, length)
		}
		found[key] = sum
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("%s has no digest that is checked here: use sha-256 or sha-512",
			name)
	}
	return found, nil
}
