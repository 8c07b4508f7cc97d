package registrytest

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
)

// The compressors of a Table.
const (
	Gzip = "gzip" // eStargz
	Zstd = "zstd" // zstd:chunked
)

// StargzName is the file that has the table of an eStargz layer, and StargzDigest the annotation
// that vouches for it.
const (
	StargzName   = "stargz.index.json"
	StargzDigest = "containerd.io/snapshot/stargz/toc.digest"
)

// ChunkedPlace is the annotation that says where the table of a zstd:chunked layer lies.
const (
	ChunkedPlace  = "io.github.containers.zstd-chunked.manifest-position"
	chunkedDigest = "io.github.containers.zstd-chunked.manifest-checksum"
)

// Table makes a layer that is compressed in chunks, with a table of contents.
type Table struct {
	Codec   string
	Chunk   int // bytes of a file that have a digest
	Members int // chunks of a file that are compressed together; 0: one
	Entries []map[string]any
	out     bytes.Buffer
}

func (w *Table) member(t testing.TB, p []byte) (at int) {
	at = w.out.Len()
	if w.Codec == Gzip {
		z := gzip.NewWriter(&w.out)
		_, err := z.Write(p)
		require.NoError(t, err)
		require.NoError(t, z.Close())
		return at
	}
	z, err := zstd.NewWriter(&w.out)
	require.NoError(t, err)
	_, err = z.Write(p)
	require.NoError(t, err)
	require.NoError(t, z.Close())
	return at
}

// DigestText is the digest of p as text.
func DigestText(p []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(p)) }

// Add adds a file, in chunks.
func (w *Table) Add(t testing.TB, f TarFile) {
	f.Kind = cmp.Or(f.Kind, tar.TypeReg)
	var head bytes.Buffer
	require.NoError(t, tar.NewWriter(&head).WriteHeader(&tar.Header{Name: f.Name, Mode: 0o444,
		Size: int64(len(f.Content)), Typeflag: f.Kind, Linkname: f.Link}))
	if f.Hole > 0 {
		head = *bytes.NewBuffer(f.sparseHeader())
	}
	w.member(t, head.Bytes())
	kind := map[byte]string{tar.TypeReg: "reg", tar.TypeDir: "dir", tar.TypeLink: "hardlink",
		tar.TypeSymlink: "symlink"}[f.Kind]
	first := map[string]any{"name": f.Name, "type": kind, "size": len(f.Content)}
	if f.Link != "" {
		first["linkName"] = f.Link
	}
	w.Entries = append(w.Entries, first)
	at, together := 0, w.Chunk*max(w.Members, 1)
	for off := 0; off < len(f.Content); off += w.Chunk {
		if off%together == 0 {
			at = w.member(t, f.Content[off:min(off+together, len(f.Content))])
		}
		e := first
		if off > 0 {
			e = map[string]any{"name": f.Name, "type": "chunk", "chunkOffset": off}
			w.Entries = append(w.Entries, e)
		}
		p := f.Content[off:min(off+w.Chunk, len(f.Content))]
		e["offset"], e["innerOffset"], e["chunkDigest"] = at, off%together, DigestText(p)
		if w.Chunk < len(f.Content) && off+w.Chunk < len(f.Content) {
			e["chunkSize"] = len(p) // the last one goes up to the end
		}
		if w.Codec == Zstd && bytes.Equal(p, make([]byte, len(p))) {
			e["chunkType"] = "zeros"
		}
	}
	if w.Codec == Zstd {
		first["endOffset"] = w.out.Len()
	}
	w.member(t, make([]byte, (512-len(f.Content)%512)%512))
}

// Layer ends the layer, and returns it with its annotations.
func (w *Table) Layer(t testing.TB, entries any) ([]byte, map[string]string) {
	w.member(t, make([]byte, 1024))
	text, err := json.Marshal(map[string]any{"version": 1, "entries": entries})
	require.NoError(t, err)
	if w.Codec == Gzip {
		at := w.member(t, TarOf(t, TarFile{Name: StargzName, Content: text}))
		w.out.Write(StargzFoot(t, at))
		return w.out.Bytes(), map[string]string{StargzDigest: DigestText(text)}
	}
	packed := Zstandard(t, text)
	at := w.out.Len() + 8
	w.out.Write([]byte{0x50, 0x2a, 0x4d, 0x18, byte(len(packed)), byte(len(packed) >> 8),
		byte(len(packed) >> 16), 0})
	w.out.Write(packed)
	return w.out.Bytes(), map[string]string{chunkedDigest: DigestText(packed),
		ChunkedPlace: fmt.Sprintf("%d:%d:%d:1", at, len(packed), len(text))}
}

// StargzFoot is the end of an eStargz layer whose table begins at a byte.
func StargzFoot(t testing.TB, at int) []byte {
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.NoCompression)
	require.NoError(t, err)
	z.Extra = fmt.Appendf([]byte{'S', 'G', 22, 0}, "%016xSTARGZ", at)
	require.NoError(t, z.Close())
	return b.Bytes()
}
