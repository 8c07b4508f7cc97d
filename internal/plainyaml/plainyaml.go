// Package plainyaml reads untrusted YAML: a request, a policy, a file with settings. Its memory and
// time are in proportion to the length of the text.
//
// YAML by itself is not: an alias repeats the value of its anchor, so a few lines stand for
// gigabytes. And the library compares each key of a mapping with each other one, and keeps a
// message for every equal pair. So aliases are refused here, keys are compared here first, and the
// number of values is limited before they are read.
package plainyaml

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"go.yaml.in/yaml/v3"
)

const (
	// MaxValues is the limit for a file. It takes some 20 MiB.
	MaxValues = 64 << 10
	// maxKeys bounds the keys of a mapping. No type of ours has nearly as many.
	maxKeys = 1 << 10
)

// Parse parses one document, and returns its root, or nil if the document is empty. most is roughly
// how many values it may have. Decode the root with this package's Decode, not with the methods of
// yaml.Node.
func Parse(text []byte, most int) (*yaml.Node, error) {
	// Each value but the first one, or each pair of them, comes after one of these.
	marks := 0
	for _, c := range text {
		switch c {
		case ',', ':', '[', '{', '-', '?':
			marks++
		}
	}
	if marks > most {
		return nil, fmt.Errorf("it has more than %d values: it has %d of the characters that "+
			"come before one (, : - ? [ {)", most, marks)
	}
	var doc, more yaml.Node
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	if err := decoder.Decode(&doc); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if err := decoder.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, errors.New("it has more than one document: want one")
	}
	if doc.Kind == 0 || len(doc.Content) == 0 {
		return nil, nil
	}
	return doc.Content[0], check(doc.Content[0])
}

// check refuses aliases.
func check(n *yaml.Node) error {
	if n.Kind == yaml.AliasNode {
		return fmt.Errorf("line %d: a value begins with *, which makes it a reference to another "+
			"one: put it in quotes, or write the other one again", n.Line)
	}
	for _, c := range n.Content {
		if err := check(c); err != nil {
			return err
		}
	}
	return nil
}

// Decode decodes one document into a struct that has all allowed fields, or into an any.
func Decode(text []byte, most int, into any) error {
	root, err := Parse(text, most)
	if root == nil || err != nil {
		return err
	}
	if err := unique(root); err != nil {
		return err
	}
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	return decoder.Decode(into)
}

// unique refuses a key that occurs twice.
func unique(n *yaml.Node) error {
	if n.Kind == yaml.MappingNode {
		lines := make(map[string]int, len(n.Content)/2)
		for i := 0; i+1 < len(n.Content); i += 2 {
			key := n.Content[i]
			if line, twice := lines[key.Value]; twice && key.Kind == yaml.ScalarNode {
				return fmt.Errorf("line %d: %q is already defined at line %d", key.Line, key.Value,
					line)
			}
			lines[key.Value] = key.Line
		}
		if len(n.Content) > 2*maxKeys {
			return fmt.Errorf("line %d: more than %d keys in one place", n.Line, maxKeys)
		}
	}
	for _, c := range n.Content {
		if err := unique(c); err != nil {
			return err
		}
	}
	return nil
}
