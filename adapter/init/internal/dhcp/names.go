package dhcp

import "strings"

// maxName is the most bytes of a domain name (RFC 1035 3.1).
const maxName = 255

// readNames reads domain names with DNS's compression (RFC 1035 4.1.4, RFC 3397). A malformed name
// ends the list.
func readNames(b []byte) (names []string) {
	for at := 0; at < len(b); {
		name, next, ok := readName(b, at)
		if !ok {
			return names
		}
		if name != "" {
			names = append(names, name)
		}
		at = next
	}
	return names
}

// readName reads the name at an offset, and returns the offset after it. A pointer must lead
// backwards, so that no name is endless.
func readName(b []byte, at int) (name string, next int, ok bool) {
	var labels []string
	length, limit := 0, at
	jumped := false
	for at < len(b) {
		n := int(b[at])
		switch {
		case n == 0:
			if !jumped {
				next = at + 1
			}
			return strings.Join(labels, "."), next, true
		case n&0xc0 == 0xc0:
			if at+1 >= len(b) {
				return "", 0, false
			}
			to := n&0x3f<<8 | int(b[at+1])
			if to >= limit {
				return "", 0, false
			}
			if !jumped {
				next, jumped = at+2, true
			}
			at, limit = to, to
		case n&0xc0 != 0 || at+1+n > len(b):
			return "", 0, false
		default:
			label := text(b[at+1 : at+1+n])
			if length += n + 1; label == "" || length > maxName {
				return "", 0, false
			}
			labels = append(labels, label)
			at += 1 + n
		}
	}
	return "", 0, false
}

// text is a name that can be written into a file of lines, or "". Anything else than a name could
// add lines of its own to resolv.conf.
func text(b []byte) string {
	s := strings.TrimRight(string(b), "\x00")
	for _, c := range []byte(s) {
		letter := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
		if !letter && c != '-' && c != '_' && c != '.' {
			return ""
		}
	}
	return s
}

// RouterNames reads the domain names of an IPv6 router's DNSSL option (RFC 8106 5.2), which are
// never compressed and padded with zeros.
func RouterNames(b []byte) []string { return readNames(b) }
