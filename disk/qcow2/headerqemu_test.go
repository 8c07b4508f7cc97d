package qcow2_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/testtool"
)

// arriveAt reads an image as it comes. written tells whether the guest got anything.
func arriveAt(t *testing.T, image []byte) (err error, written bool) {
	a, err := qcow2.NewArrival(image, int64(len(image)), qcow2.Options{})
	for err == nil && !a.Done() {
		err = a.Pass(t.Context(), bytes.NewReader(image), qcow2.Guest{
			Write: func([]byte, int64) error {
				written = true
				return nil
			}})
	}
	return err, written
}

// TestWhatQEMURefuses changes every field of the header and the lengths of its extensions, one at a
// time. What QEMU does not open is refused here, too: `inspect` would call an image servable that
// no other tool reads. The same holds when it is expanded as it comes, and then nothing is written.
// The table of snapshots is not read here, because nothing in it is served.
func TestWhatQEMURefuses(t *testing.T) {
	testtool.Need(t, "qemu-img")
	dir := t.TempDir()
	path := filepath.Join(dir, "image.qcow2")
	raw := filepath.Join(dir, "raw")
	require.NoError(t, os.WriteFile(raw, bytes.Repeat([]byte("data"), 256<<10), 0o600))
	runTool(t, "qemu-img", "convert", "-f", "raw", "-O", "qcow2", "-o",
		"cluster_size=4k,compression_type=zstd", raw, path)
	whole := testtool.Must(os.ReadFile(path))(t)
	be := binary.BigEndian
	type field struct {
		name     string
		off, len int
	}
	var fields []field
	for off := 4; off < int(be.Uint32(whole[100:])); off += 4 {
		if off >= 60 && off < 72 {
			continue // the table of snapshots
		}
		fields = append(fields, field{fmt.Sprintf("header byte %d", off), off, 4})
	}
	for off := int(be.Uint32(whole[100:])); be.Uint32(whole[off:]) != 0; {
		n := int(be.Uint32(whole[off+4:]))
		name := fmt.Sprintf("length of extension %#x", be.Uint32(whole[off:]))
		fields = append(fields, field{name, off + 4, 4})
		off += 8 + (n+7)&^7
	}
	refused := 0
	for _, f := range fields {
		was := be.Uint32(whole[f.off:])
		for _, value := range []uint32{0, 1, was + 1, was << 1, was | 1<<31, 1<<32 - 1} {
			if value == was {
				continue
			}
			image := bytes.Clone(whole)
			be.PutUint32(image[f.off:], value)
			require.NoError(t, os.WriteFile(path, image, 0o600))
			says, err := exec.Command("qemu-img", "info", "-f", "qcow2", path).CombinedOutput()
			file, openErr := os.Open(path)
			require.NoError(t, openErr)
			_, own := qcow2.Open(t.Context(), near{file}, int64(len(image)), qcow2.Options{})
			require.NoError(t, file.Close())
			again, written := arriveAt(t, image)
			require.False(t, again != nil && written, "%s is %#x: %v", f.name, value, again)
			if err != nil {
				refused++
				if own == nil || again == nil {
					t.Errorf("%s is %#x instead of %#x: opened, and QEMU refuses it: %s", f.name,
						value, was, says)
				}
			} else if own != nil {
				t.Logf("%s is %#x instead of %#x: QEMU opens it: %v", f.name, value, was, own)
			}
		}
	}
	require.Greater(t, refused, 50)
}
