package registry

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"kubevirt.io/disk/disk/qcow2"
)

// A layer may be a disk by itself, without a tar archive: a disk artifact of KubeVirt, or a file
// that "oras push" has sent under any media type.
const (
	// mediaDisk begins the media types of KubeVirt's disk artifacts.
	mediaDisk      = "application/vnd.kubevirt.disk."
	annotationDisk = "io.kubevirt.disk.name"
	// annotationTitle is the name of a file (image-spec, annotations.md).
	annotationTitle = "org.opencontainers.image.title"
	// mediaEmpty is a layer without content (image-spec, manifest.md).
	mediaEmpty = "application/vnd.oci.empty.v1+json"
)

// isPlain reports whether a layer is a file, and not an archive of files. Its content decides, and
// where that says nothing, its name and its media type. head is its first block.
func isPlain(desc descriptor, head []byte) (bool, error) {
	kind := string(desc.MediaType)
	if strings.HasPrefix(kind, mediaDisk) {
		return true, nil
	}
	if len(head) == tarBlock {
		_, err := tar.NewReader(bytes.NewReader(head)).Next()
		if err == nil || errors.Is(err, io.ErrUnexpectedEOF) {
			return false, nil
		}
	}
	switch {
	case qcow2.IsQcow2(head), desc.Annotations[annotationTitle] != "",
		strings.Contains(kind, "disk") || strings.Contains(kind, "qcow2"):
		return true, nil
	case kind == "" || desc.MediaType.IsLayer():
		return false, nil
	}
	return false, &contentError{fmt.Errorf("it is of the type %q, and neither a tar archive nor a "+
		"disk: push the disk itself, as with \"kubevirt-disk push\"", kind)}
}

// plainName is the name of such a file in the image.
func plainName(desc descriptor, dir string) string {
	name := desc.Annotations[annotationTitle]
	for _, ext := range []string{".gz", ".zst", ".zstd"} {
		name = strings.TrimSuffix(name, ext)
	}
	ext := ""
	if name == "" {
		name, ext = desc.Annotations[annotationDisk], ".raw"
		if strings.Contains(string(desc.MediaType), "qcow2") {
			ext = ".qcow2"
		}
	}
	name = path.Base(path.Clean("/" + name))
	if name == "/" || len(name) > 200 || strings.IndexByte(name, 0) >= 0 {
		name = "disk"
	}
	return path.Join(dir, name+ext)
}

// plainContents are the contents of such a layer, if it is not compressed.
func plainContents(desc descriptor, chunks []byte) *contents {
	e := &entry{name: plainName(desc, diskDir), kind: entryFile, size: desc.Size}
	return &contents{
		list: &layerList{dir: diskDir, entries: map[string]*entry{e.name: e}},
		files: map[string]*part{e.name: {Name: e.name, Size: e.size,
			Layer: desc.Digest.String(), Chunks: chunks}},
	}
}

// peek returns the first block without taking it.
func (r *layerReader) peek() ([]byte, error) {
	head := make([]byte, tarBlock)
	n, err := io.ReadFull(r.Reader, head)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return nil, err
	}
	r.Reader = io.MultiReader(bytes.NewReader(head[:n]), r.Reader)
	return head[:n], nil
}

// wholeLayer is the ordinal of a file that is a layer of its own.
const wholeLayer = -1

// plain fetches a layer that is a file.
func (p *puller) plain(ctx context.Context, i int, in *layerReader, head []byte) (err error) {
	f := &file{name: plainName(p.image.manifest.Layers[i], p.dir), layer: i, ordinal: wholeLayer,
		size: in.size}
	p.files = append(p.files, f)
	switch {
	case in.size < 0 && qcow2.IsQcow2(head):
		// Its size has to be known before it can be expanded, so it is fetched again.
		f.isQcow2 = true
		if f.size, err = io.Copy(io.Discard, in); err != nil {
			return in.explain(err)
		}
	case p.candidate(f.name):
		if err := p.pass(ctx, f, in); err != nil {
			return in.explain(err)
		}
	}
	return in.Finish()
}
