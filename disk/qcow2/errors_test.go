package qcow2

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestAdvice: what qemu-img check finds no fault with is not sent there.
func TestAdvice(t *testing.T) {
	for advice, change := range map[string]func(im *image){
		"resize":   func(im *image) { im.put64(24, 0) },
		"--shrink": func(im *image) { im.put64(24, 64<<40+512) },
	} {
		im := newImage(16, 1<<20, 1)
		change(im)
		_, err := im.open()
		format := new(FormatError)
		require.ErrorAs(t, err, &format)
		require.Contains(t, format.Action, advice)
	}
}

// TestReadError passes the errors of the file on.
func TestReadError(t *testing.T) {
	im := newImage(16, 8<<16, 4)
	im.data(0, atData, 1)
	broken := errors.New("disk on fire")
	for limit := range int64(atData) {
		_, err := Open(bg, near{failsFrom{im.b, limit << 16, broken}}, int64(len(im.b)), Options{})
		if limit != 2 { // the refcount block is not read
			require.ErrorIs(t, err, broken, "cluster %d", limit)
		}
	}
	got, err := Open(bg, near{failsFrom{im.b, atData << 16, broken}}, int64(len(im.b)), Options{})
	require.NoError(t, err)
	_, err = got.ReadAt(bg, make([]byte, 512), 0)
	require.ErrorIs(t, err, broken)
	require.ErrorContains(t, err, "guest offset 0")
}

// failsFrom fails every read that touches a byte in the cluster at from.
type failsFrom struct {
	b    []byte
	from int64
	err  error
}

func (f failsFrom) ReadAt(p []byte, off int64) (int, error) {
	if off < f.from+1<<16 && off+int64(len(p)) > f.from {
		return 0, f.err
	}
	return bytes.NewReader(f.b).ReadAt(p, off)
}
