package qcow2

import (
	"bytes"
	"fmt"
	"io"
	"sync"

	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/zstd"
)

// maxZstdWindow is the largest window that a zstd frame may ask for, bytes: four of the largest clusters.
const maxZstdWindow = 8 << 20

// codec decodes compressed clusters. A cluster's data is one stream that yields exactly a cluster; what follows it
// belongs to other clusters.
type codec struct {
	kind    uint8
	header  *header
	streams sync.Pool // of *stream
}

// stream is a decoder with the memory it reads from.
type stream struct {
	input   []byte
	source  bytes.Reader
	decoder io.Reader
	reset   func() error
}

func (c *codec) init(h *header) { c.kind, c.header = h.compression, h }

func (c *codec) name() string {
	if c.kind == compressionZstd {
		return "zstd"
	}
	return "zlib"
}

func (c *codec) open() (*stream, error) {
	if s, ok := c.streams.Get().(*stream); ok {
		return s, nil
	}
	// The sector count has cluster_bits - 8 bits.
	s := &stream{input: make([]byte, 512<<(c.header.clusterBits-8))}
	if c.kind == compressionZstd {
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxWindow(maxZstdWindow), zstd.WithDecoderMaxMemory(maxZstdWindow))
		if err != nil {
			return nil, err
		}
		s.decoder = d
		s.reset = func() error { return d.Reset(&s.source) }
		return s, nil
	}
	d := flate.NewReader(&s.source)
	s.decoder = d
	s.reset = func() error { return d.(flate.Resetter).Reset(&s.source, nil) }
	return s, nil
}

// decode fills p, which is one cluster, from an L2 entry's compressed data.
func (c *codec) decode(im *Image, entry uint64, p []byte) error {
	s, err := c.open()
	if err != nil {
		return err
	}
	defer c.streams.Put(s)
	off, length := c.header.compressedRange(entry)
	input := s.input[:min(length, im.fileSize-off)]
	if n, err := im.r.ReadAt(input, off); n < len(input) {
		return fmt.Errorf("reading compressed data at %#x: %w", off, err)
	}
	s.source.Reset(input)
	if err := s.reset(); err == nil {
		_, err = io.ReadFull(s.decoder, p)
		if err == nil {
			return nil
		}
		return bad("the %s data at %#x does not decode to a cluster: %v", c.name(), off, err)
	}
	return bad("the %s data at %#x cannot be decoded", c.name(), off)
}
