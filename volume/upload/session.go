package upload

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/unpack"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
)

// session is one upload. One request at a time calls its methods.
type session struct {
	name   string // of the volume
	volume Volume // claimed by the request
	base   record // the record at the beginning

	length int64  // of all the data, bytes; -1: unknown
	offset int64  // how much has come
	head   []byte // the first bytes, while the format is undecided
	sums   summer
	adding adding
	out    *unpacking // of packed data; nil: it is plain, or undecided
	memory int64      // of Options.UnpackMemory
	placed bool       // the data has the name of the volume's disk

	// While a goroutine unpacks, only that goroutine uses these.
	format   image.Format   // "": undecided
	fill     *image.Filling // nil: undecided
	checked  bool           // the header of a qcow2 image
	expanded bool           // it was a foreign image
	granted  int64          // reserved for a volume without a size yet, bytes
	flush    flusher
}

// syncEvery is how many bytes are written before they are synced to storage.
const syncEvery = 64 << 20

// newSession begins an upload without data.
func newSession(name string, v Volume, r record) *session {
	s := &session{name: name, volume: v, base: r, length: r.Length}
	s.sums = summerFor(r.Want)
	if r.Resumable && s.sums["sha-256"] == nil {
		s.sums["sha-256"] = newSummer("sha-256")["sha-256"] // the digest may come at the end
	}
	return s
}

// restore makes a session from the record of an earlier one.
func restore(name string, v Volume, r record) (*session, error) {
	s := newSession(name, v, r)
	s.offset, s.head, s.format = r.Offset, r.Head, r.Format
	var err error
	if r.Offset > 0 { // the first record of an upload has no digests
		if s.sums, err = loadSummer(r.Sums); err != nil {
			return nil, err
		}
	}
	if r.Placed { // the process ended before the volume was served
		if err := takeBack(v); err != nil {
			return nil, err
		}
	}
	if r.Format == "" {
		return s, nil
	}
	if err = s.open(r.Offset); err == nil && s.length > 0 {
		err = s.fill.Expect(s.length)
	}
	return s, err
}

func (s *session) open(keep int64) (err error) {
	s.fill, err = image.OpenFilling(s.volume.Disk()+dataSuffix, keep)
	return err
}

// take receives data until the body ends. It returns errCut if the data was cut off and the upload
// can be resumed; after any other error it cannot. take calls told from time to time while data
// comes.
func (s *session) take(ctx context.Context, body io.Reader, told func()) error {
	if s.out == nil && s.fill == nil {
		switch err := s.takeHead(body); {
		case err == io.EOF:
			return nil // it is too short to decide yet
		case err != nil:
			return err
		}
		if err := s.decide(ctx); err != nil {
			return err
		}
	}
	told()
	if s.out != nil {
		return s.takePacked(body, told)
	}
	return s.takePlain(ctx, body, told)
}

// takeHead receives the bytes that decide the format. It returns io.EOF if there are no more.
func (s *session) takeHead(body io.Reader) error {
	p := make([]byte, image.DetectSize-len(s.head))
	n, err := io.ReadFull(body, p)
	s.head = append(s.head, p[:n]...)
	if cut := s.count(p[:n]); cut != nil {
		return cut
	}
	if err == io.ErrUnexpectedEOF {
		err = io.EOF
	}
	return err
}

// count counts data that has come, and adds it to the digests. It fails if there is more data than
// announced.
func (s *session) count(p []byte) error {
	s.sums.add(p)
	return s.advance(len(p))
}

// advance counts data that has come.
func (s *session) advance(n int) error {
	s.offset += int64(n)
	if s.length >= 0 && s.offset > s.length {
		return wrong("more data has come than the %d bytes that were announced", s.length)
	}
	s.volume.Progress(s.offset, max(s.length, 0))
	return nil
}

// decide recognises the format of the data by its first bytes.
func (s *session) decide(ctx context.Context) error {
	head := s.head
	s.head = nil
	f := unpack.Wrapped(head)
	if c := s.base.Coding; c != "" && string(f) != c {
		return refuse("is not made by %s, as its Content-Encoding says; leave that field out, or "+
			"fetch the file again", c)
	}
	if f != "" {
		s.base.Packed = true
		if err := s.base.save(s.volume.Disk()); err != nil {
			return err
		}
		s.out = startUnpacking(s)
		return s.out.give(head)
	}
	format, err := image.Detect(s.name, head)
	if err != nil {
		return err
	}
	if err := s.begin(format, s.length); err != nil {
		return err
	}
	return s.put(ctx, head)
}

