package upload

import (
	"bytes"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/internal/testtool"
)

// TestPutForeign: an image of another program becomes the disk that is in it.
func TestPutForeign(t *testing.T) {
	testtool.Need(t, "qemu-img")
	raw, dir := rawDisk(9<<20), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "raw"), raw, 0o600))
	for _, format := range []string{"vhdx", "vpc -o subformat=fixed,force_size=on",
		"vmdk -o subformat=streamOptimized"} { // in a tar archive, the last is an appliance's (OVA)
		out, err := exec.CommandContext(t.Context(), "qemu-img", append(append([]string{"convert",
			"-f", "raw", "-O"}, strings.Fields(format)...), filepath.Join(dir, "raw"),
			filepath.Join(dir, "image"))...).CombinedOutput()
		require.NoError(t, err, "%s", out)
		image := testtool.Must(os.ReadFile(filepath.Join(dir, "image")))(t)
		for how, data := range packed(t, image) {
			s := newServer(t)
			requireSays(t, s.put(t, "vm", data), http.StatusCreated)
			require.True(t, bytes.Equal(raw, s.disk(t, "vm")), how)
			s.volumes.add(t, "large", 12<<20)
			requireSays(t, s.put(t, "large", data), http.StatusCreated)
			require.True(t, bytes.Equal(append(bytes.Clone(raw), make([]byte, 3<<20)...),
				s.disk(t, "large")), how)
			s.volumes.add(t, "exact", 9<<20)
			requireSays(t, s.put(t, "exact", data), http.StatusCreated)
			require.True(t, bytes.Equal(raw, s.disk(t, "exact")), how)
			s.volumes.add(t, "small", 9<<20-512)
			requireSays(t, s.put(t, "small", data), http.StatusRequestEntityTooLarge)
			s.requireEmpty(t, "small")
		}
		s := newServer(t)
		if !strings.HasPrefix(format, "vpc") { // half of a fixed image is a raw disk
			requireSays(t, s.put(t, "vm", image[:len(image)/2/512*512]), 422)
			s.requireNone(t, "vm")
		}
	}
}

// TestForeignEndsWithItsVolume: the disk of an image is not written to its end, which may take
// long, if the volume is deleted meanwhile.
func TestForeignEndsWithItsVolume(t *testing.T) {
	testtool.Need(t, "qemu-img")
	file := filepath.Join(t.TempDir(), "image")
	out, err := exec.CommandContext(t.Context(), "qemu-img", "create", "-f", "vhdx", file,
		"9M").CombinedOutput()
	require.NoError(t, err, "%s", out)
	s := newServer(t)
	v := s.volumes.add(t, "vm", 0)
	v.room = func() { v.cancel() }
	data := testtool.Must(os.ReadFile(file))(t)
	requireSays(t, s.put(t, "vm", data), http.StatusServiceUnavailable, "interrupted")
	s.requireEmpty(t, "vm")
}

// TestForeignBomb: an image that unpacks to much more than a disk of the volume's size could need
// is refused before it has filled the storage.
func TestForeignBomb(t *testing.T) {
	image := make([]byte, 80<<20)
	copy(image, "vhdxfile")
	s := newServer(t)
	s.volumes.add(t, "vm", 8<<20)
	requireSays(t, s.put(t, "vm", packtest.Gzip(t, image)), http.StatusRequestEntityTooLarge,
		"more than")
	s.requireEmpty(t, "vm")
}
