package qcow2

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/klauspost/compress/zstd"

	"kubevirt.io/disk/internal/inflate"
)

// maxZstdWindow is the largest window that a zstd frame may ask for: four times the largest
// cluster. Bytes.
const maxZstdWindow = 8 << 20

// codec decodes compressed clusters. The data of a cluster is one stream that yields exactly one
// cluster. Bytes behind the stream belong to other clusters.
type codec struct {
	kind     uint8
	decoders sync.Pool // of *inflate.Decoder or *zstdDecoder
	inputs   sync.Pool // of *[]byte, see input
}

func (c *codec) init(h *header) { c.kind = h.compression }

func (c *codec) name() string {
	if c.kind == compressionZstd {
		return "zstd"
	}
	return "zlib"
}

// stopsEarly reports whether decoding only the beginning of a cluster saves time. With zstd it does
// not: a cluster's frame is one block, and the library returns only whole blocks.
func (c *codec) stopsEarly() bool { return c.kind == compressionZlib }

// decode fills p from data, which lies at off in the file. p is one cluster or, if stopsEarly is
// true, may be the beginning of one.
func (c *codec) decode(p, data []byte, off int64) (err error) {
	if c.kind == compressionZstd {
		err = c.zstd(p, data)
	} else {
		err = c.zlib(p, data)
	}
	if err != nil {
		return bad("the %s data at %#x does not decode to a cluster: %v", c.name(), off, err)
	}
	return nil
}

var (
	errShort = errors.New("it ends too early")
	errLong  = errors.New("it is more than a cluster")
)

// zlib decodes raw deflate, which qcow2 calls zlib. As in QEMU, a stream may go on after the
// cluster is full.
func (c *codec) zlib(p, data []byte) error {
	d, _ := c.decoders.Get().(*inflate.Decoder)
	if d == nil {
		d = new(inflate.Decoder)
	}
	defer c.decoders.Put(d)
	n, err := d.Decode(p, data)
	if err == nil && n < len(p) {
		err = errShort
	}
	return err
}

// zstdSlack is the size of the room behind the output: the largest output of a block, and what a
// copy in large steps writes past it. With this room, the library need not check after every copy
// whether there is room. This makes decoding a third faster. Bytes.
const zstdSlack = 128<<10 + 64

// zstdDecoder is a decoder with memory for a cluster and the slack.
type zstdDecoder struct {
	decoder *zstd.Decoder
	out     []byte
}

func newZstdDecoder(cluster int) (*zstdDecoder, error) {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecodeAllCapLimit(true),
		zstd.WithDecoderMaxWindow(maxZstdWindow), zstd.WithDecoderMaxMemory(maxZstdWindow))
	return &zstdDecoder{d, make([]byte, 0, cluster+zstdSlack)}, err
}

// zstd decodes one or more frames that together make a cluster.
func (c *codec) zstd(p, data []byte) error {
	d, _ := c.decoders.Get().(*zstdDecoder)
	if d == nil {
		var err error
		if d, err = newZstdDecoder(len(p)); err != nil {
			return err
		}
	}
	defer c.decoders.Put(d)
	out := d.out
	for len(out) < len(p) {
		n, err := frameLength(data)
		if err != nil {
			return err
		}
		if out, err = d.decoder.DecodeAll(data[:n], out); err != nil {
			return err
		}
		data = data[n:]
	}
	if copy(p, out) < len(out) {
		return errLong
	}
	return nil
}

// frameLength returns the length of the zstd frame at the beginning of data. Decoding needs the end
// of the frame, because data of other clusters may follow (RFC 8878, section 3.1.1).
func frameLength(data []byte) (int, error) {
	var h zstd.Header
	if err := h.Decode(data); err != nil {
		return 0, err
	}
	n := int64(h.HeaderSize)
	if h.Skippable {
		n += int64(h.SkippableSize)
	} else {
		for last := false; !last; {
			if int64(len(data)) < n+3 {
				return 0, errShort
			}
			block := int64(data[n]) | int64(data[n+1])<<8 | int64(data[n+2])<<16
			last = block&1 != 0
			n += 3
			if repeated := block>>1&3 == 1; repeated {
				n++
			} else {
				n += block >> 3
			}
		}
		if h.HasCheckSum {
			n += 4
		}
	}
	if n > int64(len(data)) {
		return 0, errShort
	}
	return int(n), nil
}

// input returns a buffer of n bytes for compressed data. release gives it back.
func (c *codec) input(n int64) *[]byte {
	b, _ := c.inputs.Get().(*[]byte)
	if b == nil {
		b = new([]byte)
	}
	if int64(cap(*b)) < n {
		*b = make([]byte, n)
	}
	*b = (*b)[:n]
	return b
}

func (c *codec) release(b *[]byte) { c.inputs.Put(b) }

// loadCluster fills p with the compressed cluster of an L2 entry, or with its beginning.
func (im *Image) loadCluster(ctx context.Context, p []byte, entry uint64) error {
	begin, end := im.storedRange(entry)
	b := im.codec.input(end - begin)
	defer im.codec.release(b)
	if err := readFull(ctx, im.r, *b, begin); err != nil {
		return fmt.Errorf("reading compressed data at %#x: %w", begin, err)
	}
	return im.codec.decode(p, *b, begin)
}

// readCompressed reads from a compressed cluster, up to its end, and returns how many bytes it
// read. A read of a part keeps the cluster, so a series of small reads decodes it once. If the read
// begins in the middle of a cluster, only its part of the cluster is decoded, because such a reader
// usually goes on elsewhere. A second such read decodes the whole cluster.
func (im *Image) readCompressed(ctx context.Context, p []byte, off int64, entry uint64) (
	int, error,
) {
	size := im.hdr.clusterSize()
	within := off & (size - 1)
	if within == 0 && int64(len(p)) >= size {
		if err := im.loadCluster(ctx, p[:size], entry); err != nil {
			return 0, err
		}
		return int(size), nil
	}
	need := min(within+int64(len(p)), size)
	if within == 0 || need > size*3/4 || !im.codec.stopsEarly() {
		need = size
	}
	b, err := im.decoded.get(ctx, off>>im.hdr.clusterBits, entry, need)
	if err != nil {
		return 0, err
	}
	n := copy(p, b.data[within:])
	b.release()
	return n, nil
}

// storedRange returns where an entry's compressed data lies in the file. The file may end within
// the last sector of the data. If the table has changed since it was validated, the data may lie
// past the end of the file. Then the range is empty.
func (im *Image) storedRange(entry uint64) (begin, end int64) {
	off, length := im.hdr.compressedRange(entry)
	return off, max(off, min(off+length, im.fileSize))
}