// begin opens the file for content of this format and length; length -1: unknown.
func (s *session) begin(format image.Format, length int64) error {
	if format == image.FormatRaw && length > 0 {
		if length%disk.SectorSize != 0 {
			return refuse("is a raw disk of %d bytes, which is not a multiple of %d; fetch it "+
				"again", length, disk.SectorSize)
		}
		if err := s.rawFits(length, false); err != nil {
			return err
		}
	}
	if err := s.open(0); err != nil {
		return err
	}
	s.format = format
	return s.fill.Expect(length)
}

// put appends a piece of content.
func (s *session) put(ctx context.Context, p []byte) error {
	for len(p) > 0 {
		buf, err := s.fill.Next(ctx)
		if err != nil {
			return err
		}
		n := copy(buf, p)
		s.fill.Put(buf[:n])
		p = p[n:]
	}
	return nil
}

func (s *session) takePlain(ctx context.Context, body io.Reader, told func()) error {
	defer s.adding.wait()
	for {
		buf, err := s.fill.Next(ctx)
		if err != nil {
			return err
		}
		s.adding.spare(buf)
		n, end := io.ReadFull(body, buf)
		err = s.advance(n)
		s.adding.start(s.sums, buf[:n])
		s.fill.Put(buf[:n])
		if err != nil {
			return err
		}
		if err := s.grown(s.length); err != nil {
			return err
		}
		switch {
		case end == io.EOF || end == io.ErrUnexpectedEOF:
			return nil
		case end != nil:
			return end
		}
		if s.flush.due(s.fill) {
			if err := s.checkpoint(); err != nil {
				return err
			}
		}
		told()
	}
}

func (s *session) takePacked(body io.Reader, told func()) error {
	p := make([]byte, packedPiece)
	for {
		n, end := io.ReadFull(body, p)
		if err := s.count(p[:n]); err != nil {
			return err
		}
		if err := s.out.give(p[:n]); err != nil {
			return err
		}
		switch {
		case end == io.EOF || end == io.ErrUnexpectedEOF:
			return nil
		case end != nil:
			return end
		}
		told()
	}
}

// grown checks the content so far. length is the length of all content; -1: unknown.
func (s *session) grown(length int64) error {
	size := s.fill.Size()
	if s.format == image.FormatRaw {
		return s.rawFits(size, length < 0)
	}
	if limit := fileLimit(s.volume.Size()); limit > 0 && size > limit {
		return tooLarge("the image has more than %d bytes, and the volume %q only %d", limit,
			s.name, s.volume.Size())
	}
	if s.format == image.FormatQcow2 && !s.checked && size >= image.HeadSize {
		return s.checkHead(length)
	}
	return nil
}

// checkHead checks the header of a qcow2 image.
func (s *session) checkHead(length int64) error {
	if err := s.fill.Drain(); err != nil {
		return err
	}
	head := make([]byte, min(s.fill.Size(), image.HeadSize))
	if _, err := s.fill.File().ReadAt(head, 0); err != nil {
		return err
	}
	h, err := image.CheckHead(s.name, head, length, image.Options{})
	if err != nil {
		return err
	}
	s.checked = true
	return s.fits(h.VirtualSize, false)
}

// reserveStep is how many bytes are reserved ahead of data of unknown size.
const reserveStep = 1 << 30

// fits checks whether the volume can have a disk of at least this size.
func (s *session) fits(size int64, more bool) error {
	if limit := s.volume.Size(); limit > 0 {
		if size > limit {
			return tooLarge("the disk has %d bytes or more, and the volume %q has %d", size, s.name,
				limit)
		}
		return nil
	}
	if size <= s.granted {
		return nil
	}
	if size > image.DefaultMaxVirtualSize {
		return tooLarge("the disk has %d bytes or more, and %d are the limit", size,
			int64(image.DefaultMaxVirtualSize))
	}
	if err := s.volume.Reserve(size); err != nil {
		return err
	}
	s.granted = size
	if more && s.volume.Reserve(size+reserveStep) == nil {
		s.granted = size + reserveStep
	}
	return nil
}

// rawFits is fits for raw data that is still coming. It may be a fixed VHD image, whose footer does
// not belong to the disk; only its end tells.
func (s *session) rawFits(size int64, more bool) error {
	if limit := s.volume.Size(); limit > 0 && size <= limit+disk.SectorSize {
		return nil
	}
	return s.fits(size, more)
}

// checkpoint makes the data so far durable while more arrives.
func (s *session) checkpoint() error {
	s.adding.wait()
	if !s.base.Resumable || s.out != nil {
		return s.flush.start(s.fill, func() error { return nil })
	}
	next, err := s.snapshot()
	if err != nil {
		return err
	}
	return s.flush.start(s.fill, func() error { return next.save(s.volume.Disk()) })
}

