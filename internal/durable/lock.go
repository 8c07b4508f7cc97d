package durable

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/osfile"
)

const (
	// LockName is the lock file in an image's work directory. The process that locks it owns the
	// directory. Only Sweep removes it.
	LockName = "lock"
	// PersistentLockName is the same in the directory of a persistent disk. It is removed with the
	// disk.
	PersistentLockName = "disk.img.lock"
)

// ErrLockGone says that a lock file was removed before it could be locked.
var ErrLockGone = errors.New("the lock file was removed while it was locked")

// maxHolder is how many bytes of a lock file are read.
const maxHolder = 256

// AcquireLock locks the file at path, which it makes if it is missing, and writes this process's
// number into it. what names the locked thing in a LockedError. After ErrLockGone the caller tries
// again.
func AcquireLock(path, what string) (*os.File, error) {
	f, _, err := acquireLock(path, what, os.O_CREATE)
	return f, err
}

// AcquireDiskLock is AcquireLock for a user that empties the lock file at its end. killed says that
// the former user has not.
func AcquireDiskLock(path, what string) (lock *os.File, killed bool, err error) {
	return acquireLock(path, what, os.O_CREATE)
}

// AcquireExistingLock is AcquireLock for a thing that is to be removed. If there is no lock file,
// nobody has used the thing, and the error is fs.ErrNotExist. After any other error it may be in
// use.
func AcquireExistingLock(path, what string) (*os.File, error) {
	f, _, err := acquireLock(path, what, 0)
	return f, err
}

func acquireLock(path, what string, create int) (f *os.File, used bool, err error) {
	if f, err = osfile.OpenFile(path, os.O_RDWR|create, 0o600); err != nil {
		return nil, false, err
	}
	if err := flock.Lock(f, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = &LockedError{Path: what, Holder: readHolder(f)}
		}
		return nil, false, errors.Join(err, f.Close())
	}
	current, err := flock.HasName(f, path)
	if err == nil && !current {
		err = ErrLockGone
	}
	var info fs.FileInfo
	if err == nil {
		info, err = f.Stat()
	}
	if err != nil {
		return nil, false, errors.Join(err, f.Close())
	}
	// The content is only for messages, so a full disk does not matter. But its length does: see
	// AcquireDiskLock. It needs no space.
	host, _ := os.Hostname()
	text := fmt.Sprintf("%d %s\n", os.Getpid(), host)
	_ = f.Truncate(int64(len(text)))
	_, _ = f.WriteAt([]byte(text), 0)
	return f, info.Size() > 0, nil
}

// HoldFile locks a file that a person has named, for as long as it is open: how is LOCK_SH for
// reading, and LOCK_EX for writing. A file system without locks is no error. If another process
// still has the lock after two seconds, the error is a *LockedError.
func HoldFile(f *os.File, path string, how int) error {
	if flock.Taken(f, how) {
		return &LockedError{Path: path, Holder: "another process"}
	}
	return nil
}

// HoldReplaced is HoldFile for a file that is overwritten or replaced. It also fails if a machine
// uses the file: QEMU locks its images in another way.
func HoldReplaced(f *os.File, path string) error {
	if flock.InMachine(f) {
		return &LockedError{Path: path, Holder: "a virtual machine (QEMU)"}
	}
	return HoldFile(f, path, unix.LOCK_EX)
}

// Holds checks that the path of a lock file still leads to the locked file. If its directory was
// moved, files that are saved at the path get into another one.
func Holds(lock *os.File, path string) error {
	if there, err := flock.HasName(lock, path); err != nil || there {
		return err
	}
	return fmt.Errorf("%q is not the directory any more that was opened, or its lock is gone: put "+
		"it back, or stop, and start with the right one", filepath.Dir(path))
}

// ReleaseLock unlocks and closes the file that AcquireLock has returned. Closing alone is not
// enough: a child process has the open file, too, and with it the lock, until it executes its
// program.
func ReleaseLock(f *os.File) error {
	return errors.Join(flock.Lock(f, unix.LOCK_UN), f.Close())
}

// readHolder returns the process that a lock file names. A process number is only valid on its own
// host or in its own container.
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
	return fmt.Sprintf("process %d on host %s", pid, strconv.Quote(host))
}

// LockedError says that another process uses a directory or file.
type LockedError struct {
	Path   string
	Holder string // the process that holds it, as far as known
}

func (e *LockedError) Error() string {
	return fmt.Sprintf("%q is in use by %s; stop that one first, or give each its own", e.Path,
		e.Holder)
}
