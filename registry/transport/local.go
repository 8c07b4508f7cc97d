package transport

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/internal/bounded"
)

// refName is the annotation with an image's name in an OCI layout (image-layout.md).
const refName = "org.opencontainers.image.ref.name"

// layoutIndex is the file of an OCI layout that lists its images.
const layoutIndex = "index.json"

// layout is an OCI layout: a directory of blobs and an index, or an archive of such a directory.
type layout struct {
	noGate
	where  string   // the directory or the archive
	tag    string   // of the image; "": the only one
	prefix string   // of references that name this one
	dir    *os.Root // nothing is opened outside of it; nil: it is an archive
	packed *archive // nil: it is a directory
}

func openLayout(ref Reference) (*layout, error) {
	dir, err := osfile.OpenRoot(ref.oci)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("there is no directory %q: after oci: comes the directory of an "+
			"OCI layout, as \"skopeo copy\" and \"buildah push\" write it", ref.oci)
	case err != nil && isFile(ref.oci):
		return nil, fmt.Errorf("%q is a file, and an OCI layout is a directory: if it is an "+
			"archive that docker or podman saved, write docker-archive:%[1]s, and "+
			"oci-archive:%[1]s if it is one of an OCI layout", ref.oci)
	case err != nil:
		return nil, fmt.Errorf("OCI layout: %w", err)
	}
	return &layout{where: ref.oci, tag: ref.tag, prefix: prefixOCI, dir: dir}, nil
}

// noGate is part of a source on this machine, which needs no admission.
type noGate struct{}

func (noGate) Admit(context.Context, []byte, []byte) (Admission, error) { return Admission{}, nil }

func (l *layout) Origin() string {
	if l.packed != nil {
		info, err := os.Stat(l.where)
		return prefixOCIArchive + l.where + identityOf(info, err)
	}
	info, err := l.dir.Stat(".")
	return prefixOCI + l.where + identityOf(info, err)
}

// identityOf identifies one file, by device and inode.
func identityOf(info os.FileInfo, err error) string {
	if err != nil {
		return " " + err.Error()
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return fmt.Sprintf(" %d %d", st.Dev, st.Ino)
	}
	return ""
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && !info.IsDir()
}

func (l *layout) Close() error {
	if l.packed != nil {
		return nil
	}
	return l.dir.Close()
}

// find returns how to open a file of the layout, and where the file lies in the opened one.
func (l *layout) find(name string) (open func() (*os.File, error), at member, err error) {
	if l.packed != nil {
		at, err = l.packed.member(name)
		open = func() (*os.File, error) { return osfile.OpenRegular(l.where) }
	} else {
		open = func() (*os.File, error) { return osfile.OpenRegularIn(l.dir, name) }
		var f *os.File
		if f, err = open(); err == nil {
			var info fs.FileInfo
			if info, err = f.Stat(); err == nil {
				at.size = info.Size()
			}
			err = errors.Join(err, f.Close())
		}
	}
	if err != nil {
		return nil, member{}, fmt.Errorf("OCI layout %q: %w", l.where, err)
	}
	return open, at, nil
}

func (l *layout) read(name string) ([]byte, error) {
	open, at, err := l.find(name)
	if err != nil {
		return nil, err
	}
	f, err := open()
	if err != nil {
		return nil, fmt.Errorf("OCI layout %q: %w", l.where, err)
	}
	defer f.Close()
	return bounded.Read(io.NewSectionReader(f, at.off, at.size), MaxManifest)
}

func (l *layout) Manifest(ctx context.Context, digest string) ([]byte, string, error) {
	if digest != "" {
		h, err := v1.NewHash(digest)
		if err != nil {
			return nil, "", err
		}
		content, err := l.read(blobName(h))
		return content, "", err
	}
	content, err := l.read(layoutIndex)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "", fmt.Errorf("%q is not an OCI layout, as it has no %s: name the directory "+
			"that \"skopeo copy\" or \"buildah push\" has written to", l.where, layoutIndex)
	}
	if err != nil {
		return nil, "", err
	}
	index, err := ParseIndex(content)
	if err != nil {
		return nil, "", fmt.Errorf("OCI layout %q: its %s cannot be read: %w", l.where, layoutIndex,
			err)
	}
	var found []v1.Descriptor
	var names []string
	for _, m := range index.Manifests {
		if m.Annotations[refName] == l.tag || l.tag == "" {
			found = append(found, m)
		}
		names = append(names, fmt.Sprintf("%q", m.Annotations[refName]))
	}
	switch {
	case len(names) == 0:
		return nil, "", fmt.Errorf("OCI layout %q has no images: its %s names none; copy one "+
			"there, as with \"skopeo copy docker://IMAGE %s%s:TAG\"", l.where, layoutIndex,
			l.prefix, l.where)
	case len(found) == 1:
		return l.Manifest(ctx, found[0].Digest.String())
	case len(found) == 0 || l.tag != "":
		return nil, "", absent{fmt.Errorf("OCI layout %q has no image %q; it has %s",
			l.where, l.tag, strings.Join(names[:min(len(names), 20)], ", "))}
	case l.tag == "" && !slices.ContainsFunc(found, hasNoPlatform):
		return content, string(types.OCIImageIndex), nil
	}
	return nil, "", fmt.Errorf("OCI layout %q has several images: name one as %s%s:TAG, of %s",
		l.where, l.prefix, l.where, strings.Join(names[:min(len(names), 20)], ", "))
}

