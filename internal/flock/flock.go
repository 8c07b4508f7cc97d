// Package flock locks open files and directories with flock(2), against other opens of them in this
// process and in others. Closing the file releases the lock, and so does the end of the process.
package flock

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Lock locks f. how is unix.LOCK_EX or unix.LOCK_SH, as for flock(2). With unix.LOCK_NB it does not
// wait: if another open of the file has the lock, it returns unix.EWOULDBLOCK.
func Lock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EINTR):
			return &os.PathError{Op: "flock", Path: f.Name(), Err: err}
		}
	}
}

// Claim opens a file for the one process that fills it, and renames it when it is complete. Claim
// makes the file if it is missing, and waits until no other process has it, or ctx ends: the other
// may wait for a network. A killed process leaves its file with content: the next claim truncates
// it.
func Claim(ctx context.Context, path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o644)
		if err != nil {
			return nil, err
		}
		named := false
		if err = Lock(f, unix.LOCK_EX|unix.LOCK_NB); err == nil {
			named, err = HasName(f, path)
		}
		if named {
			return f, nil
		}
		wait := errors.Is(err, unix.EWOULDBLOCK)
		if wait {
			err = nil
		}
		// Otherwise its former owner has renamed or removed it: try again.
		if err := errors.Join(err, f.Close()); err != nil {
			return nil, err
		}
		if wait {
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-time.After(claimPoll):
			}
		}
	}
}

// claimPoll is how often to check whether the owner of a file is done with it.
const claimPoll = 20 * time.Millisecond

// Open opens an existing file for its lock, for writing if possible: NFS gives an exclusive lock
// only then. A user who may only read the file may still remove it, if the directory is theirs.
func Open(path string) (*os.File, error) {
	const flags = unix.O_NOFOLLOW | unix.O_NONBLOCK
	if f, err := os.OpenFile(path, os.O_RDWR|flags, 0); err == nil {
		return f, nil
	}
	return os.OpenFile(path, os.O_RDONLY|flags, 0)
}

// Discard removes a claimed file of a killed owner. If it has an owner, Discard does nothing.
func Discard(path string) error {
	f, err := Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if err := Lock(f, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil
		}
		return err
	}
	if named, err := HasName(f, path); err != nil || !named {
		return err
	}
	return os.Remove(path)
}

// HasName reports whether a path still leads to the open file f.
func HasName(f *os.File, path string) (bool, error) {
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	now, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(mine, now), err
}

// InMachine reports whether a machine uses an image: QEMU holds locks of another kind on some of
// these bytes meanwhile.
func InMachine(f *os.File) bool {
	const first, many = 100, 200
	lock := unix.Flock_t{Type: unix.F_WRLCK, Start: first, Len: many}
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lock)
	return err == nil && lock.Type != unix.F_UNLCK
}

// WaitBriefly waits for the exclusive lock of f, at most two seconds. The caller goes on in any
// case, even if the file system has no locks or the lock stays taken.
func WaitBriefly(f *os.File) { _ = LockSoon(f, unix.LOCK_EX) }

// Taken is LockSoon for a file that is also used if the file system has no locks. It reports
// whether another open of the file keeps the lock.
func Taken(f *os.File, how int) bool { return errors.Is(LockSoon(f, how), unix.EWOULDBLOCK) }

// LockSoon is Lock, but waits at most two seconds, and then returns unix.EWOULDBLOCK. A child
// process has the open files of its parent, with their locks, until it executes its program.
func LockSoon(f *os.File, how int) error {
	for end := time.Now().Add(2 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		err := Lock(f, how|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end) {
			return err
		}
	}
}
