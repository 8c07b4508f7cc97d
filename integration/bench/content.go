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

// makeContent fills a file with content like that of a system's disk: the files of /usr, each from
// a new block of 4 KiB, over and over up to size bytes. It keeps an existing file of that size.
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
	// The first block stays empty like a boot block. Otherwise a tool could take the disk for the
	// file that it begins with.
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

// errFull ends the walk through /usr.
var errFull = errors.New("full")

// blockWriter appends files, each padded to whole blocks, until no space is left.
type blockWriter struct {
	w    *bufio.Writer
	left int64
}

const blockSize = 4096

func (w *blockWriter) visit(path string, entry fs.DirEntry, err error) error {
	if err != nil || !entry.Type().IsRegular() {
		return nil // go without files that cannot be read
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

// warm reads a whole file into the page cache.
func warm(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, f)
	return errors.Join(err, f.Close())
}

// fill reads a whole file anew into the page cache, in folios of folio bytes. The size of the
// folios matters: ext4 goes over all blocks of a folio for each write into it. A write of 4 KiB
// takes 5 us in folios of 128 KiB, and 28 us in folios of 2 MiB, which a larger read-ahead makes.
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
	err = errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
	if err != nil {
		return err
	}
	buf := make([]byte, 8*folio)[:folio] // too large for a stack: memory of the heap is aligned
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
