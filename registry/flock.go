package registry

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// flock locks an open file against other openings of it, which other processes have. how is that of
// flock(2). With unix.LOCK_NB, the error is unix.EWOULDBLOCK where another one has the lock.
func flock(f *os.File, how int) error {
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
