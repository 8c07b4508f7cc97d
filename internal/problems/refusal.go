package problems

import (
	"errors"
	"fmt"
	"strings"
)

// Refusal lists what is wrong with images that a person has named, as one error.
type Refusal struct {
	Verb string // completes "2 images ..."
	all  []error
}

// Add adds what is wrong with one image, which the error names.
func (r *Refusal) Add(err error) { r.all = append(r.all, err) }

// Err is the error of the whole; nil: nothing is wrong.
func (r *Refusal) Err() error {
	if len(r.all) == 0 {
		return nil
	}
	if len(r.all) == 1 {
		return r.all[0]
	}
	return fmt.Errorf("%d images %s:\n  %w", len(r.all), r.Verb, indented{errors.Join(r.all...)})
}

// indented is an error of several lines below another one.
type indented struct{ error }

func (i indented) Error() string { return strings.ReplaceAll(i.error.Error(), "\n", "\n  ") }
func (i indented) Unwrap() error { return i.error }
