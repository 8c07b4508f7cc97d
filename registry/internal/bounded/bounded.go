// Package bounded reads untrusted text and JSON without taking much memory, whatever the text
// claims. All of registry uses it to read the answers of registries. It knows no format.
package bounded

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
)

const (
	// MaxPiece bounds how much untrusted JSON a decoder keeps at once, in bytes: a string, a
	// number, white space, or an entry of a table of contents.
	MaxPiece = 1 << 20
	// maxJSONDepth bounds how deep arrays and objects are nested.
	maxJSONDepth = 64
	// maxUnknown bounds the unknown keys of an object between two known ones.
	maxUnknown = 1 << 10
	// maxJSONValues bounds the values of JSON that is decoded as a whole: a manifest or a
	// configuration. A value of two bytes may take a hundred.
	maxJSONValues = 64 << 10
)

// JSON passes JSON on to a decoder. It fails before the decoder would need much memory: a decoder
// keeps the whole of each value that it decodes, and the nesting.
type JSON struct {
	From io.Reader
	// Depth is how deep values are nested that the reader decodes piece by piece. A deeper value is
	// one piece.
	Depth  int
	Most   int // bytes of a piece
	values int // most values; 0: any number

	count   int
	level   int
	piece   int // bytes since the piece began
	text    bool
	escaped bool
}

func (b *JSON) Read(p []byte) (int, error) {
	n, err := b.From.Read(p)
	for _, c := range p[:n] {
		b.piece++
		switch {
		case b.escaped:
			b.escaped = false
		case b.text:
			b.escaped, b.text = c == '\\', c != '"'
		case c == '"':
			b.text = true
		case c == '{' || c == '[':
			if b.level++; b.level > maxJSONDepth {
				return 0, fmt.Errorf("its JSON is nested more than %d deep", maxJSONDepth)
			}
			b.count++
			b.next()
		case c == '}' || c == ']':
			b.level--
		case c == ',':
			b.count++
			b.next()
		case c == ':':
			b.next()
		}
		if b.piece > b.Most {
			return 0, fmt.Errorf("its JSON has a value of more than %d bytes", b.Most)
		}
		if b.values > 0 && b.count > b.values {
			return 0, fmt.Errorf("its JSON has more than %d values", b.values)
		}
	}
	return n, err
}

// Check checks JSON that will be decoded as a whole.
func Check(content []byte) error {
	_, err := io.Copy(io.Discard, &JSON{From: bytes.NewReader(content), Depth: maxJSONDepth,
		Most: len(content), values: maxJSONValues})
	return err
}

// next begins a piece.
func (b *JSON) next() {
	if b.level <= b.Depth {
		b.piece = 0
	}
}

// Fields calls read for each key of an object, with the decoder at the value. If read returns
// false, it does not know the key. Then the value is skipped; it may have most bytes.
func Fields(in *json.Decoder, most int64, read func(key string) (known bool, err error)) error {
	if err := delim(in, '{'); err != nil {
		return err
	}
	for skipped := 0; in.More(); {
		token, err := in.Token()
		if err != nil {
			return err
		}
		key, _ := token.(string)
		known, err := read(key)
		if skipped++; known {
			skipped = 0
		} else if err == nil && skipped > maxUnknown {
			err = fmt.Errorf("its JSON has more than %d unknown keys", maxUnknown)
		}
		if err == nil && !known {
			err = skip(in, most)
		}
		if err != nil {
			return err
		}
	}
	return delim(in, '}')
}

// Elements calls read for each element of an array, with the decoder at the element.
func Elements(in *json.Decoder, read func() error) error {
	if err := delim(in, '['); err != nil {
		return err
	}
	for in.More() {
		if err := read(); err != nil {
			return err
		}
	}
	return delim(in, ']')
}

// skip reads a value, and drops it. Reading many small values takes long, so there is a limit.
func skip(in *json.Decoder, most int64) error {
	begin := in.InputOffset()
	for level := 0; ; {
		token, err := in.Token()
		if err != nil {
			return err
		}
		switch token {
		case json.Delim('{'), json.Delim('['):
			level++
		case json.Delim('}'), json.Delim(']'):
			level--
		}
		if level == 0 {
			return nil
		}
		if in.InputOffset()-begin > most {
			return fmt.Errorf("its JSON has an unknown value of more than %d bytes", most)
		}
	}
}

func delim(in *json.Decoder, want json.Delim) error {
	got, err := in.Token()
	if err == nil && got != want {
		err = fmt.Errorf("it has %v instead of %v", got, want)
	}
	return err
}

// Read reads all of r, and fails if that is more than limit bytes.
func Read(r io.Reader, limit int64) ([]byte, error) {
	content, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(content)) > limit {
		err = fmt.Errorf("more than %d bytes", limit)
	}
	return content, err
}