// snapshot returns a record of the data so far. The data is in the file, but not durable yet.
func (s *session) snapshot() (record, error) {
	if s.fill != nil {
		if err := s.fill.Drain(); err != nil {
			return record{}, err
		}
	}
	next := s.base
	next.Touched, next.Length, next.Offset = time.Now(), s.length, s.offset
	next.Format, next.Head, next.Placed = s.format, s.head, s.placed
	var err error
	next.Sums, err = s.sums.save()
	return next, err
}

// pause keeps the data so far for a later request, and closes the file of plain data.
func (s *session) pause() error {
	if s.out != nil {
		s.base.Touched = time.Now()
		return s.out.settle()
	}
	next, err := s.snapshot()
	err = errors.Join(err, s.flush.wait())
	if s.fill != nil {
		if err == nil {
			err = s.fill.Sync()
		}
		err = errors.Join(err, s.fill.Close())
	}
	if err != nil {
		return err
	}
	return next.save(s.volume.Disk())
}

// finish makes the volume from the data, and serves it.
func (s *session) finish(ctx context.Context) error {
	if s.length >= 0 && s.offset != s.length {
		return wrong("%d bytes have come, and %d were announced", s.offset, s.length)
	}
	if s.out == nil && s.fill == nil {
		if err := s.decide(ctx); err != nil {
			return err
		}
	}
	if s.out != nil {
		if err := s.out.finish(); err != nil {
			return err
		}
	}
	if err := s.flush.wait(); err != nil {
		return err
	}
	switch {
	case s.format == image.FormatQcow2:
		return s.finishQcow2(ctx)
	case image.IsForeign(s.format):
		if err := s.expand(ctx); err != nil {
			return err
		}
	}
	return s.finishRaw(ctx)
}

func (s *session) finishRaw(ctx context.Context) error {
	size := s.fill.Size()
	if err := s.fill.Drain(); err != nil {
		return err
	}
	err := image.CheckRaw(s.name, s.fill.File(), size)
	if own := new(image.Error); errors.As(err, &own) && image.IsForeign(own.Format) && !s.expanded {
		if err := s.expand(ctx); err != nil { // a fixed VHD image, by its footer
			return err
		}
		return s.finishRaw(ctx)
	}
	if large := s.fits(size, false); large != nil {
		return large
	}
	if err != nil {
		return err
	}
	size = max(size, s.volume.Size())
	if err := s.fill.Finish(size); err != nil {
		return err
	}
	return s.place(ctx, s.volume.Disk(), "")
}

func (s *session) finishQcow2(ctx context.Context) error {
	if err := s.fill.Finish(s.fill.Size()); err != nil {
		return err
	}
	size, err := image.CheckAlone(ctx, s.name, s.fill.File(), image.Options{})
	if err != nil {
		return err
	}
	if err := s.fits(size, false); err != nil {
		return err
	}
	file := s.volume.Disk() + qcow2Suffix
	return s.place(ctx, file, file)
}

// place gives the file its final name, and serves the volume. It saves the record first, so that
// the file never lacks an owner. If there is another file of that name, it stays.
func (s *session) place(ctx context.Context, to, image string) error {
	path := s.volume.Disk()
	next, err := s.snapshot()
	if err == nil {
		next.Placed = true
		err = next.save(path)
	}
	if err == nil {
		err = s.fill.Close()
	}
	if err != nil {
		return err
	}
	switch err = durable.RenameNew(path+dataSuffix, to); {
	case errors.Is(err, fs.ErrExist):
		next.Placed = false
		return errors.Join(taken(s.name, to), next.save(path))
	case err == nil:
		s.placed = true // not before: a file with that name may be another's
		err = durable.SyncParent(to)
	}
	if err != nil {
		return err
	}
	if err := s.volume.Complete(ctx, image); err != nil {
		return err
	}
	// The volume is served. Only the record is left, and is not read any more. If it cannot be
	// removed now, it is removed with the volume.
	_ = osfile.Remove(path + recordSuffix)
	return nil
}

// discard ends the upload and removes its data.
func (s *session) discard() error {
	s.free()
	return clearFiles(s.volume, s.placed)
}

// free ends the upload in this process. Its files remain.
func (s *session) free() {
	if s.out != nil {
		s.out.abandon()
	}
	_ = s.flush.wait()
	if s.fill != nil {
		_ = s.fill.Close() // its content is not needed
	}
}
