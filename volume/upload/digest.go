package upload

import (
	"bytes"
	"crypto/sha256"
	"crypto/sha512"
	"encoding"
	"encoding/base64"
	"fmt"
	"hash"
	"maps"
	"slices"
)

// summer computes digests of passing data, by algorithm. A nil summer does nothing.
type summer map[string]hash.Hash

func newSummer(names ...string) summer {
	s := summer{}
	for _, name := range names {
		switch name {
		case "sha-256":
			s[name] = sha256.New()
		case "sha-512":
			s[name] = sha512.New()
		}
	}
	return s
}

// summerFor computes the digests that are needed to check want.
func summerFor(want digests) summer { return newSummer(slices.Collect(maps.Keys(want))...) }

func (s summer) add(p []byte) {
	for _, h := range s {
		h.Write(p) // never fails
	}
}

// adding adds data to digests while the next data arrives. One goroutine calls its methods.
type adding struct {
	p    []byte
	done chan struct{} // closed when the data was added; nil: no data is being added
}

// start adds p. The caller must not change p before wait, or before spare of the same memory.
func (a *adding) start(s summer, p []byte) {
	a.wait()
	if len(s) == 0 || len(p) == 0 {
		return
	}
	done := make(chan struct{})
	a.p, a.done = p, done
	go func() {
		defer close(done)
		s.add(p)
	}()
}

// spare waits until the memory that the caller is about to write is not read any more.
func (a *adding) spare(p []byte) {
	if a.done != nil && &a.p[0] == &p[0] {
		a.wait()
	}
}

func (a *adding) wait() {
	if a.done != nil {
		<-a.done
		a.done = nil
	}
}

// check compares the digests of the data so far. field names the header in messages.
func (s summer) check(want digests, field string) error {
	for _, name := range slices.Sorted(maps.Keys(want)) {
		h := s[name]
		if h == nil {
			return wrong("%s: the digest %s must be announced when the upload begins: send sha-256",
				field, name)
		}
		if got := h.Sum(nil); !bytes.Equal(got, want[name]) {
			return wrong("%s: the data has the %s digest :%s:, and not the one that was sent: "+
				"it was changed on its way, or is of another file", field, name,
				base64.StdEncoding.EncodeToString(got))
		}
	}
	return nil
}

// save returns the state of the computation. load continues from it.
func (s summer) save() (map[string][]byte, error) {
	states := map[string][]byte{}
	for name, h := range s {
		m, ok := h.(encoding.BinaryMarshaler)
		if !ok {
			return nil, fmt.Errorf("the state of %s cannot be saved", name)
		}
		state, err := m.MarshalBinary()
		if err != nil {
			return nil, err
		}
		states[name] = state
	}
	return states, nil
}

func loadSummer(states map[string][]byte) (summer, error) {
	s := newSummer(slices.Collect(maps.Keys(states))...)
	for name, state := range states {
		u, ok := s[name].(encoding.BinaryUnmarshaler)
		if !ok {
			return nil, fmt.Errorf("the digest %q is unknown", name)
		}
		if err := u.UnmarshalBinary(state); err != nil {
			return nil, err
		}
	}
	return s, nil
}
