package pages

import (
	"fmt"
	"html"
	"reflect"
	"strings"
)

// markup is a parsed template. It knows of Go's templates what the page needs: fields, if, else,
// range, with and end. A test compares it with html/template. That package would make the binary a
// quarter larger: it calls methods by name, so that the linker must keep all methods of all types.
//
// Every field is escaped for text and for attributes in quotes, and must stand nowhere else.
type markup []node

type node struct {
	text  string // as it is; "": the node is a field or a block
	block string // "if", "range" or "with"; "": a field
	field string // "": the dot itself
	body  markup
	other markup // after else
}

// parseMarkup parses a template.
func parseMarkup(source string) (markup, error) {
	rest := source
	m, end, err := parseNodes(&rest)
	if err == nil && end != "" {
		err = fmt.Errorf("{{%s}} ends nothing", end)
	}
	return m, err
}

// parseNodes parses up to the end of the source, or to an else or end.
func parseNodes(rest *string) (m markup, end string, err error) {
	for {
		text, after, found := strings.Cut(*rest, "{{")
		if text != "" {
			m = append(m, node{text: text})
		}
		if !found {
			*rest = ""
			return m, "", nil
		}
		action, after, found := strings.Cut(after, "}}")
		*rest = after
		word, field, _ := strings.Cut(action, " ")
		switch {
		case !found:
			return nil, "", fmt.Errorf("{{%s is not closed", action)
		case action == "else" || action == "end":
			return m, action, nil
		case strings.HasPrefix(action, "."):
			m = append(m, node{field: action[1:]})
			continue
		case word != "if" && word != "range" && word != "with" || !strings.HasPrefix(field, "."):
			return nil, "", fmt.Errorf("{{%s}} is not known here", action)
		}
		n := node{block: word, field: field[1:]}
		if n.body, end, err = parseNodes(rest); err == nil && end == "else" {
			n.other, end, err = parseNodes(rest)
		}
		if err == nil && end != "end" {
			err = fmt.Errorf("{{%s}} has no end", action)
		}
		if err != nil {
			return nil, "", err
		}
		m = append(m, n)
	}
}

// render writes the template with the fields of a struct.
func (m markup) render(b *strings.Builder, dot reflect.Value) error {
	for _, n := range m {
		if n.text != "" {
			b.WriteString(n.text)
			continue
		}
		v, err := n.value(dot)
		if err != nil {
			return err
		}
		if err := n.renderValue(b, dot, v); err != nil {
			return err
		}
	}
	return nil
}

// value follows the names of the node's field.
func (n *node) value(dot reflect.Value) (reflect.Value, error) {
	if n.field == "" {
		return dot, nil
	}
	for name := range strings.SplitSeq(n.field, ".") {
		if dot = reflect.Indirect(dot); dot.Kind() == reflect.Struct {
			dot = dot.FieldByName(name)
		} else {
			dot = reflect.Value{}
		}
		if !dot.IsValid() {
			return dot, fmt.Errorf("there is no field %q", n.field)
		}
	}
	return dot, nil
}

func (n *node) renderValue(b *strings.Builder, dot, v reflect.Value) error {
	if n.block == "" {
		b.WriteString(html.EscapeString(fmt.Sprint(v.Interface())))
		return nil
	}
	if v.IsZero() || v.Kind() == reflect.Slice && v.Len() == 0 {
		return n.other.render(b, dot)
	}
	switch n.block {
	case "if":
		return n.body.render(b, dot)
	case "with":
		return n.body.render(b, v)
	}
	for i := range v.Len() {
		if err := n.body.render(b, v.Index(i)); err != nil {
			return err
		}
	}
	return nil
}
