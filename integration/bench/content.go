package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// makeContent fills a file with what a disk of a system holds: the files of /usr, each at a block
// of 4 KiB of its own, over and over until it has size bytes. A file of that size is kept.
func makeContent(path string, size int64) error {
	if info, err := os.Stat(path); err == nil && info.Size() == size {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	out, err := os.Create(path + ".new")
	if err != nil {
		return err
	}
	defer out.Close()
	// The first block stays empty, as a boot block does: a disk that begins with a file would be
	// taken for that file.
	if _, err := out.Seek(blockSize, io.SeekStart); err != nil {
		return err
	}
	w := &blockWriter{w: bufio.NewWriterSize(out, 1<<20), left: size - blockSize}
	for w.left > 0 {
		before := w.left
		if err := filepath.WalkDir("/usr", w.visit); err != nil && !errors.Is(err, errFull) {
			return fmt.Errorf("fill %s: %w", path, err)
		}
		if w.left == before {
			return errors.New("/usr holds no files to fill a disk with")
		}
	}
	if err := errors.Join(w.w.Flush(), out.Close()); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// errFull ends the walk.
var errFull = errors.New("full")

// blockWriter appends files, each padded to whole blocks, until no space is left.
type blockWriter struct {
	w    *bufio.Writer
	left int64
}

const blockSize = 4096

func (w *blockWriter) visit(path string, entry fs.DirEntry, err error) error {
	if err != nil || !entry.Type().IsRegular() {
		return nil // what cannot be read is not needed
	}
	in, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer in.Close()
	n, err := io.Copy(w.w, io.LimitReader(in, w.left))
	w.left -= n
	if err != nil {
		return err
	}
	for ; n%blockSize != 0 && w.left > 0; n++ {
		if err := w.w.WriteByte(0); err != nil {
			return err
		}
		w.left--
	}
	if w.left == 0 {
		return errFull
	}
	return nil
}

// warm reads a file, so that all of it is in the page cache.
func warm(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, f)
	return errors.Join(err, f.Close())
}

// fill puts all of a file into the page cache in folios of that many bytes, whatever was there:
// ext4 goes over all blocks of a folio for each write into it, so that a write of 4 KiB takes 5 us
// in folios of 128 KiB, and 28 us in those of 2 MiB that a larger read-ahead makes.
func fill(path string, folio int) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	source, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer source.Close()
	if err := errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)); err !=
		nil {
		return err
	}
	buf := make([]byte, 8*folio)[:folio] // more than a stack holds: the heap's pages are aligned
	for off := int64(0); ; off += int64(folio) {
		n, err := source.ReadAt(buf, off)
		if err != nil && err != io.EOF {
			return err
		}
		if _, err := f.WriteAt(buf[:n], off); err != nil {
			return err
		}
		if err == io.EOF {
			return f.Sync()
		}
	}
}
