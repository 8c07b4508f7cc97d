package qcow2

import (
	"bytes"
	"sync"

	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/zstd"
)

// zlibWindow is how far back a match in a zlib cluster may reach, because QEMU decodes with a
// window of 12 bits. Bytes.
const zlibWindow = 1 << 12

// compressor appends a compressed cluster to dst. The result does not depend on earlier clusters.
// Only one goroutine uses it.
type compressor func(dst, cluster []byte) []byte

// newCompressor returns a compressor, or nil if clusters are not compressed.
func newCompressor(compression Compression) (compressor, error) {
	switch compression {
	case CompressionZstd:
		e, err := newZstdEncoder()
		if err != nil {
			return nil, err
		}
		return func(dst, cluster []byte) []byte { return e.EncodeAll(cluster, dst) }, nil
	case CompressionZlib:
		var out bytes.Buffer
		f, err := flate.NewWriterWindow(&out, zlibWindow)
		if err != nil {
			return nil, err
		}
		return func(dst, cluster []byte) []byte {
			out = *bytes.NewBuffer(dst)
			f.Reset(&out)
			// Writes to a bytes.Buffer cannot fail.
			_, _ = f.Write(cluster)
			_ = f.Close()
			return out.Bytes()
		}, nil
	}
	return nil, nil
}

// newZstdEncoder makes an encoder of clusters, each of which is a frame of its own (RFC 8878).
func newZstdEncoder() (*zstd.Encoder, error) {
	return zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false),
		zstd.WithWindowSize(1<<writtenClusterBits), zstd.WithSingleSegment(true),
		zstd.WithEncoderLevel(zstd.SpeedFastest))
}

// tables compresses tables, not clusters. Any number of goroutines may use it.
var tables = sync.OnceValues(newZstdEncoder)

// AppendZstd appends src, which has from 1 byte to 64 KiB, to dst as a zstd frame. As for a
// cluster, the frame depends on src alone, so that the tables of an image have the same bytes
// everywhere.
func AppendZstd(dst, src []byte) ([]byte, error) {
	e, err := tables()
	if err != nil {
		return nil, err
	}
	return e.EncodeAll(src, dst), nil
}
