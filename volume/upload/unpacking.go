package upload

import (
	"context"
	"io"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/unpack"
)

// unpacking decompresses an upload in a goroutine of its own, from one request to the next. Between
// requests it waits for more.
type unpacking struct {
	s      *session
	pieces [2][]byte // one is unpacked while the other is received
	next   int       // the piece to receive into
	in     chan []byte
	hungry chan struct{} // the goroutine needs more
	waits  bool          // it has asked for more, and has not got it yet
	rest   []byte        // the rest of the piece that is being unpacked
	ended  bool          // there is no more
	cancel context.CancelFunc
	done   chan struct{} // the goroutine has ended
	err    error         // set before done is closed
}

// packedPiece is how much packed data is received at once: bytes.
const packedPiece = 128 << 10

func startUnpacking(s *session) *unpacking {
	ctx, cancel := context.WithCancel(context.Background())
	u := &unpacking{s: s, in: make(chan []byte), hungry: make(chan struct{}), cancel: cancel,
		done: make(chan struct{})}
	go func() {
		defer close(u.done)
		u.err = u.run(ctx)
	}()
	return u
}

// run unpacks the data and stores it.
func (u *unpacking) run(ctx context.Context) error {
	s := u.s
	in, err := unpack.Open(s.name, feed{ctx, u}, -1, unpack.Options{Memory: s.memory})
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

// piece returns memory to receive into.
func (u *unpacking) piece() []byte {
	p := &u.pieces[u.next]
	u.next = 1 - u.next
	if *p == nil {
		*p = make([]byte, packedPiece)
	}
	return *p
}

// give hands a piece over once the piece before has been unpacked. It owns the memory until then.
func (u *unpacking) give(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	if err := u.settle(); err != nil {
		return err
	}
	u.waits = false
	u.in <- p
	return nil
}

// settle waits until everything that was given is unpacked.
func (u *unpacking) settle() error {
	if u.waits {
		return nil
	}
	select {
	case <-u.hungry:
		u.waits = true
		return nil
	case <-u.done:
	}
	if u.err == nil {
		return refuse("continues after the end of its compressed data; fetch it again")
	}
	return u.err
}

// finish ends the data. It waits until all of it is unpacked and stored.
func (u *unpacking) finish() error {
	if err := u.settle(); err != nil {
		return err
	}
	close(u.in)
	<-u.done
	u.cancel()
	return u.err
}

// abandon ends the goroutine.
func (u *unpacking) abandon() {
	u.cancel()
	<-u.done
}

// feed is the packed data that the goroutine reads.
type feed struct {
	ctx context.Context
	u   *unpacking
}

func (f feed) Read(p []byte) (int, error) {
	u := f.u
	if len(u.rest) == 0 && u.ended {
		return 0, io.EOF
	}
	if len(u.rest) == 0 {
		select {
		case u.hungry <- struct{}{}:
		case <-f.ctx.Done():
			return 0, errCut
		}
		select {
		case more, open := <-u.in:
			if !open {
				u.ended = true
				return 0, io.EOF
			}
			u.rest = more
		case <-f.ctx.Done():
			return 0, errCut
		}
	}
	n := copy(p, u.rest)
	u.rest = u.rest[n:]
	return n, nil
}
