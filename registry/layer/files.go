package layer

import (
	"crypto/sha256"
	"fmt"
	"io"
	"maps"
	"slices"

	"kubevirt.io/disk/disk/image"
)

// Part is a file of an image without an index that can still be read by ranges.
type Part struct {
	Name  string   `json:"name"`            // in the image, as disk/fedora.qcow2
	Links []string `json:"links,omitempty"` // further names of it
	Size  int64    `json:"size"`            // bytes
	Layer string   `json:"layer"`           // its digest
	// Offset is where the file begins in a layer that is not compressed.
	Offset int64 `json:"offset,omitempty"`
	// Chunks are the digests of its chunks of IndexChunk bytes. nil: nothing verifies the file
	// before the layer is complete, unless it has a Table.
	Chunks []byte `json:"chunks,omitempty"`
	// Table has the chunks of a file that is compressed in chunks, each with a digest. Codec is the
	// compression.
	Table []byte `json:"table,omitempty"`
	Codec string `json:"codec,omitempty"`
}

// Names are all names of the file.
func (p *Part) Names() []string { return append([]string{p.Name}, p.Links...) }

// Unsuited says why an image must be fetched before it is served.
type Unsuited struct{ Why string }

func (u *Unsuited) Error() string { return u.Why }

// Contents are the files of a layer under the directory of the disks, and how to read them.
type Contents struct {
	List  *List
	Files map[string]*Part // regular files, by name
	// Walked: the layer was read by ranges, and was not verified yet
	Walked bool
}

// maxWalked is the most files that a layer may have if their headers are fetched one by one.
const maxWalked = 16 << 10

// Shown returns the files of the layer that the layers above it do not hide.
func (l *Contents) Shown(shade *Shadow) (all []*Part, err error) {
	made := make(map[*Part]*Part)
	for _, name := range slices.Sorted(maps.Keys(l.List.Entries)) {
		e := l.List.Entries[name]
		if e.Kind == EntryDirectory || !shade.Shows(name) {
			continue
		}
		if e.Kind == EntryFile && e.Size == 0 && image.PassOver(name, 0, false) {
			continue // it is hidden, so it need not be readable
		}
		from := e
		if e.Kind == EntryLink {
			from = l.List.Target(e)
		}
		if from == nil || from.Kind != EntryFile || name == DiskDir || l.Files[from.Name] == nil {
			// The file may be a link that leads elsewhere, a device or a sparse file. Fetching the
			// image shows what it is, and whether it matters.
			return nil, &Unsuited{fmt.Sprintf("has %q, which cannot be read by ranges", name)}
		}
		if p := made[l.Files[from.Name]]; p != nil {
			p.Links = append(p.Links, name)
			continue
		}
		p := *l.Files[from.Name]
		p.Name = name
		all, made[l.Files[from.Name]] = append(all, &p), &p
	}
	return all, nil
}

// LayTar reads the headers of an archive that is not compressed. at returns the position of r.
func LayTar(r io.Reader, desc descriptor, at func() int64) (*Contents, error) {
	l := &Contents{Files: make(map[string]*Part)}
	n := 0
	list, err := ReadTar(r, DiskDir, func(e *Entry, _ io.Reader) error {
		if n++; n > maxWalked {
			return &Unsuited{fmt.Sprintf("has more than %d files", maxWalked)}
		}
		off := at()
		delete(l.Files, e.Name) // a later entry of the same name replaces it
		if Under(DiskDir, e.Name) && !e.Sparse && e.Size <= desc.Size-off {
			l.Files[e.Name] = &Part{Name: e.Name, Size: e.Size, Layer: desc.Digest.String(),
				Offset: off}
		}
		return nil
	})
	l.List = list
	return l, err
}

// ChunkDigests are the digests of the chunks of a file.
func ChunkDigests(p []byte) []byte {
	sums := []byte{}
	for len(p) > 0 {
		n := min(len(p), IndexChunk)
		sum := sha256.Sum256(p[:n])
		sums = append(sums, sum[:]...)
		p = p[n:]
	}
	return sums
}
