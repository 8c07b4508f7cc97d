package qcow2

import "io"

// outputWindow is how many bytes are written at once.
const outputWindow = 1 << 20

// output joins pieces that come nearly in order into large writes. It writes gaps as zeros.
type output struct {
	dst    io.WriterAt
	start  int64  // place of window in dst
	window []byte // what will be written there
}

// write writes p at off. off may lie before earlier pieces if a gap was left there.
func (o *output) write(p []byte, off int64) error {
	if o.window == nil {
		o.window = make([]byte, outputWindow)
	}
	for len(p) > 0 {
		switch at := off - o.start; {
		case at < 0:
			n := min(int64(len(p)), -at)
			if err := writeFull(o.dst, p[:n], off); err != nil {
				return err
			}
			p, off = p[n:], off+n
		case at < outputWindow:
			n := copy(o.window[at:], p)
			p, off = p[n:], off+int64(n)
		default:
			if err := o.flush(outputWindow); err != nil {
				return err
			}
		}
	}
	return nil
}

// finish writes everything up to end. Nothing may have been written behind end.
func (o *output) finish(end int64) error {
	for o.start < end {
		if err := o.flush(min(outputWindow, end-o.start)); err != nil {
			return err
		}
	}
	return nil
}

// flush writes the first n bytes of the window and clears them.
func (o *output) flush(n int64) error {
	if err := writeFull(o.dst, o.window[:n], o.start); err != nil {
		return err
	}
	clear(o.window[:n])
	o.start += n
	return nil
}

// writeFull calls dst.WriteAt. It fails if dst stores less without an error.
func writeFull(dst io.WriterAt, p []byte, off int64) error {
	n, err := dst.WriteAt(p, off)
	if err == nil && n < len(p) {
		return io.ErrShortWrite
	}
	return err
}
