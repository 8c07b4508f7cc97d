package qcow2_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/testtool"
)

var compressions = []qcow2.Compression{
	qcow2.CompressionZstd, qcow2.CompressionZlib, qcow2.CompressionNone,
}

// run is a part of a disk with content.
type run struct {
	off     int64
	content []byte
}

// memoryDisk is a Source of a few runs, in order, in a disk of any size.
type memoryDisk struct {
	size int64
	runs []run
	read atomic.Int64 // bytes, of runs
}

func (d *memoryDisk) Size() int64 { return d.size }

func (d *memoryDisk) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	n := max(0, min(int64(len(p)), d.size-off))
	clear(p[:n])
	for _, r := range d.runs {
		from, to := max(off, r.off), min(off+n, r.off+int64(len(r.content)))
		if from < to {
			d.read.Add(int64(copy(p[from-off:to-off], r.content[from-r.off:])))
		}
	}
	if n < int64(len(p)) {
		return int(n), io.EOF
	}
	return int(n), nil
}

func (d *memoryDisk) Data(_ context.Context, f func(off, n int64) error) error {
	for _, r := range d.runs {
		if err := f(r.off, int64(len(r.content))); err != nil {
			return err
		}
	}
	return nil
}

// whole is the disk with all of it said to be data.
func (d *memoryDisk) whole(t testing.TB) *memoryDisk {
	all := filetest.Read(t, d, 0, d.size)
	return &memoryDisk{size: d.size, runs: []run{{0, all}}}
}

// memoryFile is a file that grows.
type memoryFile struct{ b []byte }

func (f *memoryFile) WriteAt(p []byte, off int64) (int, error) {
	if more := int(off) + len(p) - len(f.b); more > 0 {
		f.b = append(f.b, make([]byte, more)...)
	}
	return copy(f.b[off:], p), nil
}

func write(t testing.TB, src qcow2.Source, opt qcow2.WriteOptions) []byte {
	t.Helper()
	var f memoryFile
	n := testtool.Must(qcow2.Write(t.Context(), &f, src, opt))(t)
	require.EqualValues(t, len(f.b), n)
	return f.b
}

func openBytes(t testing.TB, b []byte) (*qcow2.Image, error) {
	return qcow2.Open(t.Context(), near{bytes.NewReader(b)}, int64(len(b)), qcow2.Options{})
}

// content is what a disk may hold: of each stretch of 4 KiB or more, words, structures, noise or
// zeros.
func content(r *rand.Rand, size int) []byte {
	const text = "the quick brown fox jumps over a lazy dog 0x7f == /usr/lib/libc.so.6 kubevirt"
	words := bytes.Fields([]byte(text))
	b := make([]byte, 0, size)
	for len(b) < size {
		end := min(size, len(b)+4096*(1+r.IntN(32)))
		switch kind := r.IntN(5); kind {
		case 0: // zeros
			b = append(b, make([]byte, end-len(b))...)
		case 1: // noise
			for len(b) < end {
				b = binary.LittleEndian.AppendUint64(b, r.Uint64())
			}
		case 2: // a table
			for i := uint32(0); len(b) < end; i++ {
				b = binary.BigEndian.AppendUint64(b, uint64(i)<<32|uint64(r.IntN(1000)))
			}
		default:
			for len(b) < end {
				b = append(append(b, words[r.IntN(len(words))]...), ' ')
				if r.IntN(8) == 0 {
					b = strconv.AppendUint(b, r.Uint64(), 36)
				}
			}
		}
		b = b[:end]
	}
	return b
}

// requireStored fails unless Open accepts the image, and it holds the disk.
func requireStored(t *testing.T, d *memoryDisk, image []byte) {
	t.Helper()
	im := testtool.Must(openBytes(t, image))(t)
	require.Equal(t, d.size, im.Size())
	step := min(d.size, 1<<20)
	got, want := make([]byte, step), make([]byte, step)
	for off := int64(0); off < d.size; {
		n, kind := testtool.Must2(im.Extent(t.Context(), off, d.size-off))(t)
		if kind != qcow2.KindUnallocated {
			n = min(n, step)
			require.NoError(t, testtool.Err(im.ReadAt(t.Context(), got[:n], off)))
			require.NoError(t, testtool.Err(d.ReadAt(t.Context(), want[:n], off)))
			require.True(t, bytes.Equal(want[:n], got[:n]), "%d bytes at %d", n, off)
		}
		off += n
	}
	for _, r := range d.runs { // also where the image stores nothing
		got := filetest.Read(t, im, r.off, len(r.content))
		require.True(t, bytes.Equal(r.content, got), "%d bytes at %d", len(got), r.off)
	}
}

