package v1alpha1

import (
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// FollowSpec says which tag is followed.
type FollowSpec struct {
	// tag of the repository of the set's image.
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,127}$')",message="must be a tag, as stable"
	// +kubebuilder:validation:MaxLength=128
	Tag string `json:"tag"`
	// interval is how often the registry is asked: at least 1m, at most 24h.
	// +kubebuilder:default="1h"
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1m') && duration(self) <= duration('24h')",message="must be between 1m and 24h"
	// +optional
	Interval *metav1.Duration `json:"interval,omitempty"`
}

// FollowedStatus is what a tag has named.
type FollowedStatus struct {
	// tag is that of the spec when the registry was asked.
	Tag string `json:"tag"`
	// image is what the tag has named last, by its digest: the image of new identities.
	Image string `json:"image"`
	// earlier are the digests that it has named before, the newest first.
	// +kubebuilder:validation:MaxItems=32
	// +optional
	Earlier []string `json:"earlier,omitempty"`
}

// NewImage is the image of new identities, by its digest.
func (s *VMIdentitySet) NewImage() string {
	if f := s.Status.Followed; f != nil && s.Spec.Follow != nil && f.Tag == s.Spec.Follow.Tag {
		return f.Image
	}
	return s.Spec.Image
}

// RepositoryOf is the repository of an image with a digest, without its tag.
func RepositoryOf(image string) string {
	name, _, _ := strings.Cut(image, "@")
	if colon := strings.LastIndexByte(name, ':'); colon > strings.LastIndexByte(name, '/') {
		name = name[:colon]
	}
	return name
}

// DigestOf is the digest of an image that is named by it.
func DigestOf(image string) string { return image[strings.LastIndexByte(image, '@')+1:] }
