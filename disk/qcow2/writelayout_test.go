package qcow2

import (
	"bytes"
	"context"
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// flatDisk is a Source without holes.
type flatDisk struct {
	near
	size int64
}

func (d flatDisk) Size() int64 { return d.size }

func (d flatDisk) Data(_ context.Context, f func(off, n int64) error) error { return f(0, d.size) }

// sliceFile is a file that is large enough.
type sliceFile []byte

func (f sliceFile) WriteAt(p []byte, off int64) (int, error) { return copy(f[off:], p), nil }

// TestWrittenTablesAreAtTheFront: the image up to its first data has everything that validation
// reads.
func TestWrittenTablesAreAtTheFront(t *testing.T) {
	r := rand.New(rand.NewPCG(17, 5))
	b := make([]byte, 1<<20)
	for i := range b {
		b[i] = byte(r.IntN(1 + r.IntN(256)))
	}
	clear(b[200<<10 : 600<<10]) // several tables
	f := make(sliceFile, 4<<20)
	d := flatDisk{near{bytes.NewReader(b)}, int64(len(b))}
	n := testtool.Must(Write(t.Context(), f, d, WriteOptions{clusterBits: 9}))(t)
	im := testtool.Must(Open(bg, near{bytes.NewReader(f[:n])}, n, Options{}))(t)

	h := im.hdr
	first, tables := n, 0
	metadata := max(h.refTableOffset+h.refTableLen<<h.clusterBits, h.l1Offset+int64(len(im.l1))*8)
	for _, e := range im.l1 {
		if e == 0 {
			continue
		}
		tables++
		off := int64(e & offsetMask)
		metadata = max(metadata, off+h.clusterSize())
		for i := int64(0); i < h.clusterSize(); i += 8 {
			switch e := binary.BigEndian.Uint64(f[off+i:]); entryKind(e) {
			case KindCompressed:
				at, _ := h.compressedRange(e)
				first = min(first, at)
			case KindData:
				first = min(first, int64(e&offsetMask))
			}
		}
	}
	require.Equal(t, 21, tables, "of 32: none for zeros")
	require.Equal(t, first, metadata)

	head := bytes.Clone(f[:n])
	clear(head[first:])
	_, err := Open(bg, near{bytes.NewReader(head)}, n, Options{})
	require.NoError(t, err, "nothing behind it is needed")
}

// The result of a compressor does not depend on what it compressed before.
func TestCompressorsForget(t *testing.T) {
	r := rand.New(rand.NewPCG(17, 6))
	for _, c := range []Compression{CompressionZstd, CompressionZlib} {
		const size = 64 << 10
		used := testtool.Must(newCompressor(c))(t)
		for range 60 {
			cluster := make([]byte, size)
			alphabet := 1 + r.IntN(256)
			for i := range cluster {
				cluster[i] = byte(r.IntN(alphabet))
				if i > 100 && r.IntN(3) > 0 {
					cluster[i] = cluster[i-1-r.IntN(100)]
				}
			}
			fresh := testtool.Must(newCompressor(c))(t)
			require.True(t, bytes.Equal(fresh(nil, cluster), used(nil, cluster)), c)
		}
	}
}

// QEMU decodes zlib clusters with a window of 4 KiB: no match may reach back further, however
// well it would fit.
func TestZlibStaysInItsWindow(t *testing.T) {
	compress := testtool.Must(newCompressor(CompressionZlib))(t)
	r := rand.New(rand.NewPCG(17, 7))
	for _, distance := range []int{1 << 10, 1<<12 - 1, 1<<12 + 1, 1 << 13, 1 << 15} {
		cluster := make([]byte, 64<<10)
		for i := range cluster[:distance] {
			cluster[i] = byte(r.Uint32())
		}
		for i := distance; i < len(cluster); i++ {
			cluster[i] = cluster[i-distance]
		}
		n := len(compress(nil, cluster))
		if distance < 1<<12 {
			require.Less(t, n, len(cluster)/4, "matches %d back are found", distance)
		} else {
			require.Greater(t, n, len(cluster), "matches %d back are not used", distance)
		}
	}
}
