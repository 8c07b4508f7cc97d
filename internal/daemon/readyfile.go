package daemon

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// readyText is what the ready file holds, by which it is known again.
const readyText = "ready\n"

// readyFile tells probes that the LUNs can be used. The daemon that has made it keeps it locked, so
// that another one of the same setting knows it from what a killed one has left.
type readyFile struct {
	path string   // "": none
	name Name     // of the setting, for messages
	made *os.File // nil: not yet
}

// clear removes what a run that was killed has left, as it would tell a probe that this one is
// ready. Any other thing of that name stays, and is an error: the name may be a slip and be that of
// an image, or be /dev/null in order to have no file.
func (r *readyFile) clear() error {
	if r.path == "" {
		return nil
	}
	if err := r.checkPlace(); err != nil {
		return err
	}
	if err := r.unlink(); err != nil {
		return err
	}
	// Otherwise that would show when the disks are made, which may take long, and initiators are
	// logging in.
	dir := filepath.Dir(r.path)
	if err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
		return r.unmakeable(&fs.PathError{Op: "access", Path: dir, Err: err})
	}
	return nil
}

// unmakeable says what to do where there can be no ready file.
func (r *readyFile) unmakeable(err error) error {
	return fmt.Errorf("the ready file cannot be made, so that no probe would see that the LUNs "+
		"are ready: choose another place with %s, or none by an empty one: %w", r.name, err)
}

// checkPlace refuses to take the place of what is not this daemon's.
func (r *readyFile) checkPlace() error {
	what := foreign(r.path)
	if what == "" {
		return nil
	}
	return fmt.Errorf("the ready file %q would take the place of %s: choose another place with "+
		"%s, or none by an empty one", r.path, what, r.name)
}

// write makes the file. It appears with its content at once, because a probe may read it at any
// moment.
func (r *readyFile) write() error {
	if r.path == "" {
		return nil
	}
	// Another daemon may have become ready since this one was started.
	if err := r.checkPlace(); err != nil {
		return err
	}
	f, err := writeAtomically(r.path, readyText)
	if err != nil {
		return r.unmakeable(err)
	}
	r.made = f
	return nil
}

// remove takes the file away, unless something else is in its place: another daemon's, or what was
// the reason not to make one.
func (r *readyFile) remove() error {
	if r.path == "" {
		return nil
	}
	own := r.isOwn()
	if r.made != nil {
		_ = r.made.Close() // nothing is written any more
		r.made = nil
	}
	if !own && foreign(r.path) != "" {
		return nil
	}
	return r.unlink()
}

// isOwn says whether the file that was made is in its place, whatever it may hold by now.
func (r *readyFile) isOwn() bool {
	if r.made == nil {
		return false
	}
	made, err := r.made.Stat()
	return err == nil && inPlace(made, r.path)
}

// inPlace says whether what was made is what has the name now, and nobody has put something else
// there.
func inPlace(made fs.FileInfo, path string) bool {
	there, err := os.Lstat(path)
	return err == nil && os.SameFile(made, there)
}

// foreign says what is in the place of the ready file, "" where that is nothing or a ready file. An
// empty one is too, as touch makes it.
func foreign(path string) string {
	info, err := os.Lstat(path)
	switch {
	case err != nil:
		return "" // what else is wrong shows when it is removed
	case info.IsDir():
		return "a directory"
	case !info.Mode().IsRegular():
		return "something that is no regular file"
	case lockedByDaemon(path):
		return "that of another daemon, which is running"
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

// lockedByDaemon says whether the daemon that has made a ready file is running. Where a file system
// has no locks, it seems not to be.
func lockedByDaemon(path string) bool {
	f, err := openUnlinked(path)
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// openUnlinked opens a file that was a regular one a moment ago. A link or a pipe that has its
// place by now is not followed or waited for.
func openUnlinked(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
}

// writeAtomically makes a file that is locked as long as it is open.
func writeAtomically(path, text string) (f *os.File, err error) {
	f, err = os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return nil, err
	}
	// Without locks it is as good a ready file.
	_ = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	_, err = f.WriteString(text)
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		// An empty one says as much, and copying or a guest may have taken all space just now.
		err = f.Truncate(0)
	}
	// A probe may run as another user.
	err = errors.Join(err, f.Chmod(0o644))
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (r *readyFile) unlink() error {
	err := os.Remove(r.path)
	switch {
	case err == nil, errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, syscall.EROFS):
		// Said even of a file that is not there, which is as well: it could not be made later
		// either.
		return fmt.Errorf("the ready file %q is on a read-only file system: mount a volume there, "+
			"or choose another place with %s, or none by an empty one", r.path, r.name)
	}
	return fmt.Errorf("the ready file cannot be removed, so that probes would take the LUNs for "+
		"ready: remove it, or choose another place with %s: %w", r.name, err)
}
