// Package problems collects what is wrong with a configuration, so that a person is told of
// everything at once, and each time of the place to change it.
//
// Whoever checks a part of a configuration adds to a List; its Err is the error of the whole. An
// *Error is about what somebody has set: a command that ends with one was used wrongly.
package problems

import (
	"errors"
	"fmt"
	"strings"
)

// List is what is wrong. The zero value is empty.
type List struct{ all []error }

// Add adds a problem, of which source names the place to change.
func (l *List) Add(source, format string, args ...any) {
	l.all = append(l.all, fmt.Errorf("%s: %s", source, fmt.Sprintf(format, args...)))
}

// AddError adds an error that already names its source; a joined error counts as several.
func (l *List) AddError(err error) {
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		l.all = append(l.all, joined.Unwrap()...)
		return
	}
	l.all = append(l.all, err)
}

// Err is an *Error of all problems, or nil.
func (l *List) Err() error {
	if len(l.all) == 0 {
		return nil
	}
	return &Error{all: l.all}
}

// Error is a wrong configuration.
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
