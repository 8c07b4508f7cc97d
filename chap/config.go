package chap

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	// minSecretLen is the shortest secret, in bytes. RFC 7143 9.2.1 requires 96 bits without IPsec.
	minSecretLen = 12
	// maxSecretLen and maxUsernameLen are the longest accepted ones, in bytes.
	maxSecretLen   = 255
	maxUsernameLen = 255
	// maxNameLen is the longest iSCSI name, in bytes (RFC 7143 4.2.7.2).
	maxNameLen = 223
)

// Credential is a user name (CHAP_N) and its secret. The zero value means no credential.
type Credential struct {
	Username string
	Secret   Secret
}

// IsZero reports whether both the name and the secret are missing.
func (c Credential) IsZero() bool { return c.Username == "" && c.Secret.IsZero() }

func (c Credential) equal(o Credential) bool {
	return c.Username == o.Username && c.Secret.Equal(o.Secret)
}

// Config decides who may log in. The zero value turns CHAP off. FromEnvironment makes it, and
// refuses unsafe values.
type Config struct {
	// Initiator is the credential that initiators must present.
	Initiator Credential
	// Target is the credential that the target presents to an initiator that asks (mutual CHAP). It
	// needs Initiator, and its secret must differ from Initiator's.
	Target Credential
	// InitiatorName, if not empty, is the only iSCSI initiator name that may use the credential
	// (RFC 7143 9.2). Letter case does not matter.
	InitiatorName string
}

// Enabled reports whether initiators must authenticate.
func (c Config) Enabled() bool { return !c.Initiator.IsZero() }

// Mutual reports whether the target can authenticate itself to an initiator.
func (c Config) Mutual() bool { return !c.Target.IsZero() }

// Equal reports whether two configurations admit the same initiators in the same way.
func (c Config) Equal(o Config) bool {
	return c.Initiator.equal(o.Initiator) && c.Target.equal(o.Target) &&
		strings.EqualFold(c.InitiatorName, o.InitiatorName)
}

var (
	errControl     = errors.New("contains a control character; is there a newline at its end?")
	errNotUTF8     = errors.New("is not valid UTF-8 text")
	errNameTooLong = fmt.Errorf("is longer than the %d bytes of an iSCSI name", maxNameLen)
	errUserTooLong = fmt.Errorf("is longer than %d bytes", maxUsernameLen)
	errSecretLong  = fmt.Errorf("is longer than %d bytes", maxSecretLen)
	errSecretShort = fmt.Errorf("is shorter than %d bytes, which is not safe for CHAP; use a "+
		"longer, random one", minSecretLen)
	errNameNotAName = errors.New("contains a space or an unprintable character, and an iSCSI " +
		"name has neither")
	errNameType = errors.New("is not an iSCSI name: it must begin with iqn., eui. or naa., " +
		"like iqn.1994-05.com.example:host")
	errNotIQN = errors.New("is not an iSCSI qualified name: want " +
		"iqn.YEAR-MONTH.REVERSED-DOMAIN:NAME, like iqn.1994-05.com.example:host")
	errNotEUI = errors.New(
		`is not an EUI name: want "eui." and 16 hexadecimal digits, like eui.02004567a425678d`)
	errNotNAA = errors.New(`is not an NAA name: want "naa." and 16 or 32 hexadecimal digits, ` +
		`like naa.52004567ba64678d`)
)

// Patterns for initiator names in lower case (RFC 7143 4.2.7.4 to 4.2.7.6).
var (
	iqnPattern = regexp.MustCompile(`^iqn\.[0-9]{4}-(0[1-9]|1[0-2])\.[^.:].*$`)
	euiPattern = regexp.MustCompile(`^eui\.[0-9a-f]{16}$`)
	naaPattern = regexp.MustCompile(`^naa\.([0-9a-f]{16}|[0-9a-f]{32})$`)
)

// checkUsername and checkSecret return what is wrong. The caller puts the name of the setting in
// front. Neither shows the value.
func checkUsername(name string) error {
	switch {
	case len(name) > maxUsernameLen:
		return errUserTooLong
	case !utf8.ValidString(name):
		return errNotUTF8
	case strings.ContainsFunc(name, unicode.IsControl):
		return errControl
	}
	return nil
}

func checkSecret(s Secret) error {
	for _, b := range s.bytes() {
		if b < 0x20 || b == 0x7f {
			return errControl
		}
	}
	switch n := len(s.bytes()); {
	case n < minSecretLen:
		return errSecretShort
	case n > maxSecretLen:
		return errSecretLong
	}
	return nil
}

// CheckInitiatorName checks an initiator name that a person has typed. The name must have a type
// (RFC 7143 4.2.7.3): without one it is probably a typing error. Letter case does not matter. The
// free part may have any name of a machine or a VM, for example iqn.2008-11.org.linux-kvm:My_VM,
// although the standard does not allow that. The error does not show the name; the caller puts it
// in front.
func CheckInitiatorName(name string) error {
	folded := strings.ToLower(name)
	switch {
	case len(folded) > maxNameLen:
		return errNameTooLong
	case !utf8.ValidString(name):
		return errNotUTF8
	case strings.ContainsFunc(folded, func(r rune) bool {
		return unicode.IsSpace(r) || !unicode.IsPrint(r)
	}):
		return errNameNotAName
	case strings.HasPrefix(folded, "iqn."):
		if !iqnPattern.MatchString(folded) {
			return errNotIQN
		}
	case strings.HasPrefix(folded, "eui."):
		if !euiPattern.MatchString(folded) {
			return errNotEUI
		}
	case strings.HasPrefix(folded, "naa."):
		if !naaPattern.MatchString(folded) {
			return errNotNAA
		}
	default:
		return errNameType
	}
	return nil
}
