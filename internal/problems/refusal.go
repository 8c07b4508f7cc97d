package problems

import (
	"errors"
	"fmt"
	"strings"
)

// Refusal collects mistakes in images that a person has named, and makes one error from them.
type Refusal struct {
	Verb string // completes "2 images ..."
	all  []error
}

// Add adds a mistake. The error names the image.
func (r *Refusal) Add(err error) { r.all = append(r.all, err) }

// Err returns one error for all mistakes, or nil.
func (r *Refusal) Err() error {
	if len(r.all) == 0 {
		return nil
	}
	if len(r.all) == 1 {
		return r.all[0]
	}
	return fmt.Errorf("%d images %s:\n  %w", len(r.all), r.Verb, indented{errors.Join(r.all...)})
}

// indented prints an error of several lines with an indent, below another error.
type indented struct{ error }

func (i indented) Error() string { return strings.ReplaceAll(i.error.Error(), "\n", "\n  ") }
func (i indented) Unwrap() error { return i.error }