// requireArrives fails unless a reader of a stream needs the file only once.
func requireArrives(t *testing.T, d *memoryDisk, image []byte) {
	t.Helper()
	if d.size > 64<<20 {
		return
	}
	got := make([]byte, d.size)
	require.Equal(t, 1, arrive(t, image, got, false))
	require.True(t, bytes.Equal(d.whole(t).runs[0].content, got))
}

// requireCheckedByQEMU lets qemu-img check the image, and compare it with the disk.
func requireCheckedByQEMU(t *testing.T, d *memoryDisk, image []byte) {
	t.Helper()
	dir := t.TempDir()
	path, raw := filepath.Join(dir, "image.qcow2"), filepath.Join(dir, "disk.raw")
	require.NoError(t, os.WriteFile(path, image, 0o644))
	runTool(t, "qemu-img", "check", "-q", "-f", "qcow2", path)
	if d.size > 15<<40 {
		return // ext4 has no such files
	}
	f := testtool.Must(os.Create(raw))(t)
	defer f.Close()
	require.NoError(t, f.Truncate(d.size))
	for _, r := range d.runs {
		require.NoError(t, testtool.Err(f.WriteAt(r.content, r.off)))
	}
	runTool(t, "qemu-img", "compare", "-q", "-f", "qcow2", "-F", "raw", path, raw)
}

// shapes are disks with something special at an edge.
func shapes() map[string]*memoryDisk {
	r := rand.New(rand.NewPCG(17, 1))
	const cluster, table = 64 << 10, 512 << 20
	noise := make([]byte, 5*cluster)
	for i := 0; i < len(noise); i += 8 {
		binary.NativeEndian.PutUint64(noise[i:], r.Uint64())
	}
	text := bytes.Repeat([]byte("text "), 5*cluster/5)
	one := []byte{1}
	return map[string]*memoryDisk{
		"one sector":              {size: 512, runs: []run{{0, noise[:512]}}},
		"one empty sector":        {size: 512},
		"nothing":                 {size: 10 << 30},
		"stored zeros":            {size: 1 << 20, runs: []run{{0, make([]byte, 1<<20)}}},
		"one cluster":             {size: cluster, runs: []run{{0, text[:cluster]}}},
		"a sector past a cluster": {size: cluster + 512, runs: []run{{0, text[:cluster+512]}}},
		"a sector short of clusters": {size: 3*cluster - 512, runs: []run{
			{0, noise[:3*cluster-512]}}},
		"the last byte": {size: 7<<20 + 1536, runs: []run{{7<<20 + 1535, one}}},
		"the last cluster": {size: 7 << 20, runs: []run{
			{7<<20 - cluster, text[:cluster]}}},
		"one byte of a cluster": {size: 7 << 20, runs: []run{{cluster + 7, one}}},
		"noise":                 {size: 1 << 20, runs: []run{{0, noise}}},
		"noise and text in turns": {size: 4 << 20, runs: []run{
			{0, bytes.Join([][]byte{
				noise[:cluster], text[:cluster], noise[cluster : 3*cluster], text[:2*cluster],
				noise[3*cluster:], text, noise[:cluster], text[:cluster],
			}, nil)}}},
		"runs within a cluster": {size: 1 << 20, runs: []run{
			{4096, text[:512]}, {8192, noise[:4096]}, {61440, text[:8192]}}},
		"both sides of a table": {size: 2*table + 512, runs: []run{
			{table - 1, []byte{1, 2}}, {2*table - cluster, text[:cluster+512]}}},
		"zeros before the first byte of a table": {size: 3 * table, runs: []run{
			{table + 3<<20, append(make([]byte, 9<<20), 1)}, {2 * table, make([]byte, 1<<20)}}},
		"1 TiB with little in it": {size: 1 << 40, runs: []run{
			{0, text}, {700<<30 + 3*cluster, noise}, {1<<40 - 512, text[:512]}}},
		"64 TiB with little in it": {size: 64 << 40, runs: []run{
			{5 << 40, noise}, {64<<40 - 512, text[:512]}}},
		"everything": {size: 8 << 20, runs: []run{{0, content(r, 8<<20)}}},
	}
}

