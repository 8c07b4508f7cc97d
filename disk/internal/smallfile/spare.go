package smallfile

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/internal/osfile"
)

const (
	// spareSuffix is how the name of a spare ends.
	SpareSuffix = ".spare"
	// spareSize is what a spare takes: more than is kept of a disk with a hundred initiators.
	// Bytes.
	spareSize = 32 << 10
)

// keepSpare sees to it, where that is possible, that there is a file of that name that has its
// space already. What has to be saved when everything else is taken, as by a guest that has filled
// its volume, is written into it: who may use a disk from now on, above all.
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

// replaceBySpare is replaceSmall without taking space: the spare is given the content, and changes
// names with the file. Nobody reads what a crash leaves in a spare.
func replaceBySpare(path string, content []byte, spare string, sync func(*os.File) error) error {
	// It may have been the file until a moment ago, and a crash makes it that again as long as its
	// name has not reached storage.
	if err := SyncDir(filepath.Dir(path), sync); err != nil {
		return err
	}
	f, err := osfile.OpenFile(spare, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	// Not emptied first, which would give its space away.
	if _, err = f.WriteAt(content, 0); err == nil {
		err = osfile.Retry(func() error { return f.Truncate(int64(len(content))) })
	}
	if err == nil {
		err = sync(f)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	err = osfile.Rename(spare, path, unix.RENAME_EXCHANGE)
	if err != nil { // there was no such file, or the file system cannot do that
		err = osfile.Rename(spare, path, 0)
	}
	if err != nil {
		return err
	}
	if err := SyncDir(filepath.Dir(path), sync); err != nil {
		// never to be written to: see above, and another sync may say that all is well
		return errors.Join(err, osfile.Remove(spare))
	}
	return nil
}
