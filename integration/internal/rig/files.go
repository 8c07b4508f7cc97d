package rig

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// SharedDir makes a directory that every user can enter and write in.
func SharedDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kd-shared-")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o777))
	return dir
}

// MakeRaw makes a raw image with data in every other MiB and holes between. It is the same in every
// run.
func MakeRaw(t *testing.T, path string, size int64) {
	t.Helper()
	MakeRawSeed(t, path, size, 1)
}

func MakeRawSeed(t *testing.T, path string, size int64, seed uint64) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	file, err := os.Create(path)
	require.NoError(t, err)
	defer file.Close()
	require.NoError(t, file.Truncate(size))
	chunk := make([]byte, 64<<10)
	random := rand.New(rand.NewPCG(seed, 0))
	for off := int64(0); off < size; off += 2 << 20 {
		// Half is random and half is text, so that it is partly compressible.
		for i := range chunk {
			chunk[i] = byte(random.UintN(256))
			if i >= len(chunk)/2 {
				chunk[i] = "kubevirt"[i%8]
			}
		}
		_, err := file.WriteAt(chunk[:min(int64(len(chunk)), size-off)], off)
		require.NoError(t, err)
	}
	require.NoError(t, file.Close())
}

// MakeQcow2 converts a raw image with qemu-img. options are for its -o.
func MakeQcow2(t *testing.T, raw, path, options string, compress bool) {
	t.Helper()
	args := []string{"convert", "-f", "raw", "-O", "qcow2"}
	if options != "" {
		args = append(args, "-o", options)
	}
	if compress {
		args = append(args, "-c")
	}
	OK(t, "qemu-img", append(args, raw, path)...)
}

// DiskDir makes an image directory with one raw image of this size.
func DiskDir(t *testing.T, size int64) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "disk")
	MakeRaw(t, filepath.Join(dir, "disk.raw"), size)
	return dir
}

func ReadFile(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(content)
}

// SameFile compares two files. It does not print them.
func SameFile(t *testing.T, want, got string) {
	t.Helper()
	require.True(t, ReadFile(t, want) == ReadFile(t, got), "%s and %s differ", want, got)
}

func SHA256(b []byte) string {
	hash := sha256.Sum256(b)
	return hex.EncodeToString(hash[:])
}

// MountTmpfs mounts a small file system.
func MountTmpfs(t *testing.T, dir, size string) {
	t.Helper()
	NeedRoot(t)
	require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
}

func FileStat(t *testing.T, path string) *unix.Stat_t {
	t.Helper()
	var st unix.Stat_t
	require.NoError(t, unix.Stat(path, &st))
	return &st
}

// MakeUpload writes a raw disk with a boot sector, data and zeros. The data differs in each test.
func MakeUpload(t *testing.T, size int) (path string, content []byte) {
	t.Helper()
	content = make([]byte, size)
	random := rand.NewChaCha8(sha256.Sum256([]byte(t.Name())))
	for off := 0; off < size; off += 4 << 20 {
		_, err := random.Read(content[off:min(off+1<<20, size)])
		require.NoError(t, err)
	}
	copy(content[510:], "\x55\xaa")
	path = filepath.Join(t.TempDir(), "disk.raw")
	require.NoError(t, os.WriteFile(path, content, 0o644))
	return path, content
}

// Pattern fills a file.
func Pattern(t *testing.T, path string, size int, fill byte) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte{fill}, size), 0o644))
}

// Same requires that two raw disks, each a file or a URL that QEMU opens, have the same content.
func Same(t *testing.T, want, got string) {
	t.Helper()
	OK(t, "qemu-img", "compare", "-f", "raw", "-F", "raw", want, got)
}
