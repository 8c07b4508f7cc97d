package durable

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/osfile"
)

// maxSmall is the size of the largest small file, in bytes.
const maxSmall = 1 << 20

// Replace replaces the content of a file in one step: at any time, the file has the old or the new
// content. With sync, which is (*os.File).Sync, the content and then the name have reached storage
// when it returns nil. With the path of a spare it works on a full volume, too: see keepSpare. If
// the error says that there is no space, the file certainly has the old content.
//
// If may is not nil and returns an error, nothing is replaced. It is called when the new file is
// next to the one to replace. If may finds that this is the right directory, nothing is replaced in
// another one that takes its place later, because the new file is not there.
func Replace(may func() error, path string, content []byte, spare string,
	sync func(*os.File) error) error {
	if len(content) > maxSmall { // Read would refuse it
		return fmt.Errorf("%s cannot hold %d bytes, but at most %d", path, len(content), maxSmall)
	}
	if may == nil {
		may = func() error { return nil }
	}
	err := replaceByNew(may, path, content, sync)
	if sync == nil {
		// Otherwise a crash could bring the spare back under the file's name, half written or with
		// the content of an earlier file.
		sync = (*os.File).Sync
	}
	if spare != "" && isFull(err) {
		if replaced, bySpare := replaceBySpare(may, path, content, spare, sync); replaced {
			err = bySpare
		}
	}
	if err == nil && spare != "" {
		keepSpare(spare)
	}
	return err
}

// isFull is disk.IsNoSpace, for errors of the system: this package knows no disks.
func isFull(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EFBIG)
}

func replaceByNew(may func() error, path string, content []byte, sync func(*os.File) error) error {
	out, err := Create(path, 0o600)
	if err != nil {
		return err
	}
	if err = may(); err == nil {
		_, err = out.File.Write(content)
	}
	if err == nil && sync != nil {
		err = sync(out.File)
	}
	if err = out.Finish(err); err == nil && sync != nil {
		err = unsure(SyncDir(filepath.Dir(path), sync))
	}
	return err
}

// unsure is an error after the file was replaced. It does not wrap an error of no space, which
// would mean that nothing has changed.
func unsure(err error) error {
	if isFull(err) {
		return fmt.Errorf("the file is replaced, and a crash may bring back what it was: %v", err)
	}
	return err
}

// Read returns the content of a file, or fs.ErrNotExist. Other errors complete the sentence "<file>
// ...".
func Read(path string) ([]byte, error) {
	f, err := osfile.OpenFile(path, os.O_RDONLY, 0)
	if errors.Is(err, unix.ELOOP) {
		return nil, errors.New("is a symbolic link")
	}
	if err != nil {
		return nil, fmt.Errorf("cannot be opened: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		return nil, errors.New("is not a regular file")
	}
	content, err := io.ReadAll(io.LimitReader(f, maxSmall+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("cannot be read: %w", err)
	case len(content) > maxSmall:
		return nil, errors.New("is far too large")
	}
	return content, nil
}

// IsUnread reports whether Read failed without reading the content: the file exists, but the system
// did not let us read it, for example because no descriptor was free.
func IsUnread(err error) bool {
	return errors.As(err, new(*fs.PathError)) && !errors.Is(err, fs.ErrNotExist)
}

// SyncDir makes the names in a directory durable.
func SyncDir(path string, sync func(*os.File) error) error {
	dir, err := osfile.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	return errors.Join(sync(dir), dir.Close())
}

// SyncParent makes the name of a file durable.
func SyncParent(path string) error { return SyncDir(filepath.Dir(path), (*os.File).Sync) }

// MakeDirs makes a directory and its missing parents, which a person has named: links are followed.
// With synced, it also syncs their names, so that flushed files can be found. The error is
// fs.ErrNotExist if one was removed at the same moment.
func MakeDirs(path string, synced bool) error {
	above := filepath.Dir(path)
	err := os.Mkdir(path, 0o700)
	if errors.Is(err, fs.ErrNotExist) {
		if err = MakeDirs(above, synced); err == nil {
			err = os.Mkdir(path, 0o700)
		}
	}
	if err == nil && synced {
		parent, err := osfile.OpenDir(above)
		if err != nil {
			return err
		}
		return errors.Join(parent.Sync(), parent.Close())
	}
	if err == nil {
		return nil
	}
	st, statErr := os.Stat(path)
	switch {
	case statErr == nil && st.IsDir():
		return nil // also on a read-only file system
	case statErr == nil:
		return &fs.PathError{Op: "mkdir", Path: path, Err: unix.ENOTDIR}
	case errors.Is(err, fs.ErrExist):
		return statErr // such as: the directory existed a moment ago
	}
	return err
}
