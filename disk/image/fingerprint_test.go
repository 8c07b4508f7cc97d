package image

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/internal/slots"
)

// Two images of one size in read-only file systems, both built reproducibly, differ only in their
// content.
func TestTimesOfArchivesAreNotRelied(t *testing.T) {
	changed := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC).UnixNano()
	print := Fingerprint{
		Name: "disk.raw", Format: FormatRaw, Size: 1 << 20, Hash: "0123456789abcdef",
		Identity: Identity{Dev: 1, Ino: 2, MTime: 3, CTime: changed},
	}
	now := print
	now.Hash = ""
	require.True(t, now.untouched(&print), "the kernel tells of every change")
	now.CTime++
	require.False(t, now.untouched(&print), "the other time can be set back")
	now.CTime--
	print.CTime, now.CTime = changed/1e9*1e9, changed/1e9*1e9
	require.False(t, now.untouched(&print), "the content decides")
	print.Hash = ""
	require.True(t, now.untouched(&print), "there is nothing better to go by")

	dir := t.TempDir()
	img := openImage(t, filetest.Put(t, dir, "disk.raw", filetest.Block(1, 1<<20), 0))
	old, err := img.Fingerprint(t.Context(), img.Hashes(nil), slots.New(2, slots.Options{}))
	require.NoError(t, err)
	img.top.bytes.(*fileSource).stat.Ctim.Nsec, old[0].CTime = 0, old[0].CTime/1e9*1e9
	reason, same, err := img.Compare(t.Context(), old)
	require.NoError(t, err)
	require.Empty(t, reason)
	require.Equal(t, old, same, "it is read, and is the same")
	old[0].Hash = "0123456789abcdef"
	reason, _, err = img.Compare(t.Context(), old)
	require.NoError(t, err)
	require.Contains(t, reason, "\"disk.raw\" differs, with the same size")
}

func TestFingerprintDoesNotDependOnHoles(t *testing.T) {
	dir := t.TempDir()
	content := append(filetest.Block(1, 4096), make([]byte, 5<<20)...)
	full := openImage(t, filetest.Put(t, dir, "full.raw", content, 0))
	sparse := openImage(t, filetest.Put(t, dir, "sparse.raw", content[:4096], int64(len(content))))
	a, err := full.Fingerprint(t.Context(), full.Hashes(nil), slots.New(2, slots.Options{}))
	require.NoError(t, err)
	b, err := sparse.Fingerprint(t.Context(), sparse.Hashes(nil), slots.New(2, slots.Options{}))
	require.NoError(t, err)
	require.Equal(t, a[0].Hash, b[0].Hash)

	// The same chunks in another place are another image.
	shifted := append(make([]byte, 2<<20), content[:len(content)-2<<20]...)
	other := openImage(t, filetest.Put(t, dir, "shifted.raw", shifted, 0))
	c, err := other.Fingerprint(t.Context(), other.Hashes(nil), slots.New(2, slots.Options{}))
	require.NoError(t, err)
	require.NotEqual(t, a[0].Hash, c[0].Hash)
}
