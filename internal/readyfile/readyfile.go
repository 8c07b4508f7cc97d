// Package readyfile makes files that exist while disks can be used: the ready file, for probes, and
// the PID file of a daemon, for a program that ends it.
//
// A process calls Clear when it starts, Write when the disks can be used, and Remove when they
// cannot any more. The package does not touch files that it has not made.
package readyfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/osfile"
)

// readyText is the content that identifies a ready file.
const readyText = "ready\n"

// File says that the disks can be used. The process that made it keeps it locked. So another
// process with the same setting can tell it from the file of a killed one.
type File struct {
	Path string   // "": none
	Name string   // of the setting, for messages
	PID  bool     // it is a PID file, with the number of this process
	made *os.File // nil: not yet
}

func (r *File) kind() string {
	if r.PID {
		return "PID file"
	}
	return "ready file"
}

// mayReplace reports whether a file with this content is one of the same kind, which a killed
// daemon may have left. An empty file, as touch makes it, is.
func (r *File) mayReplace(text string) bool {
	if r.PID && text != "" {
		_, err := strconv.Atoi(strings.TrimSpace(text))
		return err == nil
	}
	return text == "" || text == readyText
}

// Clear removes the file of a killed daemon, because others would take this one for ready. Any
// other file with that name stays and is an error: the name may be a mistake, such as the path of
// an image.
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
	if err := osfile.CheckWritable(filepath.Dir(r.Path)); err != nil {
		return r.unmakeable(err)
	}
	return nil
}

// unmakeable says what to do if the file cannot be made.
func (r *File) unmakeable(err error) error {
	return fmt.Errorf("the %s cannot be made, so nobody would see that the disks can be used: "+
		"choose another place with %s, or turn it off with an empty value: %w", r.kind(), r.Name,
		err)
}

// checkPlace returns an error if the path has something that is not this daemon's.
func (r *File) checkPlace() error {
	what := r.foreign()
	if what == "" {
		return nil
	}
	return fmt.Errorf("the %s %q would take the place of %s: choose another place with %s, or "+
		"turn it off with an empty value", r.kind(), r.Path, what, r.Name)
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
	f, err := r.write()
	if err != nil {
		return r.unmakeable(err)
	}
	r.made = f
	return nil
}

// Remove removes the file, unless it was replaced, for example by another daemon's file.
func (r *File) Remove() error {
	if r.Path == "" {
		return nil
	}
	own := r.isOwn()
	if r.made != nil {
		_ = r.made.Close() // the file is complete
		r.made = nil
	}
	if !own && r.foreign() != "" {
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

// maxText is longer than the content of any such file, in bytes.
const maxText = 32

// foreign describes the file in this file's place. It returns "" if there is none, or if it may be
// replaced.
func (r *File) foreign() string {
	info, err := os.Lstat(r.Path)
	switch {
	case err != nil:
		return "" // any other error is reported when it is removed
	case info.IsDir():
		return "a directory"
	case !info.Mode().IsRegular():
		return "something that is not a regular file"
	case errors.Is(tryLock(r.Path), unix.EWOULDBLOCK):
		return "the file of another running daemon"
	}
	if f, err := openUnlinked(r.Path); err == nil {
		defer f.Close()
		text, err := io.ReadAll(io.LimitReader(f, maxText))
		if err == nil && len(text) < maxText && r.mayReplace(string(text)) {
			return ""
		}
	}
	return "a file with other content"
}

// Left reports whether the daemon that made the file at a path has ended without removing it. On a
// file system without locks it returns false.
func Left(path string) bool { return tryLock(path) == nil }

// tryLock locks the file at a path for a moment. EWOULDBLOCK: the daemon that made it is running.
func tryLock(path string) error {
	f, err := openUnlinked(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return flock.Lock(f, unix.LOCK_SH|unix.LOCK_NB)
}

// openUnlinked opens a file that was a regular file a moment ago. If a link or a pipe has replaced
// it, it neither follows the link nor waits.
func openUnlinked(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
}

// write makes the file in one step, and returns it open and locked.
func (r *File) write() (f *os.File, err error) {
	f, err = os.CreateTemp(filepath.Dir(r.Path), "."+filepath.Base(r.Path)+".*")
	if err != nil {
		return nil, err
	}
	_ = flock.Lock(f, unix.LOCK_EX|unix.LOCK_NB) // it works without, too
	text := readyText
	if r.PID {
		text = fmt.Sprintln(os.Getpid())
	}
	_, err = f.WriteString(text)
	if full := errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT); full && !r.PID {
		// An empty file works, too. Copying or a guest may have taken all space.
		err = f.Truncate(0)
	}
	// A probe may run as another user.
	err = errors.Join(err, f.Chmod(0o644))
	if err == nil {
		var path string
		if path, err = osfile.ResolvedFile(r.Path); err == nil {
			err = durable.RenameNew(f.Name(), path)
		}
	}
	if errors.Is(err, fs.ErrExist) && r.foreign() == "" { // for example one made by touch
		err = os.Rename(f.Name(), r.Path)
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
		return fmt.Errorf("the %s %q is on a read-only file system: mount a volume there, or "+
			"choose another place with %s, or turn it off with an empty value", r.kind(), r.Path,
			r.Name)
	}
	return fmt.Errorf("the %s cannot be removed, so others would take the disks for ready: "+
		"remove it, or choose another place with %s: %w", r.kind(), r.Name, err)
}
