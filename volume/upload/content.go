package upload

import (
	"bufio"
	"bytes"

	"errors"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/mikelolasagasti/xz"
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
	name  string
	magic string
	open  func(io.Reader) (io.Reader, func(), error)
}

var packings = []packing{
	{"gzip", "\x1f\x8b\x08", openGzip},
	{"zstd", "\x28\xb5\x2f\xfd", openZstd},
	{"xz", "\xfd7zXZ\x00", openXz},
}

// packingOf recognises compressed data by its first bytes. It returns nil for other data.
func packingOf(head []byte) *packing {
	for i := range packings {
		if bytes.HasPrefix(head, []byte(packings[i].magic)) {
			return &packings[i]
		}
	}
	return nil
}

func openGzip(r io.Reader) (io.Reader, func(), error) {
	z, err := gzip.NewReader(r)
	return z, func() {}, err
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
		return refuse("ends in the middle of its %s data; fetch it again", u.name)
	}
	return refuse("cannot be decompressed: %v; check it with \"%s -t\" and fetch it again", err,
		u.name)
}
