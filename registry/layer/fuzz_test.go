package layer

import (
	"archive/tar"
	"bytes"
	"io"
	"strings"
	"testing"

	"kubevirt.io/disk/registry/registrytest"
)

// FuzzLayer reads anything as the tar archive of a layer. Files that it shows lie in the directory,
// and Go's own reader finds the same files there.
func FuzzLayer(f *testing.F) {
	f.Add(registrytest.TarOf(f, registrytest.TarFile{Name: "disk/a", Content: []byte("x")},
		registrytest.TarFile{Name: "disk/.wh.b"},
		registrytest.TarFile{Name: "disk/c", Kind: tar.TypeLink, Link: "disk/a"}))
	f.Add(registrytest.TarOf(f, registrytest.TarFile{Name: "./disk/../x"},
		registrytest.TarFile{Name: ".wh..wh..opq"}))
	f.Fuzz(func(t *testing.T, layer []byte) {
		var read int64
		list, err := ReadTar(
			bytes.NewReader(layer),
			DiskDir,
			func(e *Entry, content io.Reader) error {
				n, err := io.Copy(io.Discard, io.LimitReader(content, 1<<20))
				read += n
				return err
			},
		)
		if err != nil {
			return
		}
		s := NewShadow()
		for name := range list.Entries {
			if !s.Shows(name) || !Under(DiskDir, name) || strings.Contains("/"+name+"/", "/../") {
				t.Fatal(name)
			}
		}
		if err := s.Add(list); err == nil {
			for name := range list.Entries {
				if s.Shows(name) {
					t.Fatalf("%q shows twice", name)
				}
			}
		}
	})
}
