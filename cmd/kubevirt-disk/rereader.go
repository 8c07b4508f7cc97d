package main

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

// rereader reads the files of the configuration and of the credentials at the start, and again
// while the daemon runs. What can be read once only, as the pipe of a process substitution, keeps
// the content that it had.
type rereader struct {
	regular map[string]bool   // by path: read at least once, and may change
	kept    map[string][]byte // by path: of what can be read once only
}

func newRereader() *rereader {
	return &rereader{regular: map[string]bool{}, kept: map[string][]byte{}}
}

// read returns the content of a file. It waits for a pipe the first time; from then on it waits for
// nobody.
func (r *rereader) read(path string) ([]byte, error) {
	if text, ok := r.kept[path]; ok {
		return text, nil
	}
	if r.regular[path] {
		return readAtMost(path, os.O_RDONLY|syscall.O_NONBLOCK, maxConfigFile,
			fs.FileMode.IsRegular)
	}
	st, statErr := os.Stat(path)
	text, err := readBounded(path)
	switch {
	case err != nil:
	case statErr == nil && st.Mode().IsRegular():
		r.regular[path] = true
	default:
		r.kept[path] = text
	}
	return text, err
}

var errNotRegular = errors.New("it is no regular file any more")
