package instance

import (
	"fmt"
	"strings"

	"kubevirt.io/disk/disk/image"
)

// CopyMode says which part of an image is copied into the work directory, and when.
type CopyMode string

const (
	// CopyNone serves a raw file in place: the guest's writes are in the image file.
	CopyNone CopyMode = "none"
	// CopyOnWrite keeps the guest's writes in a file other than the image.
	CopyOnWrite CopyMode = "copy-on-write"
	// CopyOnRead keeps the guest's writes, and the image's data that the guest has read.
	CopyOnRead CopyMode = "copy-on-read"
	// CopyClone copies the whole image. The default.
	CopyClone CopyMode = "clone"
)

var copyModes = []CopyMode{CopyNone, CopyOnWrite, CopyOnRead, CopyClone}

// ParseCopyMode parses a setting. "" is the default.
func ParseCopyMode(s string) (CopyMode, error) {
	if s == "" {
		return CopyClone, nil
	}
	for _, m := range copyModes {
		if string(m) == s {
			return m, nil
		}
	}
	names := make([]string, len(copyModes))
	for i, m := range copyModes {
		names[i] = string(m)
	}
	return "", fmt.Errorf("copy mode %q is unknown: use one of %s", s, strings.Join(names, ", "))
}

// Check reports whether an image can be served in this mode: nil, or an *UnsupportedModeError. With
// a nil image it reports whether any image can, so that a configuration is refused before the
// images are read.
func (m CopyMode) Check(img *image.Image) error {
	switch m {
	case CopyClone, CopyOnWrite, CopyOnRead, "":
		return nil
	case CopyNone:
		if img != nil && img.Path() == "" {
			return &UnsupportedModeError{
				Mode: m, Image: img.Name(),
				Reason: "it is not a file of this machine, so it cannot be served in place",
				Use:    fmt.Sprintf("use another copy mode, such as %q", string(CopyClone)),
			}
		}
		if img == nil || img.Format() == image.FormatRaw {
			return nil
		}
		return &UnsupportedModeError{
			Mode: m, Image: img.Name(),
			Reason: fmt.Sprintf("it is a %s image, and only a raw one can be served in place",
				img.Format()),
			Use: fmt.Sprintf("use copy mode %q, or convert the image to raw", string(CopyClone)),
		}
	default:
		_, err := ParseCopyMode(string(m))
		return err
	}
}
