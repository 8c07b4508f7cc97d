package transport

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"strings"
)

// unproven are the bytes that a transfer has brought of a file whose digest is unknown. If one
// answer has brought all of them, they are of one file. After a broken connection another answer
// may bring the rest if it has the same strong validator (RFC 9110, section 8.8.1) at the same
// address. Otherwise it has to begin with the same bytes again.
type unproven struct {
	start   int64     // offset at which the transfer has begun
	hash    hash.Hash // of the bytes that have come
	address string    // of the answer, after all redirects
	tag     string    // its entity tag; "": it had no strong one
}

func newUnproven(start int64) *unproven { return &unproven{start: start, hash: sha256.New()} }

// add hashes bytes that came.
func (u *unproven) add(p []byte) {
	if u != nil {
		u.hash.Write(p)
	}
}

// goesOn reports whether an answer may bring the rest from off on.
func (u *unproven) goesOn(res *http.Response, off int64) bool {
	if u == nil || off == u.start {
		return true
	}
	address, tag := validator(res)
	return tag != "" && tag == u.tag && address == u.address
}

// validator identifies the file of an answer. The query is a part of the address: it may say which
// file it is.
func validator(res *http.Response) (address, tag string) {
	if tag = res.Header.Get("ETag"); strings.HasPrefix(tag, "W/") {
		tag = ""
	}
	return res.Request.URL.String(), tag
}

// errOtherFile says that the bytes before a broken connection are not those of the next answer.
var errOtherFile = errors.New("it has another file now than before the connection broke: it was " +
	"replaced, or servers behind the address differ; try again, or name the right file by its " +
	"digest (@sha256:DIGEST)")

// pass reads over the bytes that have come before, in an answer that begins at at. off is where the
// transfer goes on. It is an error if these bytes differ.
func (u *unproven) pass(res *http.Response, at, off int64) error {
	before := off
	if u != nil {
		before = max(u.start, at)
	}
	if _, err := io.CopyN(io.Discard, res.Body, before-at); err != nil {
		return fmt.Errorf("reading over %d bytes: %w", off, err)
	}
	if u == nil {
		return nil
	}
	if before < off {
		again := sha256.New()
		if _, err := io.CopyN(again, res.Body, off-before); err != nil {
			return fmt.Errorf("reading the first %d bytes again: %w", off, err)
		}
		if !bytes.Equal(again.Sum(nil), u.hash.Sum(nil)) {
			return permanent(fmt.Errorf("%s: %w", res.Request.URL.Host, errOtherFile))
		}
	}
	u.address, u.tag = validator(res)
	return nil
}
