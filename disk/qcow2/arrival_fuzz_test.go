package qcow2

import (
	"bytes"
	"context"
	"testing"
)

// FuzzArrival reads anything as a stream. If Open accepts it, both ways give the same content.
func FuzzArrival(f *testing.F) {
	for _, bits := range []uint{9, 10} {
		im := newImage(bits, 8<<bits, 2)
		im.data(0, atData, 1)
		im.compressed(1, (atData+1)<<bits, deflated(f, make([]byte, 1<<bits)))
		im.put64(im.l2(2), entryZero)
		f.Add(im.b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		const limit = 1 << 20
		got := make([]byte, limit)
		a, err := NewArrival(b, int64(len(b)), Options{MaxVirtualSize: limit})
		guest := Guest{Write: func(p []byte,
			off int64) error {
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
