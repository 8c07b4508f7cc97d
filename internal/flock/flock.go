// Package flock locks open files and directories by flock(2), against other openings of them: in
// this process, and in others. Closing the file frees the lock, and so does the end of the process.
package flock

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Lock locks f. how is that of flock(2): unix.LOCK_EX or unix.LOCK_SH. With unix.LOCK_NB it does
// not wait, and the error is unix.EWOULDBLOCK where another opening has the lock.
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

// WaitBriefly waits for the exclusive lock of f, two seconds at most. The caller goes on in any
// case: also where the file system has no locks, or somebody keeps this one.
func WaitBriefly(f *os.File) {
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); {
		if !errors.Is(Lock(f, unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK) {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}
