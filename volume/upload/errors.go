package upload

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/unpack"
	"kubevirt.io/disk/volume/api"
)

// codes are the codes for HTTP statuses.
var codes = map[int]api.Code{
	http.StatusNotFound: api.CodeNotFound, http.StatusConflict: api.CodeBusy,
	http.StatusRequestEntityTooLarge: api.CodeTooLarge,
	http.StatusServiceUnavailable:    api.CodeUnavailable,
	http.StatusInsufficientStorage:   api.CodeLimit,
}

// refusal makes the answer to a refused request.
func refusal(status int, format string, args ...any) *api.Error {
	code := cmp.Or(codes[status], api.CodeInvalid)
	return &api.Error{Code: code, Status: status, Message: fmt.Sprintf(format, args...)}
}

// wrong returns the error for a request that contradicts itself or its data.
func wrong(format string, args ...any) error {
	return refusal(http.StatusBadRequest, format, args...)
}

func tooLarge(format string, args ...any) error {
	return refusal(http.StatusRequestEntityTooLarge, format, args...)
}

// refusedError says why data cannot be the content of a volume. It completes the sentence "the
// upload ...".
type refusedError struct{ reason string }

func (e *refusedError) Error() string { return e.reason }

func refuse(format string, args ...any) error {
	return &refusedError{reason: fmt.Sprintf(format, args...)}
}

// errCut says that a stream ended before its data did. The data may be right.
var errCut = errors.New("the upload was interrupted")

// explain makes an answer from an error. Unknown errors come from the volumes, or are internal.
func explain(err error) error {
	var refused *refusedError
	var content *image.Error
	switch {
	case err == nil, errors.As(err, new(*api.Error)):
		return err
	case errors.Is(err, errCut):
		// The client still waits, so it has not ended the upload: the server stops, or the volume
		// is deleted.
		return refusal(http.StatusServiceUnavailable, "%v: send it again", errCut)
	case errors.As(err, &refused):
		return refusal(http.StatusUnprocessableEntity, "the upload %s", refused.reason)
	case errors.As(err, new(*unpack.Error)):
		return refusal(http.StatusUnprocessableEntity, "the upload %v", err)
	case errors.As(err, &content):
		return refusal(http.StatusUnprocessableEntity, "the upload %s", content.Explain())
	}
	return err
}
