// Package readyfile makes the file that tells probes that disks can be used.
//
// A process calls Clear when it starts, Write when the disks can be used, and Remove when they no
// longer can. The package leaves files alone that it has not made.
package readyfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/flock"
)

// readyText is the content that identifies a ready file.
const readyText = "ready\n"

// File tells probes that the disks can be used. The process that made it keeps it locked. So
// another process with the same setting can tell it from the file of a killed one.
type File struct {
	Path string   // "": none
	Name string   // of the setting, for messages
	made *os.File // nil: not yet
}

// Clear removes the ready file of a killed daemon, because a probe would take this daemon for
// ready. Anything else with that name stays and is an error: the name may be a mistake, such as the
// path of an image. /dev/null is allowed and means no file.
func (r *File) Clear() error {
	if r.Path == "" {
		return nil
	}
	if err := r.checkPlace(); err != nil {
		return err
	}
	if err := r.unlink(); err != nil {
		return err
	}
	// Fail now. Later it may have taken long to make the disks, and initiators may be logging in.
	dir := filepath.Dir(r.Path)
	if err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
		return r.unmakeable(&fs.PathError{Op: "access", Path: dir, Err: err})
	}
	return nil
}

// unmakeable says what to do if the ready file cannot be made.
func (r *File) unmakeable(err error) error {
	return fmt.Errorf("the ready file cannot be made, so no probe would see that the LUNs are "+
		"ready: choose another place with %s, or turn it off with an empty value: %w", r.Name, err)
}

// checkPlace returns an error if the path holds something that is not this daemon's.
func (r *File) checkPlace() error {
	what := foreign(r.Path)
	if what == "" {
		return nil
	}
	return fmt.Errorf("the ready file %q would take the place of %s: choose another place with "+
		"%s, or turn it off with an empty value", r.Path, what, r.Name)
}

// Write makes the file. It appears with its content, because a probe may read it at any moment.
func (r *File) Write() error {
	if r.Path == "" {
		return nil
	}
	// Another daemon may have become ready meanwhile.
	if err := r.checkPlace(); err != nil {
		return err
	}
	f, err := writeAtomically(r.Path, readyText)
	if err != nil {
		return r.unmakeable(err)
	}
	r.made = f
	return nil
}

// Remove removes the file, unless something else has replaced it, such as another daemon's file.
func (r *File) Remove() error {
	if r.Path == "" {
		return nil
	}
	own := r.isOwn()
	if r.made != nil {
		_ = r.made.Close() // the file is complete
		r.made = nil
	}
	if !own && foreign(r.Path) != "" {
		return nil
	}
	return r.unlink()
}

// isOwn reports whether the path still holds the file that was made, whatever its content is now.
func (r *File) isOwn() bool {
	if r.made == nil {
		return false
	}
	made, err := r.made.Stat()
	return err == nil && inPlace(made, r.Path)
}

// inPlace reports whether path still names the file that was made.
func inPlace(made fs.FileInfo, path string) bool {
	there, err := os.Lstat(path)
	return err == nil && os.SameFile(made, there)
}

// foreign describes the object in the place of the ready file. It returns "" if there is nothing, a
// ready file, or an empty file, as touch makes it.
func foreign(path string) string {
	info, err := os.Lstat(path)
	switch {
	case err != nil:
		return "" // any other error shows when it is removed
	case info.IsDir():
		return "a directory"
	case !info.Mode().IsRegular():
		return "something that is not a regular file"
	case lockedByDaemon(path):
		return "the ready file of another running daemon"
	case info.Size() == 0:
		return ""
	}
	if info.Size() == int64(len(readyText)) {
		if f, err := openUnlinked(path); err == nil {
			defer f.Close()
			text, err := io.ReadAll(io.LimitReader(f, int64(len(readyText))+1))
			if err == nil && string(text) == readyText {
				return ""
			}
		}
	}
	return "a file with other content"
}

// lockedByDaemon reports whether the daemon that made a ready file is running. On a file system
// without locks it returns false.
func lockedByDaemon(path string) bool {
	f, err := openUnlinked(path)
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(flock.Lock(f, unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// openUnlinked opens a file that was a regular file a moment ago. If a link or a pipe has replaced
// it, it neither follows the link nor waits.
func openUnlinked(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
}

// writeAtomically makes a file and returns it open and locked.
func writeAtomically(path, text string) (f *os.File, err error) {
	f, err = os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return nil, err
	}
	// The ready file also works without a lock.
	_ = flock.Lock(f, unix.LOCK_EX|unix.LOCK_NB)
	_, err = f.WriteString(text)
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		// An empty file works, too. Copying or a guest may have just taken all space.
		err = f.Truncate(0)
	}
	// A probe may run as another user.
	err = errors.Join(err, f.Chmod(0o644))
	if err == nil {
		err = durable.RenameNewNamed(f.Name(), path)
	}
	if errors.Is(err, fs.ErrExist) && foreign(path) == "" { // such as one made by touch
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (r *File) unlink() error {
	err := os.Remove(r.Path)
	switch {
	case err == nil, errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, syscall.EROFS):
		// The kernel returns this even for a missing file. That is right here: the file could not
		// be made later either.
		return fmt.Errorf("the ready file %q is on a read-only file system: mount a volume "+
			"there, or choose another place with %s, or turn it off with an empty value",
			r.Path, r.Name)
	}
	return fmt.Errorf("the ready file cannot be removed, so probes would take the LUNs for "+
		"ready: remove it, or choose another place with %s: %w", r.Name, err)
}
