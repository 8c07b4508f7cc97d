package layer

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/disk/unpack"
)

// A layer may be a disk by itself, without a tar archive: a disk artifact of KubeVirt, or a file
// that "oras push" has sent, with any media type.
const (
	// MediaDisk begins the media types of KubeVirt's disk artifacts.
	MediaDisk = "application/vnd.kubevirt.disk."
	// AnnotationDisk is the name of a disk in such an artifact, and AnnotationSize its size.
	AnnotationDisk = "io.kubevirt.disk.name"
	AnnotationSize = "io.kubevirt.disk.size"
	// AnnotationTitle is the name of a file (image-spec, annotations.md).
	AnnotationTitle = "org.opencontainers.image.title"
	// annotationUnpack says that "oras push" has made the archive, of a directory.
	annotationUnpack = "io.deis.oras.content.unpack"
	// MediaEmpty is a layer without content (image-spec, manifest.md).
	MediaEmpty = "application/vnd.oci.empty.v1+json"
)

// IsPlain reports whether a layer is a file, and not an archive of files. Its content decides, and
// if that is not enough, its name and its media type. head is its first block.
func IsPlain(desc descriptor, head []byte) (bool, error) {
	kind := string(desc.MediaType)
	if strings.HasPrefix(kind, MediaDisk) {
		return true, nil
	}
	if len(head) == TarBlock {
		_, err := tar.NewReader(bytes.NewReader(head)).Next()
		if err == nil || errors.Is(err, io.ErrUnexpectedEOF) {
			return false, nil
		}
	}
	switch {
	case qcow2.IsQcow2(head), desc.Annotations[AnnotationTitle] != "",
		strings.Contains(kind, "disk") || strings.Contains(kind, "qcow2"):
		return true, nil
	case kind == "" || desc.MediaType.IsLayer():
		return false, nil
	}
	return false, &contentError{fmt.Errorf("it is of the type %q, and neither a tar archive nor a "+
		"disk: push the disk itself, as with \"kubevirt-disk push\"", kind)}
}

// IsFile reports whether a file was stored as a layer, as "oras push" does, so that an archive in
// it is no layer of a container image.
func IsFile(desc descriptor) bool {
	return desc.Annotations[AnnotationTitle] != "" && desc.Annotations[annotationUnpack] == "" ||
		desc.MediaType != "" && !desc.MediaType.IsLayer()
}

// IsBeside reports whether a file of an artifact is not a disk but is next to the disks, such as a
// README or a signature. Every layer of an artifact is a file. A single one must be meant as a
// disk. head and size are as for unpack.IsDisk.
func IsBeside(layers []descriptor, name string, head []byte, size int64) bool {
	files := 0
	for _, l := range layers {
		if l.MediaType == MediaEmpty {
			continue
		}
		if files++; !IsFile(l) {
			return false
		}
	}
	head = head[:min(len(head), image.DetectSize)]
	return files > 1 && !image.IsImage(image.FormatOf(head)) && !unpack.IsDisk(name, head, size)
}

// PlainName is the name of such a file in an image with these layers.
func PlainName(layers []descriptor, i int, dir string) string {
	name := plainName(layers[i])
	for j, l := range layers {
		if j != i && l.MediaType != MediaEmpty && plainName(l) == name {
			// Both are disks, unlike files of archives: neither hides the other.
			ext := path.Ext(name)
			name = fmt.Sprintf("%s-%.12s%s", strings.TrimSuffix(name, ext), layers[i].Digest.Hex,
				ext)
			break
		}
	}
	return path.Join(dir, name)
}

// plainName is the name in the layer's annotations.
func plainName(desc descriptor) string {
	name := desc.Annotations[AnnotationTitle]
	for range unpack.MaxNested {
		name = image.UnwrappedName(name)
	}
	ext := ""
	if name == "" {
		name, ext = desc.Annotations[AnnotationDisk], ".raw"
		if strings.Contains(string(desc.MediaType), "qcow2") {
			ext = ".qcow2"
		}
	}
	name = path.Base(path.Clean("/" + name))
	if name == "/" || len(name) > 200 || strings.IndexByte(name, 0) >= 0 {
		name = "disk"
	}
	return name + ext
}

// PlainContents are the contents of such a layer, if it is not compressed.
func PlainContents(layers []descriptor, i int) *Contents {
	desc := layers[i]
	e := &Entry{Name: PlainName(layers, i, DiskDir), Kind: EntryFile, Size: desc.Size}
	return &Contents{
		List: &List{dir: DiskDir, Entries: map[string]*Entry{e.Name: e}},
		Files: map[string]*Part{e.Name: {Name: e.Name, Size: e.Size,
			Layer: desc.Digest.String()}},
	}
}

// Peek returns the first block, which stays to be read.
func (r *Reader) Peek() ([]byte, error) {
	head := make([]byte, TarBlock)
	n, err := io.ReadFull(r.Reader, head)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return nil, err
	}
	r.Reader = io.MultiReader(bytes.NewReader(head[:n]), r.Reader)
	return head[:n], nil
}

// WholeLayer is the ordinal of a file that is a layer of its own.
const WholeLayer = -1