func hasNoPlatform(m v1.Descriptor) bool { return m.Platform == nil }

func blobName(h v1.Hash) string { return path.Join("blobs", h.Algorithm, h.Hex) }

func (l *layout) Blob(desc v1.Descriptor) (*Blob, error) {
	open, at, err := l.find(blobName(desc.Digest))
	if err != nil {
		return nil, err
	}
	if at.size != desc.Size {
		return nil, fmt.Errorf("OCI layout %q: the blob %s has %d bytes, and the manifest says %d",
			l.where, desc.Digest, at.size, desc.Size)
	}
	return FileBlob(desc, open, at.off), nil
}

// FileBlob is a blob in a file, from byte base on.
func FileBlob(desc v1.Descriptor, open func() (*os.File, error), base int64) *Blob {
	return NewBlob(desc, func(ctx context.Context, off, length int64) io.ReadCloser {
		f, err := open()
		if err != nil {
			return io.NopCloser(failing{err})
		}
		return &fileRun{ctx: ctx, file: f, off: base + off, left: length}
	})
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// fileRun reads a part of a file.
type fileRun struct {
	ctx       context.Context
	file      *os.File
	off, left int64
}

func (r *fileRun) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	if r.left == 0 {
		return 0, io.EOF
	}
	n, err := r.file.ReadAt(p[:min(int64(len(p)), r.left)], r.off)
	r.off, r.left = r.off+int64(n), r.left-int64(n)
	if n > 0 {
		return n, nil
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return 0, err
}

func (r *fileRun) Close() error { return r.file.Close() }

// archive is the output of "docker save" or "podman save": a tar archive of layers, with a
// manifest.json.
type archive struct {
	noGate
	file     string
	members  map[string]member
	manifest []byte            // made from the archive's manifest
	blobs    map[string]member // by digest
}

// member is a file of the archive.
type member struct {
	off, size int64
	link      string // a symbolic link: to this member
}

// savedIndex is the file of an archive that lists its image, unless the archive is an OCI layout.
const savedIndex = "manifest.json"

// maxMembers bounds the files of an archive.
const maxMembers = 20000

func (a *archive) Close() error { return nil }

func (a *archive) Origin() string {
	info, err := os.Stat(a.file)
	return prefixArchive + a.file + identityOf(info, err)
}

// openArchive opens an archive of either kind.
func openArchive(ref Reference) (Source, error) {
	file := ref.file
	f, err := osfile.OpenRegular(file)
	var special *osfile.NotRegularError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("there is no file %q: after docker-archive: and oci-archive: comes "+
			"an archive that \"docker save\", \"podman save\" or \"skopeo copy\" has written",
			file)
	case errors.As(err, &special) && special.Kind == osfile.KindDirectory:
		return nil, fmt.Errorf("%q is a directory, and an archive is a file: if it is an OCI "+
			"layout, write oci:%s", file, file)
	case err != nil:
		return nil, fmt.Errorf("archive: %w", err)
	}
	defer f.Close()
	a := &archive{file: file, members: make(map[string]member), blobs: make(map[string]member)}
	if err := a.list(f); err != nil {
		return nil, fmt.Errorf("archive %q: %w", file, err)
	}
	_, isLayout := a.members[layoutIndex]
	_, isSaved := a.members[savedIndex]
	switch {
	case isLayout && (ref.packed || !isSaved):
		return &layout{where: file, tag: ref.tag, prefix: prefixOCIArchive, packed: a}, nil
	case isSaved && ref.tag != "":
		return nil, fmt.Errorf("archive %q is not one of an OCI layout, and has no tags: write "+
			"docker-archive:%s", file, file)
	case !isSaved:
		return nil, fmt.Errorf("archive %q has no container image, as it has neither %s nor %s: "+
			"name a file that \"docker save\", \"podman save\" or \"skopeo copy\" has written",
			file, layoutIndex, savedIndex)
	}
	return a, nil
}

func (a *archive) list(f *os.File) error {
	head := make([]byte, 6)
	if n, _ := f.ReadAt(head, 0); compression(head[:n]) != "" {
		return fmt.Errorf("is compressed by %s: decompress it first", compression(head[:n]))
	}
	tr := tar.NewReader(f) // skips by seeking
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("is not an archive that docker or podman saved: %w", err)
		}
		if len(a.members) == maxMembers {
			return fmt.Errorf("has more than %d files", maxMembers)
		}
		name := path.Clean(h.Name)
		switch h.Typeflag {
		case tar.TypeReg:
			off, err := f.Seek(0, io.SeekCurrent)
			if err != nil {
				return err
			}
			a.members[name] = member{off: off, size: h.Size}
		case tar.TypeSymlink:
			a.members[name] = member{link: path.Join(path.Dir(name), h.Linkname)}
		case tar.TypeLink:
			a.members[name] = member{link: path.Clean(h.Linkname)}
		}
	}
}

