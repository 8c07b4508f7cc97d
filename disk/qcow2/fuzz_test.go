package qcow2

import (
	"bytes"
	"context"
	"testing"
)

// readAll reads an image to its end, or as much of it as a fuzzer has time for.
func readAll(im *Image) {
	p := make([]byte, 64<<10)
	for off := int64(0); off < im.Size() && off < 8<<20; {
		n, _, err := im.Extent(bg, off, im.Size()-off)
		if err != nil {
			return
		}
		_, _ = im.ReadAt(bg, p[:min(n, int64(len(p)), im.Size()-off)], off)
		off += n
	}
}

// smallImages adds images with little in them, so that the fuzzer spends its time on new paths and
// not on long inputs. Extended L2 entries, which need large clusters, have FuzzTables.
func smallImages(f *testing.F) {
	for _, bits := range []uint{9, 10} {
		im := newImage(bits, 8<<bits, 2)
		im.data(0, atData, 1)
		im.compressed(1, (atData+1)<<bits, deflated(f, make([]byte, 1<<bits)))
		im.put64(im.l2(2), entryZero)
		f.Add(im.b)
	}
}

// FuzzOpen opens and reads anything: there is an error, or there are bytes, and nothing else.
func FuzzOpen(f *testing.F) {
	smallImages(f)
	f.Fuzz(func(_ *testing.T, b []byte) {
		opt := Options{MaxVirtualSize: 1 << 30}
		im, err := Open(bg, near{bytes.NewReader(b)}, int64(len(b)), opt)
		if err == nil {
			readAll(im)
		}
	})
}

// FuzzTables keeps the header right, so that the fuzzer spends its time on L1 and L2 entries.
func FuzzTables(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0xa, 0}, []byte{0x80, 0, 0, 0, 0, 0, 8, 0}, false)
	f.Add([]byte{0x40, 0, 0, 0, 0, 0, 0xa, 0}, []byte{}, true)
	f.Fuzz(func(_ *testing.T, l2, l1 []byte, extended bool) {
		bits := uint(9)
		if extended {
			bits = 14
		}
		im := newImage(bits, 64<<bits, 4)
		if extended {
			im.put64(72, incompatExtendedL2)
		}
		copy(im.cluster(atL2), l2)
		copy(im.cluster(atL1), l1)
		if got, err := im.open(); err == nil {
			readAll(got)
		}
	})
}

// FuzzDecode decodes any bytes as a compressed cluster.
func FuzzDecode(f *testing.F) {
	f.Add(deflated(f, make([]byte, 1<<12)), false)
	f.Add(zstandard(f, make([]byte, 1<<12)), true)
	f.Fuzz(func(_ *testing.T, data []byte, zstd bool) {
		im := newImage(12, 8<<12, 4)
		if zstd {
			im.zstd()
		}
		im.compressed(0, atData<<12, data[:min(len(data), 2<<12)])
		if got, err := im.open(); err == nil {
			readAll(got)
		}
	})
}

// FuzzArrival reads anything as a stream. If Open accepts it, both ways give the same content.
func FuzzArrival(f *testing.F) {
	smallImages(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		const limit = 1 << 20
		got := make([]byte, limit)
		a, err := NewArrival(b, int64(len(b)), Options{MaxVirtualSize: limit})
		guest := Guest{Write: func(p []byte, off int64) error {
			copy(got[off:off+int64(len(p))], p)
			return nil
		}}
		for passes := 0; err == nil && !a.Done(); passes++ {
			if passes == 4 {
				t.Fatal("more than four passes")
			}
			err = a.Pass(context.Background(), bytes.NewReader(b), guest)
		}
		im, openErr := Open(bg, near{bytes.NewReader(b)}, int64(len(b)),
			Options{MaxVirtualSize: limit})
		if openErr != nil {
			return
		}
		want := make([]byte, im.Size())
		if _, readErr := im.ReadAt(bg, want, 0); readErr != nil {
			return // a cluster does not decode
		}
		if err != nil {
			t.Fatalf("Open accepts what an Arrival does not: %v", err)
		}
		if !bytes.Equal(want, got[:im.Size()]) {
			t.Fatal("another content")
		}
	})
}
