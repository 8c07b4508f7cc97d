package durable

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/osfile"
)

const (
	// SpareSuffix is the end of a spare's name.
	SpareSuffix = ".spare"
	// spareSize is the size of a spare in bytes. The state of a disk with a hundred initiators
	// takes less.
	spareSize = 32 << 10
)

// keepSpare makes a spare if it can: a file with allocated space. When a guest has filled the
// volume, important state is written into the spare, above all who may use a disk from now on.
func keepSpare(path string) {
	var st unix.Stat_t
	if unix.Lstat(path, &st) == nil && st.Nlink == 1 && st.Blocks*osfile.StatBlock >= spareSize {
		return
	}
	f, err := osfile.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	if errors.Is(err, osfile.ErrLinked) && osfile.Remove(path) == nil {
		f, err = osfile.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	}
	if err != nil {
		return
	}
	defer f.Close()
	if osfile.Retry(func() error { return unix.Fallocate(int(f.Fd()), 0, 0, spareSize) }) != nil {
		if st, err := f.Stat(); err == nil && st.Size() == 0 {
			_ = osfile.Remove(path)
		}
	}
}

// replaceBySpare is Replace without new space: it writes the content into the spare and swaps the
// names of the two files. The content of a spare is not read after a crash. After an error, Replace
// may go on in another way unless the file was replaced.
func replaceBySpare(may func() error, path string, content []byte, spare string,
	sync func(*os.File) error) (replaced bool, err error) {
	// The spare may have been the file until a moment ago. As long as that swap has not reached
	// storage, a crash makes it the file again.
	if err := SyncDir(filepath.Dir(path), sync); err != nil {
		return false, err
	}
	f, err := osfile.OpenFile(spare, os.O_WRONLY, 0)
	if err != nil {
		return false, err
	}
	// Do not truncate it first: that would free its space.
	if _, err = f.WriteAt(content, 0); err == nil {
		err = osfile.Retry(func() error { return f.Truncate(int64(len(content))) })
	}
	if err == nil {
		err = sync(f)
	}
	if err == nil {
		err = may()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return false, err
	}
	err = osfile.Rename(spare, path, unix.RENAME_EXCHANGE)
	if err != nil { // there is no such file yet, or the file system cannot swap names
		err = osfile.Rename(spare, path, 0)
	}
	if err != nil {
		return false, err
	}
	if err := SyncDir(filepath.Dir(path), sync); err != nil {
		// A crash may make the spare the file again (see above), so nobody may write to it any
		// more. A later sync may not report the failure again.
		return true, unsure(errors.Join(err, osfile.Remove(spare)))
	}
	return true, nil
}
