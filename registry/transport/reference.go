package transport

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// Reference names an image: in a registry, in an OCI layout, or in an archive of one, in the
// notation of docker, podman and skopeo. It may also be the address of a file.
type Reference struct {
	text   string         // without secrets
	web    *address       // nil: an image
	remote name.Reference // nil: a local one
	oci    string         // directory of an OCI layout
	file   string         // an archive
	packed bool           // the archive is named as that of an OCI layout
	tag    string         // of an OCI layout; "": its only image
}

const (
	prefixOCI        = "oci:"
	prefixOCIArchive = "oci-archive:"
	prefixArchive    = "docker-archive:"
	prefixDocker     = "docker://"
)

// ParseReference reads registry/name:tag, registry/name@sha256:..., oci:DIR[:TAG],
// oci-archive:FILE[:TAG] or docker-archive:FILE.
func ParseReference(text string) (Reference, error) {
	r := Reference{text: text}
	switch {
	case strings.HasPrefix(text, prefixOCI):
		r.oci, r.tag = cutTag(strings.TrimPrefix(text, prefixOCI))
		if r.oci == "" {
			return Reference{}, fmt.Errorf(
				"%q names no directory: write oci:DIRECTORY or oci:DIRECTORY:TAG", text)
		}
		return r, nil
	case strings.HasPrefix(text, prefixOCIArchive):
		r.file, r.tag = cutTag(strings.TrimPrefix(text, prefixOCIArchive))
		if r.packed = true; r.file == "" {
			return Reference{}, fmt.Errorf(
				"%q names no file: write oci-archive:FILE or oci-archive:FILE:TAG", text)
		}
		return r, nil
	case strings.HasPrefix(text, prefixArchive):
		r.file = strings.TrimPrefix(text, prefixArchive)
		if r.file == "" {
			return Reference{}, fmt.Errorf("%q names no file: write docker-archive:FILE", text)
		}
		return r, nil
	}
	if strings.HasSuffix(text, ".oci-archive") && !strings.Contains(text, "://") {
		return Reference{}, fmt.Errorf("%q is the name of an archive, and not of an image in a "+
			"registry: write oci-archive:%s", text, text)
	}
	plain := strings.TrimPrefix(text, prefixDocker)
	if err := otherPlace(plain); err != nil {
		return Reference{}, err
	}
	if _, rest, ok := strings.Cut(plain, "://"); ok {
		if u, err := parseURL(text); IsAddress(text) && err == nil { // its query may be a secret
			rest = strings.TrimPrefix(shown(u), u.Scheme+"://")
			text = shown(u)
		} else if IsAddress(text) {
			return Reference{}, err
		}
		return Reference{}, fmt.Errorf("%q is an address, not an image reference: write %s", text,
			rest)
	}
	if at := strings.IndexByte(plain, '@'); at >= 0 {
		// If a name has a tag and a digest, the digest decides, as for docker and podman.
		repository, digest := plain[:at], plain[at+1:]
		if _, err := v1.NewHash(digest); err != nil {
			if strings.Contains(digest, "/") {
				return Reference{},
					errors.New("a user name or password does not belong into a reference: " +
						"credentials come from --registry-config, or from the environment")
			}
			return Reference{}, fmt.Errorf("%q has no valid digest behind the @: %w", text, err)
		}
		tagged, err := name.ParseReference(repository, name.WeakValidation)
		if err != nil {
			return Reference{}, badName(text, err)
		}
		r.remote = tagged.Context().Digest(digest)
		return r.checked()
	}
	remote, err := name.ParseReference(plain, name.WeakValidation)
	if err != nil {
		return Reference{}, badName(text, err)
	}
	r.remote = remote
	return r.checked()
}

// checked refuses an odd spelling of a reference to a registry.
func (r Reference) checked() (Reference, error) {
	repo := r.remote.Context()
	if err := checkNames(repo.RegistryStr(), repo.RepositoryStr()); err != nil {
		return Reference{}, badName(r.text, err)
	}
	return r, nil
}

// otherPlace says what to do about a reference to a place that is not supported. It does not repeat
// the reference, which may have a password.
func otherPlace(text string) error {
	scheme, rest, ok := strings.Cut(text, ":")
	scheme = strings.ToLower(scheme)
	path := strings.HasPrefix(rest, "/") || strings.HasPrefix(rest, ".")
	switch {
	case !ok || IsAddress(text):
		return nil
	case scheme == "containers-storage" || scheme == "docker-daemon",
		path && slices.Contains([]string{"dir", "ostree", "sif", "tarball"}, scheme):
		return fmt.Errorf("images at %q are not read: copy this one to an OCI layout with "+
			"\"skopeo copy\", and write oci:DIRECTORY:TAG", scheme+":")
	case scheme == "file" && path:
		return errors.New("a file of this machine is no reference: serve, convert and push take " +
			"its path, without \"file:\"")
	case !strings.HasPrefix(rest, "//"):
		return nil
	case slices.Contains([]string{"s3", "s3a", "gs", "az", "abfs", "abfss", "wasbs", "swift"},
		scheme):
		return fmt.Errorf("%q names an object in a store: write its https:// address, which the "+
			"store can sign for a while", scheme+"://")
	}
	return fmt.Errorf("%q cannot be read: write an https:// address or a reference; fetch what "+
		"is elsewhere with another program, and name the file to convert or push", scheme+"://")
}

// badName says what is wrong with a name. The error of a tag is clearer than that of a reference.
func badName(text string, err error) error {
	if _, cause := name.NewTag(strings.TrimPrefix(text, prefixDocker),
		name.WeakValidation); cause != nil {
		err = cause
	}
	return fmt.Errorf("%q is not an image reference: %w; write REGISTRY/NAME:TAG, "+
		"REGISTRY/NAME@sha256:DIGEST, oci:DIRECTORY[:TAG], oci-archive:FILE[:TAG] or "+
		"docker-archive:FILE", text, err)
}

// cutTag splits DIR:TAG. A colon before a slash belongs to the directory.
func cutTag(text string) (dir, tag string) {
	if i := strings.LastIndexByte(text, ':'); i >= 0 && !strings.Contains(text[i:], "/") {
		return text[:i], text[i+1:]
	}
	return text, ""
}

// String is the reference as it was written. An address comes without its query.
func (r Reference) String() string { return r.text }

// Remote reports whether the image is in a registry, and not on this machine.
func (r Reference) Remote() bool { return r.remote != nil }

// Host is the host of the registry or of the address, with its port; "" for a local image.
func (r Reference) Host() string {
	if r.web != nil {
		return r.web.url.Host
	}
	if r.remote == nil {
		return ""
	}
	return r.remote.Context().RegistryStr()
}

// Identifier is the tag or the digest of an image in a registry.
func (r Reference) Identifier() string { return r.remote.Identifier() }

// Digest is the digest in the reference. If ok is false, there is none.
func (r Reference) Digest() (digest string, ok bool) {
	if d, ok := r.remote.(name.Digest); ok {
		return d.DigestStr(), true
	}
	return "", false
}

// RepositoryText names the place of the reference's image, without its tag or digest. Unverified
// bytes belong to this place: another repository may have other bytes under the same digest.
func (r Reference) RepositoryText() string {
	switch {
	case r.web != nil:
		return shown(r.web.url)
	case r.oci != "":
		return prefixOCI + r.oci
	case r.packed:
		return prefixOCIArchive + r.file
	case r.file != "":
		return prefixArchive + r.file
	}
	return r.remote.Context().Name()
}
