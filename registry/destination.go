package registry

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// writable finds out early, before any request, that the destination cannot be written.
func writable(dest string) error {
	if dest == "-" {
		return nil
	}
	dir := filepath.Dir(dest)
	switch info, err := os.Stat(dest); {
	case err == nil && info.IsDir():
		dir = dest
	case err == nil && info.Mode()&fs.ModeDevice != 0:
		f, err := os.OpenFile(dest, os.O_WRONLY, 0)
		if err != nil {
			return fmt.Errorf("block device %q cannot be written: %w", dest, errors.Unwrap(err))
		}
		return f.Close()
	}
	if info, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("there is no directory %q: make it first", dir)
	} else if err == nil && !info.IsDir() {
		return fmt.Errorf("%q is not a directory", dir)
	}
	f, err := os.CreateTemp(dir, ".kubevirt-disk-*")
	if err != nil {
		return fmt.Errorf("nothing can be written to the directory %q: %w", dir,
			errors.Unwrap(err))
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}
