package disk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cespare/xxhash/v2"
)

const (
	diskName  = "disk.raw"
	stateName = "state.json"
	// maxEscaped is the longest directory name that is made of an image's name as it is. Bytes.
	maxEscaped = 200
)

// workDir is the part of the work directory that belongs to one image, held by its lock:
//
//	<work directory>/<image>/lock        who uses it
//	<work directory>/<image>/disk.raw    the disk; complete whenever it has this name
//	<work directory>/<image>/state.json  the disk's identity and the image it was made of
//	<work directory>/<image>/unit-*/     what the logical unit keeps with the disk's content
//
// A name with the suffix ".partial" is being written; what a killed process left is removed at the next start.
type workDir struct {
	path string
	lock *os.File
}

// openWorkDir makes, locks and tidies the directory of an image.
func openWorkDir(root, image string) (*workDir, error) {
	if root == "" {
		return nil, errors.New("no work directory is set")
	}
	path := filepath.Join(root, escapeName(image))
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("work directory: %w; user %d must be able to write there", err, os.Geteuid())
	}
	lock, err := acquireLock(filepath.Join(path, lockName), "work directory "+path)
	if err != nil {
		var locked *LockedError
		if errors.As(err, &locked) {
			return nil, err
		}
		return nil, fmt.Errorf("work directory: %w; user %d must be able to write there", err, os.Geteuid())
	}
	w := &workDir{path: path, lock: lock}
	for _, name := range []string{w.disk(), w.state()} {
		if err := remove(name + partialSuffix); err != nil {
			return nil, errors.Join(err, w.close())
		}
	}
	return w, nil
}

func (w *workDir) disk() string  { return filepath.Join(w.path, diskName) }
func (w *workDir) state() string { return filepath.Join(w.path, stateName) }

// clear removes the disk. Its state goes first: without it a disk is never taken for a complete one.
func (w *workDir) clear() error {
	if err := remove(w.state()); err != nil {
		return err
	}
	return errors.Join(w.clearUnits(), remove(w.disk()))
}

// close frees the lock.
func (w *workDir) close() error { return w.lock.Close() }

// remove removes a file that may not be there.
func remove(name string) error {
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// escapeName makes a directory name of a file name, a different one for each: one that needs no quoting, does not
// hide, and fits every file system.
func escapeName(name string) string {
	var b strings.Builder
	for i := range len(name) {
		c := name[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' ||
			c == '-' || c == '_' || c == '.' && i > 0 {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	if b.Len() <= maxEscaped {
		return b.String()
	}
	return fmt.Sprintf("%s%%~%016x", b.String()[:maxEscaped-18], xxhash.Sum64String(name))
}
