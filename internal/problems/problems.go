// Package problems collects the mistakes in a configuration, so that a person sees all of them at
// once, each with the place to change.
//
// Each check adds to a List, and Err returns them as one *Error. A command that ends with an *Error
// was used wrongly.
package problems

import (
	"errors"
	"fmt"
	"strings"
)

// List is a list of mistakes. The zero value is empty.
type List struct{ all []error }

// Add adds a mistake. Source names the place to change.
func (l *List) Add(source, format string, args ...any) {
	l.all = append(l.all, fmt.Errorf("%s: %s", source, fmt.Sprintf(format, args...)))
}

// AddMissing adds that a setting is missing, and what to do.
func (l *List) AddMissing(source, format string, args ...any) {
	l.all = append(l.all, fmt.Errorf("%s is missing: %s", source, fmt.Sprintf(format, args...)))
}

// AddError adds an error that already names its source. A joined error counts as several.
func (l *List) AddError(err error) { l.all = append(l.all, each(err)...) }

// AddFrom adds an error that does not name its source. A joined error counts as several.
func (l *List) AddFrom(source string, err error) {
	for _, one := range each(err) {
		l.Add(source, "%v", one)
	}
}

func each(err error) []error {
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		return joined.Unwrap()
	}
	return []error{err}
}

// Err returns an *Error of all mistakes, or nil.
func (l *List) Err() error {
	if len(l.all) == 0 {
		return nil
	}
	return &Error{all: l.all}
}

// Error says that a configuration is wrong.
type Error struct{ all []error }

func (e *Error) Error() string {
	if len(e.all) == 1 {
		return "wrong configuration: " + e.all[0].Error()
	}
	var b strings.Builder
	fmt.Fprintf(&b, "wrong configuration, %d errors:", len(e.all))
	for _, p := range e.all {
		b.WriteString("\n  ")
		b.WriteString(strings.ReplaceAll(p.Error(), "\n", "\n    "))
	}
	return b.String()
}

// Unwrap returns each problem.
func (e *Error) Unwrap() []error { return e.all }

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
