package upload

import (
	"bufio"
	"errors"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/mikelolasagasti/xz"

	"kubevirt.io/disk/disk/image"
)

const (
	// maxWindow is how far back zstd may refer, because its decoder keeps that much in memory. It
	// is the window of level 19. The format asks every decoder to support at least that.
	maxWindow = 8 << 20
	// maxDictionary is the same limit for xz: the dictionary of level 7.
	maxDictionary = 16 << 20
)

// packing is a format of compression.
type packing struct {
	format image.Format
	open   func(io.Reader) (io.Reader, func(), error)
}

var packings = []packing{{"gzip", openGzip}, {"zstd", openZstd}, {"xz", openXz}}

// packingOf recognises compressed data by its first bytes. It returns nil for other data.
func packingOf(head []byte) *packing { return packingNamed(string(image.PackedFormat(head))) }

// packingNamed returns nil for a packing that is not undone here.
func packingNamed(name string) *packing {
	for i := range packings {
		if string(packings[i].format) == name {
			return &packings[i]
		}
	}
	return nil
}

func openGzip(r io.Reader) (io.Reader, func(), error) {
	z := &gunzip{in: r.(*bufio.Reader)}
	return z, func() {}, z.next()
}

// gunzip reads the members of a gzip file. Zeros may follow the last one, as on a medium with
// blocks.
type gunzip struct {
	in *bufio.Reader
	gzip.Reader
}

// next begins a member.
func (z *gunzip) next() error {
	err := z.Reset(z.in)
	z.Multistream(false)
	return err
}

func (z *gunzip) Read(p []byte) (int, error) {
	n, err := z.Reader.Read(p)
	if err != io.EOF {
		return n, err
	}
	padded := false
	for {
		c, err := z.in.ReadByte()
		switch {
		case err != nil:
			return n, err // io.EOF: that was all
		case c == 0:
			padded = true
		case padded:
			return n, errors.New("gzip: data follows the zeros at its end")
		default:
			if err = z.in.UnreadByte(); err == nil {
				err = z.next()
			}
			return n, err
		}
	}
}

func openZstd(r io.Reader) (io.Reader, func(), error) {
	z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return nil, nil, err
	}
	return z, z.Close, nil
}

func openXz(r io.Reader) (io.Reader, func(), error) {
	z, err := xz.NewReader(r, maxDictionary)
	return z, func() {}, err
}

// unpacked decompresses the data of r. An error is a *refusedError if the data is to blame.
type unpacked struct {
	*packing
	from io.Reader
	in   io.Reader // nil: not opened yet
	done func()
}

// newUnpacked prepares to decompress r. It reads nothing yet.
func newUnpacked(p *packing, r io.Reader) *unpacked {
	return &unpacked{packing: p, from: bufio.NewReaderSize(r, 64<<10), done: func() {}}
}

func (u *unpacked) Read(p []byte) (int, error) {
	if u.in == nil {
		in, done, err := u.open(u.from)
		if err != nil {
			return 0, u.explain(err)
		}
		u.in, u.done = in, done
	}
	n, err := u.in.Read(p)
	if err != nil && err != io.EOF {
		err = u.explain(err)
	}
	return n, err
}

// close frees the memory of the decoder.
func (u *unpacked) close() { u.done() }

// explain says what is wrong with compressed data, and what to do.
func (u *unpacked) explain(err error) error {
	if errors.Is(err, errCut) {
		return err
	}
	switch {
	case errors.Is(err, zstd.ErrWindowSizeExceeded) || errors.Is(err, zstd.ErrDecoderSizeExceeded):
		return refuse("is compressed with zstd so that more than %d MiB of memory are needed to "+
			"decompress it; compress it at level 19 or lower, without --long or --ultra",
			maxWindow>>20)
	case errors.Is(err, xz.ErrMemlimit):
		return refuse("is compressed with xz so that more than %d MiB of memory are needed to "+
			"decompress it; compress it at level 7 or lower, as with \"xz -6\"", maxDictionary>>20)
	case errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF):
		return refuse("ends in the middle of its %s data; fetch it again", u.format)
	}
	return refuse("cannot be decompressed: %v; check it with \"%s -t\" and fetch it again", err,
		u.format)
}
