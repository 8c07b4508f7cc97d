package login

import (
	"strconv"
	"strings"
	"unicode"
)

// open handles what the first text of a login must contain (RFC 7143 6.3): the initiator, the
// target, and the kind of session.
func (m *Machine) open(pairs []Pair) *refusal {
	var initiator, target, kind *string
	for i := range pairs {
		switch value := &pairs[i].Value; pairs[i].Key {
		case keyInitiatorName:
			initiator = value
		case keyTargetName:
			target = value
		case keySessionType:
			kind = value
		}
	}
	if initiator == nil {
		return refuse(StatusMissingParameter, "missing_initiator_name",
			"the first request has no InitiatorName")
	}
	name, ok := normalName(*initiator)
	if !ok {
		return refuse(StatusInitiatorError, "bad_initiator_name",
			"InitiatorName %s is not an iSCSI name", quote(*initiator))
	}
	m.res.InitiatorName = name
	if kind != nil {
		switch *kind {
		case Normal.String():
		case Discovery.String():
			m.res.SessionType = Discovery
		default:
			return refuse(StatusSessionTypeNotSupported, "bad_session_type",
				"unknown session type %s", quote(*kind))
		}
	}
	m.neg.discovery = m.res.SessionType == Discovery
	if target != nil {
		m.res.TargetName = *target
	}
	if !m.neg.discovery {
		if target == nil {
			return refuse(StatusMissingParameter, "missing_target_name",
				"the first request of a normal session has no TargetName")
		}
		if !SameName(*target, m.cfg.TargetName) {
			return refuse(StatusNotFound, "unknown_target", "there is no target %s here, only %s",
				quote(*target), m.cfg.TargetName)
		}
		m.res.TargetName = m.cfg.TargetName
	}
	if m.stage == OperationalNegotiation && m.cfg.Auth != nil {
		return refuse(StatusAuthenticationFailure, "no_auth_offered",
			"the initiator skips authentication, but the target requires it")
	}
	// Sent in all session types (RFC 7143 6.3.1).
	m.out = AppendPair(m.out, keyTargetPortalGroupTag, strconv.Itoa(int(m.cfg.PortalGroupTag)))
	return nil
}

// SameName says whether two texts are the same iSCSI name. Letter case does not matter (RFC 7143
// 4.2.7.1).
func SameName(a, b string) bool {
	x, ok := normalName(a)
	y, _ := normalName(b)
	return ok && x == y
}

// normalName puts an iSCSI name into the form that is compared (RFC 7143 4.2.7.2). It accepts names
// without a registered type, because some initiators have such names. ok is false if the text
// cannot be a name.
func normalName(name string) (normal string, ok bool) {
	normal = strings.ToLower(name)
	for _, other := range otherNames {
		if strings.HasPrefix(normal, other) {
			return "", false
		}
	}
	if normal == "" || len(normal) > maxNameLen || strings.ContainsFunc(normal, notOfName) {
		return "", false
	}
	return normal, true
}

// otherNames are prefixes of the names of peers that speak another protocol. An initiator with such
// a name would count as that peer, and share its claim to a disk.
var otherNames = []string{"cert:", "unix:", "tcp:"}

// notOfName finds white space, control characters and other characters that do not print.
func notOfName(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }

// printable removes unprintable characters from a text that people read.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, s)
}
