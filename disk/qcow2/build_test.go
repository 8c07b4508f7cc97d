package qcow2

import (
	"bytes"
	"compress/flate"
	"context"
	"encoding/binary"
	"io"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// near reads without a context.
type near struct{ r io.ReaderAt }

func (n near) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	return n.r.ReadAt(p, off)
}

var bg = context.Background()

// image is a small image that tests take apart. Its clusters: 0 header, 1 refcount table, 2
// refcount block, 3 L1 table, 4 L2 table, 5 and up data.
type image struct {
	b    []byte
	bits uint
}

const (
	atL1   = 3
	atL2   = 4
	atData = 5
)

// newImage makes an image of version 3 with empty tables and room for some data clusters.
func newImage(bits uint, size uint64, dataClusters int) *image {
	im := &image{make([]byte, (atData+dataClusters)<<bits), bits}
	im.put32(0, magic)
	im.put32(4, 3)
	im.put32(20, uint32(bits))
	im.put64(24, size)
	perL2 := uint64(1) << (2*bits - 3)
	im.put32(36, uint32((size+perL2-1)/perL2))
	im.put64(40, uint64(atL1)<<bits)
	im.put64(48, 1<<bits)
	im.put32(56, 1)
	im.put32(96, 4)
	im.put32(100, headerLenV3)
	im.put64(1<<bits, 2<<bits) // refcount table
	im.put64(atL1<<bits, uint64(atL2)<<bits|entryCopied)
	return im
}

func (im *image) put32(off int, v uint32) { binary.BigEndian.PutUint32(im.b[off:], v) }
func (im *image) put64(off int, v uint64) { binary.BigEndian.PutUint64(im.b[off:], v) }
func (im *image) l2(i int) int            { return atL2<<im.bits + 8*i }
func (im *image) cluster(i int) []byte    { return im.b[i<<im.bits : (i+1)<<im.bits] }

// data makes guest cluster i a stored one in cluster n of the file.
func (im *image) data(i, n int, fill byte) {
	im.put64(im.l2(i), uint64(n)<<im.bits|entryCopied)
	copy(im.cluster(n), bytes.Repeat([]byte{fill}, 1<<im.bits))
}

// compressed makes guest cluster i a compressed one whose data is at byte off of the file.
func (im *image) compressed(i, off int, data []byte) {
	copy(im.b[off:], data)
	sectors := (off&511+len(data)+511)/512 - 1
	im.put64(im.l2(i), entryCompressed|uint64(sectors)<<(62-(im.bits-8))|uint64(off))
}

func deflated(t testing.TB, p []byte) []byte {
	var b bytes.Buffer
	w := testtool.Must(flate.NewWriter(&b, 6))(t)
	require.NoError(t, testtool.Err(w.Write(p)))
	require.NoError(t, w.Close())
	return b.Bytes()
}

func zstandard(t testing.TB, p []byte) []byte {
	w := testtool.Must(zstd.NewWriter(nil))(t)
	defer func() { _ = w.Close() }()
	return w.EncodeAll(p, nil)
}

// zstd has the compressed clusters decoded as zstd.
func (im *image) zstd() {
	im.put64(72, incompatCompression)
	im.put32(100, 112)
	im.b[104] = compressionZstd
}

func (im *image) open() (*Image, error) {
	return Open(bg, near{bytes.NewReader(im.b)}, int64(len(im.b)), Options{})
}

// opened opens the image, which has to be valid.
func (im *image) opened(t testing.TB) *Image {
	t.Helper()
	return testtool.Must(im.open())(t)
}

// opensAs opens the image and reads all of it, which has to be want.
func (im *image) opensAs(t *testing.T, want []byte) *Image {
	t.Helper()
	got := im.opened(t)
	require.True(t, bytes.Equal(want, filetest.Read(t, got, 0, len(want))))
	got.holdsNothing(t)
	return got
}

// holdsNothing fails if a block of the cache is still held: it would stay in memory for good.
func (im *Image) holdsNothing(t *testing.T) {
	t.Helper()
	for _, c := range []*cache{&im.tables, &im.passing, &im.decoded} {
		require.Empty(t, c.places)
		for i := range c.shards {
			for j := range c.shards[i].slots {
				require.Zero(t, c.shards[i].slots[j].pins)
			}
		}
	}
}
