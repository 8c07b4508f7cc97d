// Package packtest wraps data as publishers do, for tests.
package packtest

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"os/exec"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// Gzip compresses data.
func Gzip(t testing.TB, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	require.NoError(t, testtool.Err(z.Write(data)))
	require.NoError(t, z.Close())
	return b.Bytes()
}

// Zstd compresses data so that its decoder keeps so many bytes.
func Zstd(t testing.TB, data []byte, window int) []byte {
	t.Helper()
	e := testtool.Must(zstd.NewWriter(nil, zstd.WithWindowSize(window)))(t)
	defer e.Close()
	return e.EncodeAll(data, nil)
}

// Tool compresses data by a program, such as "bzip2" or "xz -9".
func Tool(t testing.TB, data []byte, name string, args ...string) []byte {
	t.Helper()
	testtool.Need(t, name)
	cmd := exec.CommandContext(t.Context(), name, append(args, "-c")...)
	cmd.Stdin = bytes.NewReader(data)
	out := testtool.Must(cmd.Output())(t)
	return out
}

// File is a file of a tar archive. A zero Type is a regular file.
type File struct {
	Name string
	Data []byte
	Type byte
	Link string
}

// Tar makes an archive.
func Tar(t testing.TB, files ...File) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		require.NoError(t, w.WriteHeader(&tar.Header{Name: f.Name, Typeflag: f.Type,
			Linkname: f.Link, Size: int64(len(f.Data)), Mode: 0o644}))
		require.NoError(t, testtool.Err(w.Write(f.Data)))
	}
	require.NoError(t, w.Close())
	return b.Bytes()
}

// Xz makes an xz file whose data is stored and not compressed, as the format allows. It claims to
// need a dictionary of 8 MiB.
func Xz(data []byte) []byte { return XzNeeding(data, 22) }

// XzNeeding makes such a file that claims to need a dictionary of the size with this code: 24 is
// 16 MiB, 28 is 64 MiB (xz-file-format, section 5.3.1).
func XzNeeding(data []byte, dictionary byte) []byte {
	le := binary.LittleEndian
	sum := func(p []byte) []byte { return le.AppendUint32(nil, crc32.ChecksumIEEE(p)) }
	flags := []byte{0, 1} // CRC32
	out := append([]byte("\xfd7zXZ\x00"), flags...)
	out = append(out, sum(flags)...)

	begin := len(out)
	header := []byte{2, 0, 0x21, 1, dictionary, 0, 0, 0}
	out = append(append(out, header...), sum(header)...)
	kind := byte(1) // resets the dictionary
	for rest := data; len(rest) > 0; kind = 2 {
		n := min(len(rest), 1<<16)
		out = append(out, kind, byte((n-1)>>8), byte(n-1))
		out, rest = append(out, rest[:n]...), rest[n:]
	}
	out = append(out, 0)
	unpadded := len(out) - begin + 4
	for (len(out)-begin)%4 != 0 {
		out = append(out, 0)
	}
	out = append(out, sum(data)...)

	index := []byte{0, 1}
	index = binary.AppendUvarint(index, uint64(unpadded))
	index = binary.AppendUvarint(index, uint64(len(data)))
	for len(index)%4 != 0 {
		index = append(index, 0)
	}
	index = append(index, sum(index)...)
	out = append(out, index...)
	tail := append(le.AppendUint32(nil, uint32(len(index)/4-1)), flags...)
	out = append(append(out, sum(tail)...), tail...)
	return append(out, 'Y', 'Z')
}