func TestWriteShapes(t *testing.T) {
	for name, d := range shapes() {
		for _, c := range compressions {
			t.Run(name+"/"+string(c), func(t *testing.T) {
				image := write(t, d, qcow2.WriteOptions{Compression: c})
				requireStored(t, d, image)
				requireArrives(t, d, image)
			})
		}
	}
}

func TestWriteShapesForQEMU(t *testing.T) {
	testtool.Need(t, "qemu-img")
	for name, d := range shapes() {
		for _, c := range compressions {
			t.Run(name+"/"+string(c), func(t *testing.T) {
				requireCheckedByQEMU(t, d, write(t, d, qcow2.WriteOptions{Compression: c}))
			})
		}
	}
}

// Most clusters are compressed. One that does not get smaller is stored as it is.
func TestWriteKinds(t *testing.T) {
	d := shapes()["noise and text in turns"]
	for _, c := range compressions {
		image := write(t, d, qcow2.WriteOptions{Compression: c})
		info := testtool.Must(openBytes(t, image))(t).Info()
		noise, text := int64(6*64<<10), int64(9*64<<10)
		if c == qcow2.CompressionNone {
			require.Equal(t, []int64{noise + text, 0}, []int64{info.PlainSize, info.CompressedSize})
			continue
		}
		require.Equal(t, []int64{noise, text}, []int64{info.PlainSize, info.CompressedSize})
		require.Equal(t, string(c), info.Compression)
	}
}

// An image depends on the content alone: not on the holes that the source knows, on the number of
// workers, or on how it is read.
func TestWriteIsDeterministic(t *testing.T) {
	r := rand.New(rand.NewPCG(17, 2))
	d := &memoryDisk{size: 5<<20 + 512}
	for off := int64(0); off < 4<<20; off += 2 << 20 {
		d.runs = append(d.runs, run{off + r.Int64N(1<<20), content(r, 1+r.IntN(1<<20))})
	}
	whole := d.whole(t)
	for _, c := range compressions {
		for _, bits := range []uint{16, 9} {
			opt := qcow2.WriteOptions{Compression: c, Workers: 1}.WithClusterBits(bits)
			want := write(t, d, opt)
			for _, workers := range []int{2, 3, 16} {
				opt.Workers = workers
				require.True(t, bytes.Equal(want, write(t, d, opt)), "%s, %d workers", c, workers)
			}
			opt.ReadUnit = 2 << 20
			require.True(t, bytes.Equal(want, write(t, whole, opt)), "%s, without holes", c)
		}
	}
}

// TestWrittenDigests pins the bytes. If this fails after a new version of the compressor, images
// that are pushed no longer share their layers with what was pushed before: say so in the
// changelog, and put the new digests here. It must not fail on one machine only.
func TestWrittenDigests(t *testing.T) {
	r := rand.New(rand.NewPCG(17, 3))
	d := &memoryDisk{size: 100<<20 + 512, runs: []run{
		{1 << 20, content(r, 8<<20+4096)}, {100 << 20, []byte{1}}}}
	got := make(map[qcow2.Compression]string)
	for _, c := range compressions {
		sum := sha256.Sum256(write(t, d, qcow2.WriteOptions{Compression: c}))
		got[c] = hex.EncodeToString(sum[:])
	}
	require.Equal(t, map[qcow2.Compression]string{
		"none": "2202379bf860f3f740fce0ac1a49db88bb6e6cb8835878268275bbf2bcaa37cd",
		"zlib": "1573611c9d402f3d755d90daf48a17f8e37e800039d48bbe750831c08c53c4d2",
		"zstd": "638f2c5f69b707f35b6a9bb0a7d4c1b95159aa7024729d5d3f9fda3f26ec8822",
	}, got)
}

