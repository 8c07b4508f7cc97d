package main

import "os"

// rereader reads the configuration and credential files at the start, and again while the daemon
// runs. A file that can be read only once, such as the pipe of a process substitution, keeps its
// first content: kept has it, by its path.
type rereader struct{ kept map[string][]byte }

func newRereader() *rereader { return &rereader{kept: map[string][]byte{}} }

// read returns the content of a file. It waits for a pipe the first time only.
func (r *rereader) read(path string) ([]byte, error) {
	if text, ok := r.kept[path]; ok {
		return text, nil
	}
	st, statErr := os.Stat(path)
	text, err := readBounded(path)
	if err == nil && (statErr != nil || !st.Mode().IsRegular()) {
		r.kept[path] = text
	}
	return text, err
}
