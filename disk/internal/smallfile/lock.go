package smallfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/internal/osfile"
	"kubevirt.io/disk/disk/internal/words"
)

// LockName is the file in an image's work directory whose lock makes one process its owner. It is
// removed only by Sweep.
const LockName = "lock"

// ErrLockGone is a lock file that was removed before it could be locked.
var ErrLockGone = errors.New("the lock file was removed while it was locked")

// maxHolder bounds what is read of a lock file. Bytes.
const maxHolder = 256

// LockFile takes the exclusive lock of an open file without waiting: EWOULDBLOCK where another one
// has it. The kernel frees it with the last descriptor, so also a holder that was killed frees it.
func LockFile(f *os.File) error {
	return osfile.Retry(func() error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) })
}

// HasName reports whether an open file is still the one of that name.
func HasName(f *os.File, name string) (bool, error) {
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	now, err := os.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(mine, now), err
}

// AcquireLock locks the file of that name, which is made if need be and then names this process.
// errLockGone: try again.
func AcquireLock(path, what string) (*os.File, error) {
	f, err := osfile.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := LockFile(f); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = &LockedError{Path: what, Holder: readHolder(f)}
		} else {
			err = &os.PathError{Op: "flock", Path: path, Err: err}
		}
		return nil, errors.Join(err, f.Close())
	}
	current, err := HasName(f, path)
	if err == nil && !current {
		err = ErrLockGone
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	// Only for messages, so a full disk does not matter here.
	if f.Truncate(0) == nil {
		host, _ := os.Hostname()
		fmt.Fprintf(f, "%d %s\n", os.Getpid(), host)
	}
	return f, nil
}

// readHolder is who a lock file names. A process number means something only on its own host or in
// its own container.
func readHolder(f *os.File) string {
	text, _ := io.ReadAll(io.NewSectionReader(f, 0, maxHolder))
	var pid int
	var host string
	if n, _ := fmt.Sscanf(strings.ToValidUTF8(string(text), "?"), "%d %s", &pid, &host); n == 0 {
		return "another process"
	}
	if own, err := os.Hostname(); host == "" || err == nil && host == own {
		return fmt.Sprintf("process %d", pid)
	}
	return fmt.Sprintf("process %d on host %s", pid, words.Name(host))
}

// LockedError is a directory or file that another process uses.
type LockedError struct {
	Path   string
	Holder string // who holds it, as far as that is known
}

func (e *LockedError) Error() string {
	return fmt.Sprintf("%q is in use by %s; stop that one first, or give each its own", e.Path,
		e.Holder)
}