func (a *archive) member(name string) (member, error) {
	name = path.Clean(name)
	for range 8 {
		m, ok := a.members[name]
		switch {
		case !ok:
			return member{}, fmt.Errorf("has no file %q", name)
		case m.link == "":
			return m, nil
		}
		name = m.link
	}
	return member{}, fmt.Errorf("has a loop of links at %q", name)
}

func (a *archive) content(f *os.File, name string) ([]byte, error) {
	m, err := a.member(name)
	if err != nil {
		return nil, err
	}
	if m.size > MaxManifest {
		return nil, fmt.Errorf("has a %s of %d bytes, more than %d", name, m.size, MaxManifest)
	}
	text, err := io.ReadAll(io.NewSectionReader(f, m.off, m.size))
	if err == nil {
		err = bounded.Check(text)
	}
	if err != nil {
		return nil, fmt.Errorf("has a %s that cannot be read: %w", name, err)
	}
	return text, nil
}

// assemble makes a manifest for the only image in the archive. The digests of its layers are those
// in the configuration if they are not compressed.
func (a *archive) assemble(ctx context.Context) error {
	f, err := osfile.OpenRegular(a.file)
	if err != nil {
		return err
	}
	defer f.Close()
	text, err := a.content(f, savedIndex)
	if err != nil {
		return err
	}
	var images []struct {
		Config string
		Layers []string
	}
	if err := json.Unmarshal(text, &images); err != nil {
		return fmt.Errorf("its manifest.json cannot be read: %w", err)
	}
	if len(images) != 1 {
		return fmt.Errorf("has %d images: save one", len(images))
	}
	configText, err := a.content(f, images[0].Config)
	if err != nil {
		return err
	}
	var config v1.ConfigFile
	if err := json.Unmarshal(configText, &config); err != nil {
		return fmt.Errorf("its configuration cannot be read: %w", err)
	}
	if len(config.RootFS.DiffIDs) != len(images[0].Layers) || len(images[0].Layers) > maxLayers {
		return fmt.Errorf("has %d layers, and its configuration names %d", len(images[0].Layers),
			len(config.RootFS.DiffIDs))
	}
	m := v1.Manifest{
		SchemaVersion: 2,
		MediaType:     types.DockerManifestSchema2,
		Config: v1.Descriptor{
			MediaType: types.DockerConfigJSON, Size: int64(len(configText))},
	}
	m.Config.Digest, _ = v1.NewHash(DigestOf(configText))
	if a.blobs[m.Config.Digest.String()], err = a.member(images[0].Config); err != nil {
		return err
	}
	for i, name := range images[0].Layers {
		layer, err := a.member(name)
		if err != nil {
			return err
		}
		digest := config.RootFS.DiffIDs[i]
		if h, err := v1.NewHash("sha256:" + filepath.Base(name)); err == nil &&
			strings.HasPrefix(name, "blobs/sha256/") {
			digest = h // an OCI layout in the archive, whose layers may be compressed
		} else if digest, err = packedDigest(ctx, f, layer, digest); err != nil {
			return fmt.Errorf("its layer %q: %w", name, err)
		}
		a.blobs[digest.String()] = layer
		m.Layers = append(m.Layers,
			v1.Descriptor{MediaType: types.DockerUncompressedLayer, Size: layer.size,
				Digest: digest})
	}
	a.manifest, err = json.Marshal(m)
	return err
}

func (a *archive) Manifest(ctx context.Context, _ string) ([]byte, string, error) {
	if a.manifest == nil {
		if err := a.assemble(ctx); err != nil {
			return nil, "", fmt.Errorf("archive %q: %w", a.file, err)
		}
	}
	return a.manifest, string(types.DockerManifestSchema2), nil
}

func (a *archive) Blob(desc v1.Descriptor) (*Blob, error) {
	m, ok := a.blobs[desc.Digest.String()]
	if !ok {
		return nil, fmt.Errorf("archive %q has no blob %s", a.file, desc.Digest)
	}
	return FileBlob(desc, func() (*os.File, error) { return osfile.OpenRegular(a.file) },
		m.off), nil
}

// compression recognises compressed content by its beginning; "": it is not compressed.
func compression(head []byte) string {
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		return "gzip"
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}),
		len(head) >= 4 && head[0]&0xf0 == 0x50 && bytes.Equal(head[1:4], []byte{0x2a, 0x4d, 0x18}):
		return "zstd"
	case bytes.HasPrefix(head, []byte("BZh")), bytes.HasPrefix(head, []byte("\xfd7zXZ\x00")):
		return "bzip2 or xz"
	}
	return ""
}
