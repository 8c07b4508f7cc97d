package image

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"

	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/words"
)

// ConvertQcow2 is Convert to a qcow2 image without a backing file.
func ConvertQcow2(ctx context.Context, img *Image, dst string, replace bool, c qcow2.Compression,
	p *Progress) error {
	return convert(img, dst, replace, func(f *os.File) error {
		_, err := Store(ctx, img, f, c, p)
		return err
	})
}

// Store writes the image, with its backing files, as one qcow2 image into the empty file f. It
// returns the size in bytes. The same content gives the same image: see qcow2.Write. After an
// error, f holds part of the image. If the image changes meanwhile, this is an error. p may be nil.
func Store(
	ctx context.Context, img *Image, f *os.File, c qcow2.Compression, p *Progress,
) (int64, error) {
	p = cmp.Or(p, new(Progress))
	p.Start(img.Size(), img.use.total())
	dst := &storedFile{File: f}
	n, err := qcow2.Write(ctx, dst, sourceDisk{img}, qcow2.WriteOptions{
		Compression: c, ReadUnit: img.CopyUnit(), Progress: p.add,
	})
	if err != nil && dst.err != nil && ctx.Err() == nil {
		err = dst.explain(img.Name())
	}
	if err == nil {
		err = img.CheckUntouched()
	}
	if err != nil {
		return 0, err
	}
	p.Finish()
	return n, nil
}

// sourceDisk is an image that gets stored in another one.
type sourceDisk struct{ *Image }

func (d sourceDisk) Data(ctx context.Context, f func(off, n int64) error) error {
	return d.top.walk(ctx, 0, d.Size(), func(off, n int64, kind extentKind) error {
		if kind == extentHole {
			return ctx.Err()
		}
		return f(off, n)
	})
}

// storedFile is the file that an image is written to. It remembers its own errors, to tell them
// from errors of reading the image. Only one goroutine uses it.
type storedFile struct {
	*os.File
	end int64 // where the data ends
	err error
}

func (f *storedFile) WriteAt(p []byte, off int64) (int, error) {
	n, err := f.File.WriteAt(p, off)
	f.end = max(f.end, off+int64(len(p)))
	if err != nil {
		f.err = err
	}
	return n, err
}

// explain makes a message for a person of the remembered error.
func (f *storedFile) explain(image string) error {
	what := "the qcow2 image of " + words.Name(image)
	if err := NoRoom(f.err, filepath.Dir(f.Name()), what, f.end); err != f.err {
		return err
	}
	return fmt.Errorf("writing %s: %w", what, f.err)
}
