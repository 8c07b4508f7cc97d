package login

import (
	"fmt"
	"strconv"
)

// Status is the outcome of a Login Request: Status-Class in the upper byte, Status-Detail in the
// lower (RFC 7143 11.13.5).
type Status uint16

// The statuses that the target answers with.
const (
	StatusSuccess                 Status = 0x0000
	StatusInitiatorError          Status = 0x0200
	StatusAuthenticationFailure   Status = 0x0201
	StatusAuthorizationFailure    Status = 0x0202
	StatusNotFound                Status = 0x0203
	StatusUnsupportedVersion      Status = 0x0205
	StatusTooManyConnections      Status = 0x0206
	StatusMissingParameter        Status = 0x0207
	StatusSessionTypeNotSupported Status = 0x0209
	StatusSessionDoesNotExist     Status = 0x020a
	StatusInvalidDuringLogin      Status = 0x020b
	StatusTargetError             Status = 0x0300
	StatusServiceUnavailable      Status = 0x0301
	StatusOutOfResources          Status = 0x0302
)

var statusNames = map[Status]string{
	StatusSuccess:                 "success",
	StatusInitiatorError:          "initiator error",
	StatusAuthenticationFailure:   "authentication failure",
	StatusAuthorizationFailure:    "authorization failure",
	StatusNotFound:                "target not found",
	StatusUnsupportedVersion:      "unsupported version",
	StatusTooManyConnections:      "too many connections",
	StatusMissingParameter:        "missing parameter",
	StatusSessionTypeNotSupported: "session type not supported",
	StatusSessionDoesNotExist:     "session does not exist",
	StatusInvalidDuringLogin:      "invalid during login",
	StatusTargetError:             "target error",
	StatusServiceUnavailable:      "service unavailable",
	StatusOutOfResources:          "out of resources",
}

// String describes the status.
func (s Status) String() string { return statusNames[s] }

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
