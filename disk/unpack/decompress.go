package unpack

import (
	"bufio"
	"compress/bzip2"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/mikelolasagasti/xz"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/inflate"
)

const (
	// DefaultMemory is the limit of Options.Memory if none is set: the dictionary of "xz -7". Every
	// decoder of zstd should support half of that (RFC 8878, section 3.1.1.1.2). Bytes.
	DefaultMemory = 16 << 20
	// MaxMemory is the largest limit: enough for "xz -9", which needs 64 MiB.
	MaxMemory = 96 << 20
	// MinMemory is the smallest limit: "xz" and "zstd" need that much by default.
	MinMemory = 8 << 20
)

// Options limit what a wrapping may ask for. The zero value works.
type Options struct {
	// Memory is how far back compressed data may refer: its decoder keeps that much in memory. 0:
	// DefaultMemory. Bytes.
	Memory int64
	// Window is the limit for zstd instead, if it is larger than Memory. Bytes.
	Window int64
	// Beside decodes zstd in a goroutine of its own, which takes more memory.
	Beside bool
}

func (o Options) memory() int64 {
	if o.Memory <= 0 {
		return DefaultMemory
	}
	return min(o.Memory, MaxMemory)
}

// Error says why wrapped data cannot be unwrapped. It completes a sentence about the data, such as
// "the upload ...".
type Error struct {
	Reason string
	err    error // of the decoder; may be nil
}

func (e *Error) Error() string { return e.Reason }
func (e *Error) Unwrap() error { return e.err }

func refuse(format string, args ...any) error {
	return &Error{Reason: fmt.Sprintf(format, args...)}
}

const (
	gzipFormat  image.Format = "gzip"
	xzFormat    image.Format = "xz"
	zstdFormat  image.Format = "zstd"
	bzip2Format image.Format = "bzip2"
	tarFormat   image.Format = "tar"
)

// VMDK is the format of VMDK images, here in its stream-optimised form.
const VMDK image.Format = "vmdk"

// Compressed returns the format of data that begins with head, if Decompress can read it, or else
// "". head has 512 bytes, or image.DetectSize for zstd behind frames that are skipped.
func Compressed(head []byte) image.Format {
	if f := image.FormatOf(head); Known(f) || f == VMDK && isVMDKStream(head) {
		return f
	}
	return ""
}

// Wrapped returns the format that Open would unwrap from data that begins with head, or "". head
// has image.DetectSize bytes, or all of shorter data.
func Wrapped(head []byte) image.Format {
	if f := image.FormatOf(head); f == tarFormat {
		return f
	}
	return Compressed(head)
}

// Known reports whether a format is a compression of arbitrary data that Decompress can read.
func Known(f image.Format) bool { return image.IsWrapping(f) && f != tarFormat }

// Decompress returns the decompressed data of r. It reads nothing before the first Read. It returns
// io.EOF only after it has read r to its end. If the data is wrong, the error is an *Error; other
// errors are those of r. Members, streams and frames that follow each other are read as one.
func Decompress(f image.Format, r io.Reader, opt Options) io.ReadCloser {
	return &decompressor{format: f, from: &source{r: r}, opt: opt, done: func() {}}
}

// decompressor opens the decoder when it is first read.
type decompressor struct {
	format image.Format
	from   *source
	opt    Options
	in     io.Reader // nil: not opened yet
	done   func()
}

func (d *decompressor) open() (err error) {
	from := bufio.NewReaderSize(d.from, 64<<10)
	switch memory := d.opt.memory(); d.format {
	case gzipFormat:
		d.in = inflate.NewGzip(from)
	case VMDK:
		d.in = newVMDK(from)
	case bzip2Format:
		d.in = bzip2.NewReader(from)
	case xzFormat:
		d.in, err = xz.NewReader(from, uint32(memory))
	case zstdFormat:
		var z *zstd.Decoder
		workers := 1
		if d.opt.Beside {
			workers = 2
		}
		z, err = zstd.NewReader(from, zstd.WithDecoderConcurrency(workers),
			zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxWindow(uint64(max(memory, d.opt.Window))))
		if err == nil {
			d.in, d.done = z, z.Close
		}
	default:
		err = fmt.Errorf("%q is not a compression", d.format)
	}
	return err
}

func (d *decompressor) Read(p []byte) (n int, err error) {
	if d.in == nil {
		if err := d.open(); err != nil {
			d.in = nil
			return 0, d.explain(err)
		}
	}
	n, err = d.in.Read(p)
	if err != nil && err != io.EOF {
		err = d.explain(err)
	}
	return n, err
}

// Close frees the memory of the decoder.
func (d *decompressor) Close() error {
	d.done()
	return nil
}

// explain says what is wrong with compressed data, and what to do.
func (d *decompressor) explain(err error) error {
	if d.from.err != nil {
		return d.from.err
	}
	if errors.As(err, new(*Error)) {
		return err
	}
	const allow = "allow that with --unpack-memory (up to %dMi), or compress it %s"
	reason := ""
	switch memory := d.opt.memory() >> 20; {
	case errors.Is(err, zstd.ErrWindowSizeExceeded) || errors.Is(err, zstd.ErrDecoderSizeExceeded):
		reason = fmt.Sprintf("is compressed with zstd so that more than %d MiB of memory are "+
			"needed to decompress it; "+allow, max(memory, d.opt.Window>>20), MaxMemory>>20,
			"at level 19 or lower, without --long or --ultra")
	case errors.Is(err, xz.ErrMemlimit):
		reason = fmt.Sprintf("is compressed with xz so that more than %d MiB of memory are needed "+
			"to decompress it; "+allow, memory, MaxMemory>>20,
			"with a lower level, as with \"xz -6\"")
	case errors.Is(err, xz.ErrOptions):
		reason = "is compressed with an option of xz that is not known here, such as the filter " +
			"for ARM64 or RISC-V; decompress it with \"xz -d\""
	case errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF),
		errors.Is(err, xz.ErrBuf) && d.from.ended:
		reason = fmt.Sprintf("ends in the middle of its %s data; fetch it again", d.format)
	default:
		reason = fmt.Sprintf("cannot be decompressed: %v; check it with \"%s -t\" and fetch it "+
			"again", err, d.format)
	}
	return &Error{Reason: reason, err: err}
}

// source keeps the error of a reader, so that it is not taken for a fault of the data.
type source struct {
	r     io.Reader
	err   error // nil: none, or io.EOF
	ended bool
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	switch {
	case err == io.EOF:
		s.ended = true
	case err != nil:
		s.err = err
	}
	return n, err
}
