package registry

import (
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
)

// BenchmarkCached compares random reads of 4 KiB of a disk that was fetched before with those of
// the same image as a local file.
func BenchmarkCached(b *testing.B) {
	const size = 128 << 20
	dir := b.TempDir()
	files := []string{filepath.Join(dir, "a.raw")}
	require.NoError(b, os.WriteFile(files[0], noise(1, size), 0o644))
	if _, err := exec.LookPath("qemu-img"); err == nil {
		filetest.QemuImg(b, dir, "convert", "-O", "qcow2", "a.raw", "a.qcow2")
		files = append(files, filepath.Join(dir, "a.qcow2"))
	}
	m := newMemory(b)
	pushes(b, m.client(b), files, m.ref(b, "vm/a:1"), PushOptions{Base: BaseNone})
	s := newStreaming(b, m.client(b), b.TempDir(), b.TempDir())
	stream := s.open(b, m.ref(b, "vm/a:1"))
	for _, file := range files {
		name := filepath.Base(file)
		local := testtool.Must(image.Open(file, image.Options{}))(b)
		b.Cleanup(func() { require.NoError(b, local.Close()) })
		for _, candidate := range []struct {
			from string
			img  *image.Image
		}{{"cache", s.disk(b, stream, name)}, {"file", local}} {
			p := make([]byte, 1<<20)
			for off := int64(0); off < size; off += int64(len(p)) {
				require.NoError(b, testtool.Err(candidate.img.ReadAt(b.Context(), p, off)))
			}
			b.Run(name+"/"+candidate.from, func(b *testing.B) {
				b.ReportAllocs()
				p := make([]byte, 4096)
				for b.Loop() {
					off := rand.Int64N(size/4096) * 4096
					if _, err := candidate.img.ReadAt(b.Context(), p, off); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
