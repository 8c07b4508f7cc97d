package api

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
)

// Code tells a program why a request was refused.
type Code string

const (
	CodeInvalid      Code = "invalid"      // the request is malformed, or contradicts itself
	CodeUnauthorized Code = "unauthorized" // no token or certificate, or a wrong one
	CodeForbidden    Code = "forbidden"    // a browser asks for a page of another web site
	CodeNotFound     Code = "not-found"    // there is no such volume
	CodeDiffers      Code = "differs"      // the name has another volume: see Differs
	CodeInUse        Code = "in-use"       // initiators use it: see Users
	CodeBusy         Code = "busy"         // another operation is under way: try again
	CodeHasData      Code = "has-data"     // the volume takes no upload
	CodeTooLarge     Code = "too-large"    // the data is larger than the volume, or than allowed
	CodeLimit        Code = "limit"        // a limit of the server is reached
	CodeUnavailable  Code = "unavailable"  // the server cannot do it now: try again
	CodeFailed       Code = "failed"       // the operation failed
)

// status is the HTTP status of each code.
var status = map[Code]int{
	CodeInvalid: 400, CodeUnauthorized: 401, CodeForbidden: 403, CodeNotFound: 404,
	CodeDiffers: 409, CodeInUse: 409, CodeBusy: 409, CodeHasData: 409, CodeTooLarge: 413,
	CodeLimit:       507,
	CodeUnavailable: 503,
	CodeFailed:      500,
}

// Error is a refusal. It is the body of every unsuccessful answer.
type Error struct {
	Code    Code   `json:"code" yaml:"code"`
	Message string `json:"error" yaml:"error"` // for people: what is wrong, and what to do about it
	// Differs are the fields in which the volume differs from the request.
	Differs []Difference `json:"differs,omitempty" yaml:"differs,omitempty"`
	// Users are the names of the initiators that use the volume.
	Users []string `json:"users,omitempty" yaml:"users,omitempty"`
	// Status is the HTTP status, if it is not the usual one of the code.
	Status int `json:"-" yaml:"-"`
}

// Difference is a field in which the volume differs from the request.
type Difference struct {
	Field string `json:"field" yaml:"field"` // as in the request, such as copy.mode
	Is    string `json:"is" yaml:"is"`
	Asked string `json:"asked" yaml:"asked"`
}

// Errorf makes a refusal.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

func (e *Error) Error() string { return e.Message }

// Is reports whether an error is, or wraps, a refusal with a code.
func Is(err error, code Code) bool {
	refused, ok := errors.AsType[*Error](err)
	return ok && refused.Code == code
}

// HTTPStatus is the status of the answer.
func (e *Error) HTTPStatus() int {
	return cmp.Or(e.Status, status[e.Code], 500)
}

// Differ refuses a request because the volume of that name differs from it.
func Differ(name string, all []Difference) *Error {
	said := make([]string, len(all))
	for i, d := range all {
		said[i] = fmt.Sprintf("its %s is %s, and not %s", d.Field, d.Is, d.Asked)
	}
	return &Error{Code: CodeDiffers, Differs: all, Message: fmt.Sprintf("the volume %q exists "+
		"and differs: %s; request it as it is, use another name, or delete it first", name,
		strings.Join(said, ", "))}
}
