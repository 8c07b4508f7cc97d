package inflate

import (
	"bytes"
	stdlib "compress/flate"
	"io"
	"os"
	"path/filepath"
	"testing"

	klauspost "github.com/klauspost/compress/flate"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

const clusterSize = 64 << 10

// corpus is content as disks hold it, compressed in clusters: this module's sources, and machine
// code.
func corpus(b *testing.B) map[string][][]byte {
	b.Helper()
	var sources bytes.Buffer
	root := filepath.Join("..", "..")
	require.NoError(b, filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" {
			return err
		}
		content, err := os.ReadFile(path)
		sources.Write(content)
		return err
	}))
	code := testtool.Must(os.ReadFile(testtool.Must(os.Executable())(b)))(b)
	packed := make(map[string][][]byte)
	for name, content := range map[string][]byte{"sources": sources.Bytes(), "code": code} {
		for len(content) >= clusterSize && len(packed[name]) < 64 {
			packed[name] = append(packed[name], deflate(b, content[:clusterSize], 6))
			content = content[clusterSize:]
		}
	}
	return packed
}

// BenchmarkDecode decodes clusters with this package, the standard library and klauspost/compress.
func BenchmarkDecode(b *testing.B) {
	var d Decoder
	var source bytes.Reader
	streaming := func(r io.Reader, reset func() error) func(dst, src []byte) error {
		return func(dst, src []byte) error {
			source.Reset(src)
			if err := reset(); err != nil {
				return err
			}
			_, err := io.ReadFull(r, dst)
			return err
		}
	}
	s, k := stdlib.NewReader(&source), klauspost.NewReader(&source)
	for content, packed := range corpus(b) {
		for _, c := range []struct {
			name   string
			decode func(dst, src []byte) error
		}{
			{"inflate", func(dst, src []byte) error { _, err := d.Decode(dst, src); return err }},
			{"standard library",
				streaming(s, func() error { return s.(stdlib.Resetter).Reset(&source, nil) })},
			{"klauspost", streaming(k,
				func() error { return k.(klauspost.Resetter).Reset(&source, nil) })},
		} {
			b.Run(content+"/"+c.name, func(b *testing.B) {
				dst := make([]byte, clusterSize)
				b.SetBytes(clusterSize)
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					if err := c.decode(dst, packed[i%len(packed)]); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
