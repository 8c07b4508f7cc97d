package transport

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode/utf16"
)

// Files of digests are made by publishers in many ways: with sha256sum ("HEX  NAME", also with
// --tag), openssl ("SHA2-256(NAME)= HEX"), PowerShell or by hand, with names from another machine,
// or with the digest alone.

// sums are digests of one file, in hexadecimal; "": this one is unknown.
type sums struct{ sha256, sha512 string }

// sum is a digest in a file of digests.
type sum struct{ digest, name string }

const (
	hex256 = 64 // digits
	hex512 = 128
)

// sumsFor finds the digest of the file at a path: the SHA-256, or else the SHA-512. If there is
// only one, it is the file's, whatever its name.
func sumsFor(text []byte, path string) (sums, error) {
	all, name := sumsIn(plainText(text)), lastOf(path)
	for _, alone := range []bool{false, true} {
		for _, size := range []int{hex256, hex512} {
			digest, err := pick(all, size, path, alone)
			switch {
			case err != nil:
				return sums{}, err
			case digest != "" && size == hex256:
				return sums{sha256: digest}, nil
			case digest != "":
				return sums{sha512: digest}, nil
			}
		}
	}
	return sums{}, fmt.Errorf("they have no SHA-256 and no SHA-512 of %q", name)
}

// pick chooses among the digests of that many digits the one whose name matches most of the path;
// or, with alone, the only one.
func pick(all []sum, size int, path string, alone bool) (string, error) {
	best, found := 1, []string(nil)
	for _, s := range all {
		rank := 1
		if !alone {
			rank = likeness(s.name, path)
		}
		if len(s.digest) != size || rank < best || slices.Contains(found, s.digest) {
			continue
		}
		if rank > best {
			found = nil
		}
		best, found = rank, append(found, s.digest)
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1 && !alone:
		return "", fmt.Errorf("they name %q twice, with different digests: write the right one "+
			"into the address", lastOf(path))
	}
	return "", nil
}

// likeness says how well the name next to a digest matches a path: the number of path elements that
// agree, counted from the end. A name all of whose elements agree wins over all others. 0: the name
// is that of another file.
func likeness(name, path string) int {
	of, in := namesOf(name), namesOf(path)
	n := 0
	for n < len(of) && n < len(in) && of[len(of)-1-n] == in[len(in)-1-n] {
		n++
	}
	if n > 0 && n == len(of) {
		n += len(in)
	}
	return n
}

// namesOf splits a path of this or of another system.
func namesOf(path string) []string {
	return strings.FieldsFunc(strings.TrimPrefix(path, "./"),
		func(r rune) bool { return r == '/' || r == '\\' })
}

func lastOf(path string) string { return path[strings.LastIndexByte(path, '/')+1:] }

// plainText is a text in UTF-8, without a mark for its byte order. PowerShell writes UTF-16.
func plainText(text []byte) string {
	var order binary.ByteOrder
	switch {
	case bytes.HasPrefix(text, []byte{0xff, 0xfe}):
		order = binary.LittleEndian
	case bytes.HasPrefix(text, []byte{0xfe, 0xff}):
		order = binary.BigEndian
	default:
		return strings.TrimPrefix(string(text), "\ufeff")
	}
	units := make([]uint16, 0, len(text)/2)
	for p := text[2:]; len(p) > 1; p = p[2:] {
		units = append(units, order.Uint16(p))
	}
	return string(utf16.Decode(units))
}

// sumsIn finds all digests in a text. Other text is ignored: signatures, comments, digests of other
// kinds.
func sumsIn(text string) (all []sum) {
	other := false
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if words := strings.Fields(line); strings.HasPrefix(line, "#") {
			if len(words) == 3 && words[2] == "HASH" { // Gentoo: "# BLAKE2B HASH"
				other = digits(words[1]) == 0
			}
			continue
		}
		if s, ok := sumOf(line); ok && !other {
			s.digest = strings.ToLower(s.digest)
			all = append(all, s)
		}
	}
	return all
}

var (
	// tagged is "SHA256 (NAME) = HEX".
	tagged = regexp.MustCompile(`^([\w/-]+) ?\((.*)\) ?= ?([[:xdigit:]]+)$`)
	// digestWord is a digest in a line, also as sha256:HEX. sha256sum marks names with special
	// characters by a backslash.
	digestWord = regexp.MustCompile(
		`(?i)(?:^|[\s=:\\])(?:sha(?:256|512)[:=])?([[:xdigit:]]{128}|[[:xdigit:]]{64})(?:\s|$)`)
)

// sumOf parses a line.
func sumOf(line string) (s sum, ok bool) {
	if m := tagged.FindStringSubmatch(line); m != nil {
		_, err := hex.DecodeString(m[3])
		return sum{m[3], m[2]}, err == nil && len(m[3]) == digits(m[1])
	}
	at := digestWord.FindStringSubmatchIndex(line)
	if at == nil {
		return sum{}, false
	}
	s.digest = line[at[2]:at[3]]
	before := strings.Trim(line[:at[0]], " \t=:\\")
	s.name = strings.TrimPrefix(strings.TrimSpace(line[at[3]:]), "*")
	switch known := digits(before); {
	case before == "":
	case known != 0: // "SHA256 HEX NAME", as PowerShell writes it
		return s, known == len(s.digest)
	case s.name != "":
		return sum{}, false // text around a digest
	default:
		s.name = before // "NAME: HEX"
	}
	return s, true
}

// digits is how many hexadecimal digits a digest of that kind has; 0: an unknown kind.
func digits(kind string) int {
	switch strings.ToUpper(strings.ReplaceAll(kind, "-", "")) {
	case "SHA256", "SHA2256":
		return hex256
	case "SHA512", "SHA2512":
		return hex512
	}
	return 0
}
