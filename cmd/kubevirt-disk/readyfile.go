package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// readyText is what the ready file holds, by which it is known again.
const readyText = "ready\n"

// clearReadyFile removes what a run that was killed has left, as it would tell a probe that this one is ready. Any other thing of that name
// stays, and is an error: the name may be a slip and be that of an image, or be /dev/null in order to have no file.
func clearReadyFile(path string) error {
	if path == "" {
		return nil
	}
	if what := foreign(path); what != "" {
		return fmt.Errorf("the ready file %s would take the place of %s: choose another place with %s, or none by an empty one",
			path, what, nameOf(keyReadyFile))
	}
	return removeReadyFile(path)
}

// foreign says what is in the place of the ready file, "" where that is nothing or a ready file. An empty one is too, as touch makes it.
func foreign(path string) string {
	info, err := os.Lstat(path)
	switch {
	case err != nil:
		return "" // what else is wrong shows when it is removed
	case info.IsDir():
		return "a directory"
	case !info.Mode().IsRegular():
		return "something that is no regular file"
	case info.Size() == 0:
		return ""
	}
	if info.Size() == int64(len(readyText)) {
		if text, err := os.ReadFile(path); err == nil && string(text) == readyText {
			return ""
		}
	}
	return "a file with other content"
}

// writeReadyFile makes the file that says that the LUNs can be used. It appears with its content at once,
// because a probe may read it at any moment.
func writeReadyFile(path string) error {
	if path == "" {
		return nil
	}
	if err := writeAtomically(path, readyText); err != nil {
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
