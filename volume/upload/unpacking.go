package upload

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/unpack"
	"kubevirt.io/disk/internal/osfile"
)

// unpacking decompresses an upload in a goroutine of its own, over several requests. Between
// requests the goroutine waits for data.
type unpacking struct {
	s      *session
	in     *io.PipeWriter
	cancel context.CancelFunc
	done   chan struct{} // the goroutine has ended
	err    error         // set before done is closed
}

// packedPiece is how much packed data is received at once, while the piece before is unpacked.
// Bytes.
const packedPiece = 128 << 10

func startUnpacking(s *session) *unpacking {
	ctx, cancel := context.WithCancel(context.Background())
	from, in := io.Pipe()
	u := &unpacking{s: s, in: in, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(u.done)
		packed := bufio.NewReaderSize(feed{from}, packedPiece)
		if u.err = u.run(ctx, packed); u.err == nil {
			if _, err := packed.ReadByte(); err == nil {
				u.err = refuse("continues after the end of its compressed data; fetch it again")
			}
		} else if ctx.Err() != nil {
			u.err = errCut
		}
		_ = from.CloseWithError(u.err) // ends the caller of give
	}()
	return u
}

// run unpacks the data and stores it.
func (u *unpacking) run(ctx context.Context, packed io.Reader) error {
	s := u.s
	in, err := unpack.Open(s.name, packed, -1, unpack.Options{Memory: s.memory})
	if err != nil {
		return err
	}
	defer in.Close()
	head := make([]byte, image.DetectSize)
	n, err := io.ReadFull(in, head)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return err
	}
	format, err := image.Detect(in.Name, head[:n])
	if err != nil {
		return err
	}
	if err := s.begin(format, in.Size); err != nil {
		return err
	}
	if err := s.put(ctx, head[:n]); err != nil {
		return err
	}
	for {
		buf, err := s.fill.Next(ctx)
		if err != nil {
			return err
		}
		n, end := io.ReadFull(in, buf)
		s.fill.Put(buf[:n])
		ended := end == io.EOF || end == io.ErrUnexpectedEOF
		if end != nil && !ended {
			return end
		}
		if err := s.grown(in.Size); err != nil || ended {
			return err
		}
		if s.flush.due(s.fill) {
			if err := s.flush.start(s.fill, func() error { return nil }); err != nil {
				return err
			}
		}
	}
}

// whileWanted ends the goroutine if the upload must end before the returned function is called: a
// few packed bytes may be terabytes of zeros.
func (u *unpacking) whileWanted() (stop func() bool) {
	return context.AfterFunc(u.s.volume.Context(), u.cancel)
}

// give passes a piece on. It returns when the piece before has been unpacked.
func (u *unpacking) give(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	defer u.whileWanted()()
	_, err := u.in.Write(p)
	return err
}

// settle waits until all data so far is unpacked and the goroutine wants more. Then the goroutine
// uses nothing of the session.
func (u *unpacking) settle() error {
	defer u.whileWanted()()
	_, err := u.in.Write(nil) // returns when the goroutine reads
	return err
}

// feed leaves out the empty writes of settle.
type feed struct{ *io.PipeReader }

func (f feed) Read(p []byte) (n int, err error) {
	for n == 0 && err == nil {
		n, err = f.PipeReader.Read(p)
	}
	return n, err
}

// finish ends the data. It waits until all of it is unpacked and stored.
func (u *unpacking) finish() error {
	defer u.whileWanted()()
	_ = u.in.Close() // never fails
	<-u.done
	u.cancel()
	return u.err
}

// abandon ends the goroutine.
func (u *unpacking) abandon() {
	u.cancel()
	_ = u.in.CloseWithError(errCut) // never fails
	<-u.done
}

// expand replaces a foreign image by its disk. It ends when the volume's context does.
func (s *session) expand(ctx context.Context) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.volume.Context(), cancel)()
	defer func() {
		// The volume's context may end before ctx does.
		if s.volume.Context().Err() != nil || err != nil && ctx.Err() != nil {
			err = errCut
		}
	}()
	if err := s.fill.Drain(); err != nil {
		return err
	}
	// The next process could not tell how far this one has come.
	s.base.Packed = true
	if err := s.base.save(s.volume.Disk()); err != nil {
		return err
	}
	img, err := image.OpenUnnamed(ctx, s.name, s.fill.File(), image.Options{Foreign: true})
	if err != nil {
		return err
	}
	data := s.volume.Disk() + dataSuffix
	if err = s.fits(img.Size(), false); err == nil {
		err = expandTo(ctx, img, data+".raw")
	}
	err = errors.Join(err, img.Close())
	if err == nil {
		err = osfile.Rename(data+".raw", data, 0)
	}
	if err == nil {
		err = s.fill.Close()
	}
	if err == nil {
		err = s.open(img.Size())
	}
	s.format, s.expanded = image.FormatRaw, true
	return err
}

// expandTo writes a new file with the disk of an image.
func expandTo(ctx context.Context, img *image.Image, path string) error {
	file, err := osfile.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	to := image.NewDestination(file, func(err error) error {
		return errors.Join(err, file.Close())
	})
	return to.Finish(image.Expand(ctx, img, to, nil))
}
