package qcow2

import (
	"bytes"

	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/zstd"
)

// zlibWindow is how far a match of a zlib cluster may reach back, bytes: QEMU decodes with a window
// of 12 bits.
const zlibWindow = 1 << 12

// compressor appends a compressed cluster to dst. What it makes of a cluster does not depend on
// those before it. It is for one goroutine.
type compressor func(dst, cluster []byte) []byte

// newCompressor makes a compressor; nil where clusters are not compressed.
func newCompressor(compression Compression, clusterSize int64) (compressor, error) {
	switch compression {
	case CompressionZstd:
		// Of the levels, the default one's output is about as large as that of libzstd's, which
		// qemu-img uses. A checksum, and a window for more than a cluster, would only cost space
		// and memory.
		e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedDefault),
			zstd.WithEncoderCRC(false), zstd.WithEncoderConcurrency(1),
			zstd.WithLowerEncoderMem(true), zstd.WithSingleSegment(true),
			zstd.WithAllLitEntropyCompression(true),
			zstd.WithWindowSize(int(max(clusterSize, zstd.MinWindowSize))))
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
			// A buffer takes everything.
			_, _ = f.Write(cluster)
			_ = f.Close()
			return out.Bytes()
		}, nil
	}
	return nil, nil
}
