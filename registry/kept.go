package registry

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/internal/bounded"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// keptSource is an image whose manifests and index are stored in a directory, under their digests,
// so that a later start does not request them again.
type keptSource struct {
	transport.Source
	dir *os.Root
	// digest of the manifest that the reference named at first; "": this is the first time
	pinned string
	// named is the requested manifest, until the image is admitted. Then it is stored.
	named    []byte
	admitted bool
}

// newKeptSource opens the directory, and makes it if it is missing. It may be next to a disk, where
// others can put a link in its place: a link is refused.
func newKeptSource(src transport.Source, dir string) (*keptSource, error) {
	above := filepath.Dir(dir)
	if err := os.MkdirAll(above, 0o700); err != nil {
		return nil, err
	}
	above, err := osfile.Resolved(above)
	if err != nil {
		return nil, err
	}
	dir = filepath.Join(above, filepath.Base(dir))
	if err := osfile.MakeDir(dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	root, err := osfile.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	k := &keptSource{Source: src, dir: root}
	if err := k.unlinked(); err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return k, nil
}

// unlinked checks that the open directory is the one with its name, and that no link has led to it.
func (k *keptSource) unlinked() error {
	named, err := osfile.OpenFile(filepath.Clean(k.dir.Name()), os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer named.Close()
	a, err := named.Stat()
	if err != nil {
		return err
	}
	b, err := k.dir.Stat(".")
	if err == nil && !os.SameFile(a, b) {
		err = fmt.Errorf("%q was replaced while it was opened", k.dir.Name())
	}
	return err
}

func (k *keptSource) Close() error { return errors.Join(k.Source.Close(), k.dir.Close()) }

// Manifest returns the stored manifest, or requests and stores it. A reference keeps its first
// meaning.
func (k *keptSource) Manifest(ctx context.Context, digest string) ([]byte, string, error) {
	digest = cmp.Or(digest, k.pinned)
	if digest != "" {
		if content, err := k.read(keptName(digest), transport.MaxManifest); err == nil &&
			transport.DigestOf(content) == digest {
			return content, "", nil
		}
	}
	content, mediaType, err := k.Source.Manifest(ctx, digest)
	if err == nil {
		err = transport.CheckDigest(content, digest)
	}
	if err != nil {
		return nil, "", err
	}
	// Only a manifest that names its own media type can be read later without the registry.
	if transport.ManifestKind(content, "") != "" {
		if !k.admitted {
			k.named = content
			return content, mediaType, nil
		}
		err = k.write(keptName(transport.DigestOf(content)), content)
	}
	return content, mediaType, err
}

// Admit also accepts a proof of an earlier start, so that the registry is not needed. It stores a
// new proof.
func (k *keptSource) Admit(ctx context.Context, content, _ []byte) (transport.Admission, error) {
	digest := transport.DigestOf(content)
	name := proofName(digest)
	proof, _ := k.read(name, maxRecord) // without a proof, the registry is asked
	a, err := k.Source.Admit(ctx, content, proof)
	if err != nil {
		return a, err
	}
	if a.Proof != nil && !bytes.Equal(a.Proof, proof) {
		err = k.write(name, a.Proof)
	}
	if k.named != nil && err == nil {
		err = k.write(keptName(digest), k.named)
	}
	k.admitted, k.named = true, nil
	return a, err
}

// resolve reads the manifest that the reference named when r was made. This read is admitted.
func (k *keptSource) resolve(ctx context.Context, gated bool, ref transport.Reference,
	r record) (*transport.Image, error) {
	k.pinned = r.Digest
	if gated && r.Named != "" {
		k.pinned = r.Named // the signature is for this digest
	}
	img, err := transport.Resolve(ctx, k, ref)
	if err == nil || !gated || r.Digest == "" || r.Named != "" {
		return img, err
	}
	// When r was made, no signature was required. So the list of platforms, which is what is
	// signed, may not be stored.
	k.pinned = ""
	if img, err2 := transport.Resolve(ctx, k, ref); err2 == nil && img.Digest == r.Digest {
		return img, nil
	}
	return nil, err
}

// resolve reads the manifest of the image, once.
func (s *Stream) resolve(ctx context.Context) error {
	if s.image != nil {
		return nil
	}
	img, err := s.kept.resolve(ctx, s.client.Gated(), s.ref, s.record)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.image, s.signedBy = img, img.Admitted.Key; s.ref.IsAddress() {
		s.file = transport.ContentDigest(img.Manifest)
	}
	return nil
}

// Reference names the image by its digest: of the list, if it is one for several platforms. "": it
// is not in a registry.
func (s *Stream) Reference() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ref.Remote() {
		return ""
	}
	return s.ref.RepositoryText() + "@" + cmp.Or(s.record.Named, s.record.Digest)
}

// SignedBy is the fingerprint of the key that has signed the image. "": no signature was required.
func (s *Stream) SignedBy() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.signedBy
}

