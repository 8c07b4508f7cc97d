package libvirt

import (
	"errors"
	"fmt"
)

// FieldError reports one wrong field of an argument. If several fields are wrong, their errors are
// joined; errors.As finds the first.
type FieldError struct {
	// Field is the path of the field: Go fields ("LUN.Portals[0].Host", "Device.Bus") in the
	// arguments of Disk and Secret, XML ("disk/source/host[1]/@name") in ParseDisk, and keys
	// ("disks[0].source.iscsi.portal") in ParseSources.
	Field   string
	Problem string // what is wrong and what is wanted, without the field's name
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Problem }

// text is the text of an element, unless err is set.
func text(what string, element interface{ Marshal() (string, error) }, err error) (string, error) {
	if err != nil {
		return "", err
	}
	s, err := element.Marshal()
	if err != nil {
		return "", fmt.Errorf("%s: %w", what, err)
	}
	return s, nil
}

// problems collects all errors in an argument.
type problems struct {
	list []error
	// name translates the path of a Go field into the caller's terms. nil: no translation.
	name func(field string) string
}

func (p *problems) add(field, format string, args ...any) {
	if p.name != nil {
		field = p.name(field)
	}
	p.list = append(p.list, &FieldError{Field: field, Problem: fmt.Sprintf(format, args...)})
}

// take adds the problems of another list. It translates the names of their fields once more.
func (p *problems) take(other *problems) {
	for _, err := range other.list {
		if wrong, ok := errors.AsType[*FieldError](err); ok {
			p.add(wrong.Field, "%s", wrong.Problem)
		}
	}
}

func (p *problems) addError(field string, err error) {
	if err != nil {
		p.add(field, "%v", err)
	}
}

func (p *problems) err() error { return errors.Join(p.list...) }