// TestWriteRandom writes random disks in clusters of many sizes, so that there are many tables of
// each kind, reads them back, and lets qemu-img look at some.
func TestWriteRandom(t *testing.T) {
	testtool.Need(t, "qemu-img")
	count, qemu := testtool.Rounds(90, 360), 6 // every sixth
	const seed = 20240517
	for i := range count {
		r := rand.New(rand.NewPCG(seed, uint64(i)))
		d := randomDisk(r)
		c, bits := compressions[r.IntN(len(compressions))], uint(9+r.IntN(8))
		t.Run(fmt.Sprintf("%d of seed %d, %s, %d bits", i, seed, c, bits), func(t *testing.T) {
			opt := qcow2.WriteOptions{Compression: c, Workers: r.IntN(4)}.WithClusterBits(bits)
			image := write(t, d, opt)
			requireStored(t, d, image)
			requireArrives(t, d, image)
			if d.size < 64<<20 {
				same := write(t, d.whole(t), opt)
				require.True(t, bytes.Equal(image, same), "all of it is said to be data")
			}
			if i%qemu == 0 {
				requireCheckedByQEMU(t, d, image)
			}
		})
	}
}

func randomDisk(r *rand.Rand) *memoryDisk {
	d := &memoryDisk{size: 512 * (1 + r.Int64N(pick(r, int64(16), 1<<10, 1<<14, 1<<21)))}
	for off := int64(0); off < d.size; {
		off += r.Int64N(pick(r, int64(1), 4096, 1<<17, d.size))
		n := min(d.size-off, 1+r.Int64N(pick(r, int64(16), 4096, 1<<17, 1<<20)))
		if n <= 0 || len(d.runs) == 40 {
			break
		}
		d.runs = append(d.runs, run{off, content(r, int(n))})
		off += n
	}
	return d
}

// FuzzWrite writes a disk of any content with any holes, and reads it back.
func FuzzWrite(f *testing.F) {
	f.Add([]byte("some content, of few clusters"), []byte{1, 0, 7, 3}, uint16(9), uint8(0))
	f.Add(bytes.Repeat([]byte{1, 2, 3}, 700), []byte{0, 200, 2, 2, 9, 1}, uint16(31), uint8(4))
	f.Fuzz(func(t *testing.T, b, gaps []byte, sectors uint16, how uint8) {
		d := &memoryDisk{size: 512 * (1 + int64(sectors))}
		off := int64(0)
		for _, gap := range gaps {
			off += int64(gap) * 64
			n := min(int64(gap%7*100)+1, int64(len(b)), d.size-off)
			if n <= 0 {
				break
			}
			d.runs = append(d.runs, run{off, b[:n]})
			b = b[n:]
			off += n
		}
		c, bits := compressions[how%3], uint(9+how/3%3)
		opt := qcow2.WriteOptions{Compression: c, Workers: 1}.WithClusterBits(bits)
		requireStored(t, d, write(t, d, opt))
	})
}

// Zeros that the source stores are read once, although they are looked for before anything is
// written.
func TestWriteReadsZerosOnce(t *testing.T) {
	const size = 1 << 30
	d := &memoryDisk{size: size, runs: []run{
		{0, make([]byte, 64<<20)}, {800 << 20, make([]byte, 64<<20)}}}
	d.runs[0].content[40<<20] = 1
	var done, data int64
	write(t, d, qcow2.WriteOptions{Progress: func(bytes, of int64) {
		done, data = done+bytes, data+of
	}})
	require.LessOrEqual(t, d.read.Load(), int64(128<<20+1<<20))
	require.EqualValues(t, 128<<20, data)
	require.EqualValues(t, 864<<20, done)
}

func TestWriteTellsItsProgress(t *testing.T) {
	defer goleak.VerifyNone(t)
	for name, d := range shapes() {
		var done, data, want int64
		for _, r := range d.runs {
			want += int64(len(r.content))
		}
		write(t, d, qcow2.WriteOptions{Progress: func(bytes, of int64) {
			require.GreaterOrEqual(t, bytes, of, name)
			done, data = done+bytes, data+of
		}})
		require.LessOrEqual(t, done, d.size, name)
		require.LessOrEqual(t, data, want, name)
	}
}
