package image

import (
	"path/filepath"
	"testing"

	"kubevirt.io/disk/disk/disktest/filetest"
)

// BenchmarkRead reads images of this machine that are in memory, in the order of the disk.
func BenchmarkRead(b *testing.B) {
	dir := b.TempDir()
	const size = 64 << 20
	filetest.Put(b, dir, "raw.raw", filetest.Sample(size, 9), 0)
	filetest.QemuImg(b, dir, "convert", "-f", "raw", "-O", "qcow2", "raw.raw", "qcow2.qcow2")
	filetest.QemuImg(b, dir, "create", "-q", "-f", "qcow2",
		"-b", "qcow2.qcow2", "-F", "qcow2", "chain.qcow2")
	for _, name := range []string{"raw.raw", "qcow2.qcow2", "chain.qcow2"} {
		img := openImage(b, filepath.Join(dir, name))
		for _, length := range []int{512, 4 << 10, 256 << 10} {
			b.Run(name+"/"+map[int]string{512: "512", 4 << 10: "4K", 256 << 10: "256K"}[length],
				func(b *testing.B) {
					b.ReportAllocs()
					p, off := make([]byte, length), int64(0)
					for b.Loop() {
						if _, err := img.ReadAt(b.Context(), p, off); err != nil {
							b.Fatal(err)
						}
						off = (off + int64(length)) % size
					}
				})
		}
	}
}
