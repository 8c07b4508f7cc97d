package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// writeReadyFile makes the file that says that the LUNs can be used. It appears with its content at once,
// because a probe may read it at any moment.
func writeReadyFile(path string) error {
	if path == "" {
		return nil
	}
	if err := writeAtomically(path, "ready\n"); err != nil {
		return fmt.Errorf("the ready file cannot be made, so that no probe would see that the LUNs are ready (--%s chooses another place): %w", keyReadyFile, err)
	}
	return nil
}

func writeAtomically(path, text string) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.WriteString(text)
	// A probe may run as another user.
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

func removeReadyFile(path string) error {
	if path == "" {
		return nil
	}
	err := os.Remove(path)
	switch {
	case err == nil, errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, syscall.EROFS):
		// Said even of a file that is not there, which is as well: it could not be made later either.
		return fmt.Errorf("the ready file %s is on a read-only file system: mount a volume there, or choose another place with --%s (READY_FILE), or none by an empty one", path, keyReadyFile)
	}
	return fmt.Errorf("the ready file cannot be removed, so that probes would take the LUNs for ready: %w", err)
}
