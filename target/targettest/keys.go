package targettest

import (
	"bytes"
	"fmt"
	"slices"
)

// Key is one key=value of a text.
type Key struct{ Name, Value string }

// Keys are key=value pairs in the order of a text. They may be invalid.
type Keys []Key

// KV makes Keys from names and values in turn.
func KV(namesAndValues ...string) Keys {
	var ks Keys
	for i := 0; i+1 < len(namesAndValues); i += 2 {
		ks = append(ks, Key{namesAndValues[i], namesAndValues[i+1]})
	}
	return ks
}

// Get returns the value of a key, or "" if the key is missing.
func (ks Keys) Get(name string) string {
	v, _ := ks.Lookup(name)
	return v
}

// Lookup returns the value of a key, and whether the key is there.
func (ks Keys) Lookup(name string) (string, bool) {
	for _, k := range ks {
		if k.Name == name {
			return k.Value, true
		}
	}
	return "", false
}

// All returns all values of a key.
func (ks Keys) All(name string) []string {
	var list []string
	for _, k := range ks {
		if k.Name == name {
			list = append(list, k.Value)
		}
	}
	return list
}

// Set replaces the value of a key, or adds it.
func (ks *Keys) Set(name, value string) {
	for i := range *ks {
		if (*ks)[i].Name == name {
			(*ks)[i].Value = value
			return
		}
	}
	*ks = append(*ks, Key{name, value})
}

// Remove removes a key.
func (ks *Keys) Remove(name string) {
	*ks = slices.DeleteFunc(*ks, func(k Key) bool { return k.Name == name })
}

// Text returns the keys as a data segment (RFC 7143 6.1).
func (ks Keys) Text() []byte {
	var b []byte
	for _, k := range ks {
		b = append(append(append(append(b, k.Name...), '='), k.Value...), 0)
	}
	return b
}

// ParseText parses the keys of a complete text.
func ParseText(text []byte) (Keys, error) {
	if len(text) == 0 {
		return nil, nil
	}
	if text[len(text)-1] != 0 {
		return nil, fmt.Errorf("the text %q does not end in a NUL", text)
	}
	var ks Keys
	for pair := range bytes.SplitSeq(text[:len(text)-1], []byte{0}) {
		name, value, ok := bytes.Cut(pair, []byte{'='})
		if !ok || len(name) == 0 {
			return nil, fmt.Errorf("%q is not key=value", pair)
		}
		ks = append(ks, Key{string(name), string(value)})
	}
	return ks, nil
}
