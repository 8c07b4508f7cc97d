package main

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

// rereader reads the configuration and credential files at the start, and again while the daemon
// runs. A file that can be read only once, such as the pipe of a process substitution, keeps its
// first content.
type rereader struct {
	regular map[string]bool   // by path: can be read again
	kept    map[string][]byte // by path: content of files that can be read only once
}

func newRereader() *rereader {
	return &rereader{regular: map[string]bool{}, kept: map[string][]byte{}}
}

// read returns the content of a file. It waits for a pipe the first time, and later never.
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

var errNotRegular = errors.New("it is no longer a regular file")
