package durable

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"
)

// A record is a small file of JSON that one start of the program writes for the next. The checksum
// covers the exact bytes of the state, and is xxhash64. A state that has versions has its own in
// it.
//
//	{"xxhash64": "0123456789abcdef", "state": {"version": 2, ...}}
type record struct {
	Checksum string          `json:"xxhash64"`
	State    json.RawMessage `json:"state"`
}

// DamagedError says that a record cannot be used. It completes the sentence "<file> ...".
type DamagedError struct{ reason string }

func (e *DamagedError) Error() string { return e.reason }

// Damaged makes a DamagedError of a fault that a caller of LoadRecord has found.
func Damaged(format string, args ...any) error {
	return &DamagedError{"is damaged: " + fmt.Sprintf(format, args...)}
}

// SaveRecord replaces a file by a record of that state. It works on a full volume, too, by a spare
// next to the file. sync is as for Replace. may checks whether the directory is still the right
// one: if it returns an error, nothing is replaced. nil: no check.
func SaveRecord(path string, state any, may func() error, sync func(*os.File) error) error {
	text, err := EncodeRecord(state)
	if err != nil {
		return err
	}
	return Replace(may, path, text, path+SpareSuffix, sync)
}

// LoadRecord reads a record into a state, if its version is one of these; without versions, it need
// not have one. The error is fs.ErrNotExist if there is no file, and a *DamagedError if the record
// cannot be used. After any other error the record may be intact: see IsUnread.
func LoadRecord(path string, state any, versions ...int) error {
	text, err := Read(path)
	switch {
	case err == nil:
		return DecodeRecord(text, state, versions...)
	case errors.Is(err, fs.ErrNotExist) || IsUnread(err):
		return err
	}
	return &DamagedError{err.Error()}
}

// EncodeRecord returns the content of a record's file.
func EncodeRecord(state any) ([]byte, error) {
	body, err := json.Marshal(state)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(record{checksum(body), body})
	return append(text, '\n'), err
}

// DecodeRecord is LoadRecord for the content of a file. Its errors are *DamagedError.
func DecodeRecord(text []byte, state any, versions ...int) error {
	var r record
	if err := json.Unmarshal(text, &r); err != nil {
		return Damaged("%v", err)
	}
	if checksum(r.State) != r.Checksum {
		return Damaged("its checksum is wrong")
	}
	var is struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(r.State, &is); err != nil && len(versions) > 0 {
		return Damaged("%v", err)
	}
	if len(versions) > 0 && !slices.Contains(versions, is.Version) {
		known := strings.ReplaceAll(strings.Trim(fmt.Sprint(versions), "[]"), " ", " and ")
		return &DamagedError{fmt.Sprintf("has version %d, and this program knows %s", is.Version,
			known)}
	}
	if err := json.Unmarshal(r.State, state); err != nil {
		return Damaged("%v", err)
	}
	return nil
}

func checksum(p []byte) string { return fmt.Sprintf("%016x", xxhash.Sum64(p)) }
