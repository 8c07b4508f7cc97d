package libvirt

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// maxNameLength is the longest iSCSI name, bytes (RFC 7143 4.2.7.2).
const maxNameLength = 223

var (
	// A date, a reversed domain name, and a free part after a colon (RFC 7143 4.2.7.4).
	iqnPattern = regexp.MustCompile(
		`^iqn\.[0-9]{4}-(0[1-9]|1[0-2])\.[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*(:.+)?$`)
	// RFC 7143 4.2.7.5; its own examples have upper-case digits.
	euiPattern = regexp.MustCompile(`^eui\.[0-9A-Fa-f]{16}$`)
	// RFC 7143 4.2.7.6: 64 or 128 bits.
	naaPattern = regexp.MustCompile(`^naa\.([0-9A-Fa-f]{16}|[0-9A-Fa-f]{32})$`)
)

// CheckName checks whether an initiator or a target can use a text as its iSCSI name. Names are
// normalised and then compared byte for byte (RFC 7143 4.2.7.2). A name that is not normalised is
// refused: if it were changed silently, it would differ from the name that a person types
// elsewhere.
func CheckName(name string) error {
	switch {
	case name == "":
		return errors.New("the name is empty: want one like iqn.2017-01.io.kubevirt:wrapper")
	case len(name) > maxNameLength:
		return fmt.Errorf("the name is %d bytes long: an iSCSI name has at most %d", len(name),
			maxNameLength)
	case strings.HasPrefix(name, "iqn."):
		return checkIQN(name)
	case strings.HasPrefix(name, "eui."):
		if !euiPattern.MatchString(name) {
			return fmt.Errorf("%q is not an EUI name: want \"eui.\" and 16 hexadecimal digits",
				name)
		}
	case strings.HasPrefix(name, "naa."):
		if !naaPattern.MatchString(name) {
			return fmt.Errorf("%q is not an NAA name: want \"naa.\" and 16 or 32 hexadecimal "+
				"digits", name)
		}
	default:
		return fmt.Errorf("%q is not an iSCSI name: it must begin with iqn., eui. or naa., as in "+
			"iqn.2017-01.io.kubevirt:wrapper", name)
	}
	return nil
}

func checkIQN(name string) error {
	for _, r := range name {
		switch {
		case 'a' <= r && r <= 'z', '0' <= r && r <= '9', r == '-', r == '.', r == ':':
		case 'A' <= r && r <= 'Z':
			return fmt.Errorf("%q has upper-case letters, and an iSCSI name must not: use %q", name,
				strings.ToLower(name))
		default:
			return fmt.Errorf("%q has the character %q: an iSCSI name has a-z, 0-9, '-', '.' and "+
				"':'", name, r)
		}
	}
	if !iqnPattern.MatchString(name) {
		return fmt.Errorf("%q is not an iSCSI qualified name: want "+
			"iqn.YEAR-MONTH.REVERSED-DOMAIN[:NAME], as in iqn.2017-01.io.kubevirt:wrapper", name)
	}
	return nil
}