// fileDigest is the digest of a file at an address, from the stored manifest. "": unknown.
func (k *keptSource) fileDigest(manifest string) string {
	content, err := k.read(keptName(manifest), transport.MaxManifest)
	if err != nil || transport.DigestOf(content) != manifest {
		return ""
	}
	m, err := transport.ParseManifest(content)
	if err != nil || len(m.Layers) == 0 {
		return ""
	}
	return transport.ContentDigest(m)
}

func proofName(digest string) string { return "signature-" + keptName(digest) + ".json" }

// Blob returns a stored blob. Only blobs of the index are stored.
func (k *keptSource) Blob(desc v1.Descriptor) (*transport.Blob, error) {
	name := keptName(desc.Digest.String())
	open := func() (*os.File, error) { return osfile.OpenRegularIn(k.dir, name) }
	if f, err := open(); err == nil {
		h := sha256.New()
		_, err = io.Copy(h, io.LimitReader(f, layer.MaxIndexLayer+1))
		err = errors.Join(err, f.Close())
		if err == nil && transport.DigestIn(h) == desc.Digest.String() {
			return transport.FileBlob(desc, open, 0), nil
		}
		_ = k.dir.Remove(name) // it is damaged, and is stored again
	}
	return k.Source.Blob(desc)
}

func (k *keptSource) saveBlob(desc v1.Descriptor, content io.Reader) error {
	name := keptName(desc.Digest.String())
	if info, err := k.dir.Stat(name); err == nil && info.Size() == desc.Size {
		return nil
	}
	return k.writeFrom(name, content)
}

func keptName(digest string) string { return strings.ReplaceAll(digest, ":", "-") }

// record is the meaning of a reference when it was resolved, as durable.EncodeRecord stores it.
type record struct {
	Reference string `json:"reference"`
	Digest    string `json:"digest"` // of the manifest
	// Named is the digest of what the reference named: of the manifest, or of a list that leads to
	// it. "": an earlier version has made the record.
	Named string       `json:"named,omitempty"`
	Disks []StreamDisk `json:"disks,omitempty"`
	// Pulled: the image was fetched as a whole. Unverified: some layers are served before they are
	// verified.
	Pulled     bool `json:"pulled,omitempty"`
	Unverified bool `json:"unverified,omitempty"`
}

// StreamDisk is a disk of an image.
type StreamDisk struct {
	Name string `json:"name"` // as it is in the image's directory of disks
	// Digests are the digests of its files, its own first. nil: the disk was not opened yet.
	Digests []string `json:"digests,omitempty"`
}

const maxRecord = 1 << 20

func recordName(reference string) string {
	digest := transport.DigestOf([]byte(reference))
	return "reference-" + strings.TrimPrefix(digest, "sha256:") + ".json"
}

// loadRecord returns the record of a reference, or an empty one if there is none.
func (k *keptSource) loadRecord(ref transport.Reference) (r record, err error) {
	name := recordName(ref.String())
	content, err := k.read(name, maxRecord)
	if errors.Is(err, fs.ErrNotExist) {
		return record{}, nil
	}
	if err == nil {
		err = durable.DecodeRecord(content, &r)
	}
	if was := new(durable.DamagedError); errors.As(err, &was) { // earlier ones have no checksum
		r = record{}
		err = json.Unmarshal(content, &r)
	}
	if err == nil && (r.Reference != ref.String() || r.Digest == "") {
		err = errors.New("is of another image")
	}
	if err != nil {
		return record{}, fmt.Errorf("the record of the image that %s named cannot be read: %q: "+
			"%w; remove that file to ask the registry again",
			ref, filepath.Join(k.dir.Name(), name), err)
	}
	return r, nil
}

func (k *keptSource) saveRecord(r record) error {
	content, err := durable.EncodeRecord(r)
	if err != nil {
		return err
	}
	name := recordName(r.Reference)
	if old, err := k.read(name, maxRecord); err == nil && string(old) == string(content) {
		return nil
	}
	return k.write(name, content)
}

func (k *keptSource) read(name string, limit int64) ([]byte, error) {
	return readIn(k.dir, name, limit)
}

// readIn reads a file in a directory.
func readIn(dir *os.Root, name string, limit int64) ([]byte, error) {
	f, err := osfile.OpenRegularIn(dir, name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return bounded.Read(f, limit)
}

// write stores a file in one step. It is on storage when write returns: without it, the disks made
// from the image would be useless.
func (k *keptSource) write(name string, content []byte) error {
	return k.writeFrom(name, bytes.NewReader(content))
}

func (k *keptSource) writeFrom(name string, content io.Reader) error {
	return durable.Write(filepath.Join(k.dir.Name(), name), 0o600, func(f *os.File) error {
		_, err := io.Copy(f, content)
		return err
	})
}
