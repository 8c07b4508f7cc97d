package transport

import (
	"bytes"
	"encoding/json"
	"fmt"
	"runtime"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"kubevirt.io/disk/registry/internal/bounded"
)

// annotationAbout says that a manifest is about another one, and no image: an attestation.
const annotationAbout = "vnd.docker.reference.type"

// annotationDiskType is the hypervisor of podman's machine images.
const (
	annotationDiskType = "disktype"
	diskTypeQEMU       = "qemu"
)

// goArch is Go's name of an architecture. podman's machine images have the names of uname(1).
func goArch(name string) string {
	switch name {
	case "x86_64":
		return "amd64"
	case "aarch64":
		return "arm64"
	}
	return name
}

// ParseIndex reads an index from an untrusted source.
func ParseIndex(content []byte) (*v1.IndexManifest, error) {
	if err := bounded.Check(content); err != nil {
		return nil, err
	}
	return v1.ParseIndexManifest(bytes.NewReader(content))
}

// ImagesIn returns the images of a list, without attestations, as docker marks them.
func ImagesIn(content []byte) ([]v1.Descriptor, error) {
	index, err := ParseIndex(content)
	if err != nil {
		return nil, fmt.Errorf("the list of images cannot be read: %w", err)
	}
	return slices.DeleteFunc(index.Manifests, func(m v1.Descriptor) bool {
		return m.Platform != nil && m.Platform.OS == "unknown"
	}), nil
}

// Platforms are the platforms of a list's images, such as "linux/arm64".
func Platforms(content []byte) (all []string) {
	images, _ := ImagesIn(content) // a manifest that is no list has none
	for _, m := range images {
		p := m.Platform
		if p == nil || p.OS == "" || len(all) == 20 {
			continue
		}
		if text := p.String(); !slices.Contains(all, text) {
			all = append(all, text)
		}
	}
	return all
}

// OfPlatform chooses the manifest for this machine in an index. Containers run nowhere else, and an
// image that is built for one platform has the disk for that platform.
func OfPlatform(content []byte, ref Reference) (v1.Descriptor, error) {
	images, err := ImagesIn(content)
	if err != nil {
		return v1.Descriptor{}, fmt.Errorf("%s: %w", ref, err)
	}
	var says struct {
		ArtifactType string `json:"artifactType"`
	}
	_ = json.Unmarshal(content, &says) // it was parsed before
	isArtifact := says.ArtifactType != ""
	var there []string
	var unnamed, artifacts []v1.Descriptor // manifests that may be for any platform
	for _, m := range images {
		p := m.Platform
		if m.Digest.Algorithm != "sha256" || !(m.MediaType.IsImage() || m.MediaType.IsIndex()) {
			continue
		}
		if p == nil || p.OS == "" && p.Architecture == "" {
			if m.Annotations[annotationAbout] == "" {
				unnamed = append(unnamed, m)
			}
			continue
		}
		kind := m.Annotations[annotationDiskType]
		if kind != "" && kind != diskTypeQEMU {
			p = &v1.Platform{OS: p.OS, Architecture: p.Architecture + " (" + kind + ")"}
		} else if p.OS == "linux" && goArch(p.Architecture) == runtime.GOARCH {
			return m, nil
		} else if kind != "" || isArtifact {
			artifacts = append(artifacts, m)
		}
		if text := p.String(); !slices.Contains(there, text) && len(there) < 20 {
			there = append(there, text)
		}
	}
	switch {
	case len(unnamed) == 1:
		return unnamed[0], nil
	case len(unnamed) == 0 && len(artifacts) == 1:
		return artifacts[0], nil // nothing in it runs on this machine's processor
	case len(unnamed) > 1:
		return v1.Descriptor{}, fmt.Errorf("the index of %s has %d images and does not say for "+
			"which platforms they are: name one by its digest, as NAME@%s", ref, len(unnamed),
			unnamed[0].Digest)
	case len(there) == 0:
		return v1.Descriptor{}, fmt.Errorf("the index of %s has no image", ref)
	}
	return v1.Descriptor{}, fmt.Errorf("%s has no image for linux/%s, only for: %s; name one of "+
		"these by its digest if you want its disk", ref, runtime.GOARCH, strings.Join(there, ", "))
}
