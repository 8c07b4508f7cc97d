package main

import (
	"errors"
	"fmt"
	"strings"
)

// problems collects what is wrong with a configuration, each with the place to change it.
type problems struct {
	list []error
}

func (p *problems) add(source, format string, args ...any) {
	p.list = append(p.list, fmt.Errorf("%s: %s", source, fmt.Sprintf(format, args...)))
}

// addError adds an error that already names its source; a joined error counts as several.
func (p *problems) addError(err error) {
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		p.list = append(p.list, joined.Unwrap()...)
		return
	}
	p.list = append(p.list, err)
}

// err returns a *configError of all problems, or nil.
func (p *problems) err() error {
	if len(p.list) == 0 {
		return nil
	}
	return &configError{problems: p.list}
}

// configError is a wrong configuration: exit status 2.
type configError struct {
	problems []error
}

func (e *configError) Error() string {
	if len(e.problems) == 1 {
		return "wrong configuration: " + e.problems[0].Error()
	}
	var b strings.Builder
	fmt.Fprintf(&b, "wrong configuration, %d errors:", len(e.problems))
	for _, p := range e.problems {
		b.WriteString("\n  ")
		b.WriteString(strings.ReplaceAll(p.Error(), "\n", "\n    "))
	}
	return b.String()
}

func (e *configError) Unwrap() []error { return e.problems }
