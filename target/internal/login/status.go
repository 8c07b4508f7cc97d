package login

import (
	"fmt"
	"strconv"
)

// Status is the outcome of a Login Request: Status-Class in the upper byte, Status-Detail in the
// lower (RFC 7143 11.13.5).
type Status uint16

// All statuses of RFC 7143.
const (
	StatusSuccess                 Status = 0x0000
	StatusTargetMovedTemporarily  Status = 0x0101
	StatusTargetMovedPermanently  Status = 0x0102
	StatusInitiatorError          Status = 0x0200
	StatusAuthenticationFailure   Status = 0x0201
	StatusAuthorizationFailure    Status = 0x0202
	StatusNotFound                Status = 0x0203
	StatusTargetRemoved           Status = 0x0204
	StatusUnsupportedVersion      Status = 0x0205
	StatusTooManyConnections      Status = 0x0206
	StatusMissingParameter        Status = 0x0207
	StatusCannotIncludeInSession  Status = 0x0208
	StatusSessionTypeNotSupported Status = 0x0209
	StatusSessionDoesNotExist     Status = 0x020a
	StatusInvalidDuringLogin      Status = 0x020b
	StatusTargetError             Status = 0x0300
	StatusServiceUnavailable      Status = 0x0301
	StatusOutOfResources          Status = 0x0302
)

// String describes the status.
func (s Status) String() string {
	switch s {
	case StatusSuccess:
		return "success"
	case StatusTargetMovedTemporarily:
		return "target moved temporarily"
	case StatusTargetMovedPermanently:
		return "target moved permanently"
	case StatusInitiatorError:
		return "initiator error"
	case StatusAuthenticationFailure:
		return "authentication failure"
	case StatusAuthorizationFailure:
		return "authorization failure"
	case StatusNotFound:
		return "target not found"
	case StatusTargetRemoved:
		return "target removed"
	case StatusUnsupportedVersion:
		return "unsupported version"
	case StatusTooManyConnections:
		return "too many connections"
	case StatusMissingParameter:
		return "missing parameter"
	case StatusCannotIncludeInSession:
		return "cannot include in session"
	case StatusSessionTypeNotSupported:
		return "session type not supported"
	case StatusSessionDoesNotExist:
		return "session does not exist"
	case StatusInvalidDuringLogin:
		return "invalid during login"
	case StatusTargetError:
		return "target error"
	case StatusServiceUnavailable:
		return "service unavailable"
	case StatusOutOfResources:
		return "out of resources"
	}
	return fmt.Sprintf("Status(%04x)", uint16(s))
}

// refusal says why a login ends without a session. Its text contains no secret, challenge or
// response.
type refusal struct {
	status Status
	reason string // snake_case, stable
	text   string
}

func (r *refusal) Error() string { return r.text }

func refuse(status Status, reason, format string, args ...any) *refusal {
	return &refusal{status: status, reason: reason, text: fmt.Sprintf(format, args...)}
}

// maxQuoted is how many bytes of a peer's string a message may show.
const maxQuoted = 64

// quote makes an untrusted string short and harmless in a log.
func quote(s string) string {
	if len(s) > maxQuoted {
		return strconv.QuoteToASCII(s[:maxQuoted]) + "..."
	}
	return strconv.QuoteToASCII(s)
}
