package kubevirt

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// element is an element of a document, with its place in bytes.
type element struct {
	name       string // with its prefix
	attributes []xml.Attr
	text       []byte // directly in the element
	children   []*element

	start, open int // begin and end of the start tag
	close, end  int // begin and end of the end tag; close is end if the start tag closes itself
}

// maxElements limits the memory for the elements and attributes of a document. A hook has 64 MiB of
// memory, and a domain of KubeVirt has some hundreds of both.
const maxElements = 64 << 10

func parse(document []byte) (*element, error) {
	d := xml.NewDecoder(bytes.NewReader(document))
	var root *element
	var path []*element
	count := 0
	for {
		at := int(d.InputOffset())
		token, err := d.RawToken()
		switch {
		case errors.Is(err, io.EOF) && len(path) > 0:
			return nil, fmt.Errorf("<%s> does not end", path[len(path)-1].name)
		case errors.Is(err, io.EOF) && root == nil:
			return nil, errors.New("there is no element")
		case errors.Is(err, io.EOF):
			return root, nil
		case err != nil:
			return nil, err
		}
		now := int(d.InputOffset())
		switch t := token.(type) {
		case xml.StartElement:
			if count += 1 + len(t.Attr); count > maxElements {
				return nil, fmt.Errorf("it has more than %d elements and attributes", maxElements)
			}
			e := &element{name: full(t.Name), attributes: t.Copy().Attr, start: at, open: now}
			switch {
			case len(path) > 0:
				above := path[len(path)-1]
				above.children = append(above.children, e)
			case root != nil:
				return nil, fmt.Errorf("there is a second root, <%s>", e.name)
			default:
				root = e
			}
			path = append(path, e)
		case xml.EndElement:
			if len(path) == 0 || path[len(path)-1].name != full(t.Name) {
				return nil, fmt.Errorf("</%s> ends nothing", full(t.Name))
			}
			e := path[len(path)-1]
			e.close, e.end = at, now
			path = path[:len(path)-1]
		case xml.CharData:
			if len(path) > 0 {
				above := path[len(path)-1]
				above.text = append(above.text, t...) // comments may cut it into many pieces
			}
		}
	}
}

func full(n xml.Name) string {
	if n.Space == "" {
		return n.Local
	}
	return n.Space + ":" + n.Local
}

// closesItself reports whether there is no end tag.
func (e *element) closesItself() bool { return e.open == e.end }

// child returns the first child with a name, or nil. The element may be nil.
func (e *element) child(name string) *element {
	if e == nil {
		return nil
	}
	for _, c := range e.children {
		if c.name == name {
			return c
		}
	}
	return nil
}

// all returns the children with a name. The element may be nil.
func (e *element) all(name string) (found []*element) {
	if e == nil {
		return nil
	}
	for _, c := range e.children {
		if c.name == name {
			found = append(found, c)
		}
	}
	return found
}

// attribute returns the value of an attribute, "" if there is none. The element may be nil.
func (e *element) attribute(name string) string {
	if e == nil {
		return ""
	}
	for _, a := range e.attributes {
		if full(a.Name) == name {
			return a.Value
		}
	}
	return ""
}

// words is the text of the element without the space around it. The element may be nil.
func (e *element) words() string {
	if e == nil {
		return ""
	}
	return strings.TrimSpace(string(e.text))
}

// tag is the start tag with some attributes set: name, value, name, value.
func (e *element) tag(set ...string) string {
	attributes := slices.Clone(e.attributes)
	for i := 0; i+1 < len(set); i += 2 {
		at := slices.IndexFunc(attributes, func(a xml.Attr) bool { return full(a.Name) == set[i] })
		if at < 0 {
			attributes = append(attributes, xml.Attr{Name: xml.Name{Local: set[i]}})
			at = len(attributes) - 1
		}
		attributes[at].Value = set[i+1]
	}
	var b bytes.Buffer
	b.WriteString("<" + e.name)
	for _, a := range attributes {
		b.WriteString(" " + full(a.Name) + `="`)
		_ = xml.EscapeText(&b, []byte(a.Value)) // a buffer has no errors
		b.WriteString(`"`)
	}
	b.WriteString(">")
	return b.String()
}

// change replaces the bytes from start to end.
type change struct {
	start, end int
	text       string
}

// changed returns the document with changes, which do not overlap. Changes at one place keep their
// order.
func changed(document []byte, changes []change) []byte {
	slices.SortStableFunc(changes, func(a, b change) int { return a.start - b.start })
	var out []byte
	at := 0
	for _, c := range changes {
		out = append(out, document[at:c.start]...)
		out = append(out, c.text...)
		at = c.end
	}
	return append(out, document[at:]...)
}
