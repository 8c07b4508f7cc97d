package disk

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// maxReservations bounds a reservation file: several times of what a thousand registrations take. Bytes.
const maxReservations = 1 << 20

// ReservationFile keeps the persistent reservations of one disk in a file beside it. Its content is the target's; it has
// a checksum of its own. Any number of goroutines.
type ReservationFile struct {
	path string
	sync func(*os.File) error // of a file and of a directory

	mu sync.Mutex // one Save at a time
}

// NewReservationFile uses the file of this name, in a directory that exists. The file need not exist; it is made by the
// first Save. Nobody else may write it.
func NewReservationFile(path string) *ReservationFile {
	return &ReservationFile{path: path, sync: (*os.File).Sync}
}

// Load returns the content that was saved last, and nothing if there is no file. A link, anything else that is not a
// regular file, a file without content and one of more than 1 MiB are errors: what a Save has left is none of these.
func (r *ReservationFile) Load() ([]byte, error) {
	f, err := os.OpenFile(r.path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case errors.Is(err, unix.ELOOP):
		return nil, r.wrong("is a symbolic link")
	case err != nil:
		return nil, fmt.Errorf("reservation file: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("reservation file: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, r.wrong("is not a regular file")
	}
	b, err := io.ReadAll(io.LimitReader(f, maxReservations+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("reservation file: %w", err)
	case len(b) == 0:
		return nil, r.wrong("is empty")
	case len(b) > maxReservations:
		return nil, r.wrong("is far too large")
	}
	return b, nil
}

func (r *ReservationFile) wrong(what string) error {
	return fmt.Errorf("reservation file %s %s: it was not written by this program", r.path, what)
}

// Save replaces the content. It has reached storage when Save returns nil; after an error the file has the old content or
// the new one.
func (r *ReservationFile) Save(b []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(b) == 0 || len(b) > maxReservations {
		return fmt.Errorf("reservation file %s cannot hold %d bytes, but 1 to %d", r.path, len(b), maxReservations)
	}
	next := r.path + ".new"
	if err := r.write(next, b); err != nil {
		return fmt.Errorf("reservation file: %w", errors.Join(err, remove(next)))
	}
	if err := os.Rename(next, r.path); err != nil {
		return fmt.Errorf("reservation file: %w", errors.Join(err, remove(next)))
	}
	dir, err := os.Open(filepath.Dir(r.path))
	if err != nil {
		return fmt.Errorf("reservation file: %w", err)
	}
	if err := errors.Join(r.sync(dir), dir.Close()); err != nil {
		return fmt.Errorf("reservation file: %w", err)
	}
	return nil
}

// write makes a new file with this content, on storage.
func (r *ReservationFile) write(path string, b []byte) error {
	// What a killed process left behind.
	if err := remove(path); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = r.sync(f)
	}
	return errors.Join(err, f.Close())
}
