package api

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// DefaultName is the name of the volume at the address /volume, which has no name in it.
const DefaultName = "default"

// maxName is the longest name of a volume, in bytes.
const maxName = 128

// CheckName returns nil if a volume may have this name: lower-case letters, digits, '-', '.' and
// '_', at most 128 in all. The first and the last must be a letter or a digit. The name is a part
// of addresses, and the name of a directory.
func CheckName(name string) error {
	if name == "" || len(name) > maxName {
		return fmt.Errorf("a volume's name has 1 to %d characters, and this has %d", maxName,
			len(name))
	}
	for i := range len(name) {
		c := name[i]
		alphanumeric := c >= 'a' && c <= 'z' || c >= '0' && c <= '9'
		inside := i > 0 && i < len(name)-1 && (c == '-' || c == '.' || c == '_')
		if !alphanumeric && !inside {
			return fmt.Errorf("%q is not a name for a volume: use lower-case letters and digits, "+
				"and between them '-', '.' and '_'", name)
		}
	}
	return nil
}

// Spec is a request for a volume. A request without any field asks for the existing volume. If
// there is none, the server makes one from its only image, or an empty one of its default size.
type Spec struct {
	// Size is the smallest size of the disk in bytes. An empty disk needs one. 0: the size of the
	// image, or of the uploaded data.
	Size Size `json:"size,omitempty" yaml:"size,omitempty"`
	// BlockSize is the length of a logical block in bytes, 512 or 4096. 0: the block size of the
	// snapshot's disk, or else 512.
	BlockSize int `json:"block-size,omitempty" yaml:"block-size,omitempty"`
	// From is the initial content of the disk. nil: none, the disk reads as zeros.
	From *Source `json:"from,omitempty" yaml:"from,omitempty"`
	// AccessMode is write-exclusive (the default), write-shared or read-shared.
	AccessMode string `json:"access-mode,omitempty" yaml:"access-mode,omitempty"`
	Copy       *Copy  `json:"copy,omitempty" yaml:"copy,omitempty"`
	// PVC places the disk on a claim that the server has mounted. The virtual machine then uses the
	// claim, and not the server.
	PVC *Claim `json:"pvc,omitempty" yaml:"pvc,omitempty"`
}

// Source is the initial content of a disk. Exactly one of Image, Reference, URL, Snapshot and
// Upload is set.
type Source struct {
	// Image is the name of a file in the server's directory of images (/disk).
	Image string `json:"image,omitempty" yaml:"image,omitempty"`
	// Reference is an image in a registry.
	Reference string `json:"reference,omitempty" yaml:"reference,omitempty"`
	// URL is the https:// or http:// address of a disk. Its query may be a secret.
	URL string `json:"url,omitempty" yaml:"url,omitempty"`
	// Digest is the digest of the file at URL: sha256: and 64 hexadecimal digits. It is required.
	Digest string `json:"digest,omitempty" yaml:"digest,omitempty"`
	// Disk is the name of a disk's file, if Reference has several disks.
	Disk string `json:"disk,omitempty" yaml:"disk,omitempty"`
	// Snapshot is DISK@NAME: a snapshot of another volume, or of another persistent disk of the
	// server. The disk is ready at once, and nothing is copied first.
	Snapshot string `json:"snapshot,omitempty" yaml:"snapshot,omitempty"`
	Upload   bool   `json:"upload,omitempty" yaml:"upload,omitempty"` // data that comes later
}

// Copy is how the disk gets the content of its source.
type Copy struct {
	// Mode is clone (the default), copy-on-write or copy-on-read. A disk without an image, or with
	// uploaded data, also accepts none, which then means the same.
	Mode string `json:"mode,omitempty" yaml:"mode,omitempty"`
	// UsageType is the kind of storage for the guest's writes. "": the server's own directory.
	UsageType string `json:"usage-type,omitempty" yaml:"usage-type,omitempty"`
}

// Claim is a PersistentVolumeClaim.
type Claim struct {
	Name string `json:"claimname" yaml:"claimname"`
}

// IsZero reports whether the request has no field.
func (s Spec) IsZero() bool { return s == Spec{} }

// The access modes and copy modes.
const (
	WriteExclusive = "write-exclusive"
	WriteShared    = "write-shared"
	ReadShared     = "read-shared"

	CopyNone    = "none"
	CopyClone   = "clone"
	CopyOnWrite = "copy-on-write"
	CopyOnRead  = "copy-on-read"
)

// The lengths of logical blocks in bytes.
const (
	shortBlock = 512
	longBlock  = 4096
)

// Resolved returns the request with its defaults, or an error if the request contradicts itself. It
// does not check images, claims and usage types, which only the server knows.
func (s Spec) Resolved() (Spec, error) {
	switch s.AccessMode {
	case "":
		s.AccessMode = WriteExclusive
	case WriteExclusive, WriteShared, ReadShared:
	default:
		return s, fmt.Errorf("access-mode: %q is unknown: use %s, %s or %s", s.AccessMode,
			WriteExclusive, WriteShared, ReadShared)
	}
	switch s.BlockSize {
	case 0, shortBlock:
	case longBlock:
		if s.Size%longBlock != 0 {
			return s, fmt.Errorf("size: %d is not a multiple of the %d bytes of a logical block",
				s.Size, longBlock)
		}
	default:
		return s, fmt.Errorf("block-size: %d is unknown: use %d or %d", s.BlockSize, shortBlock,
			longBlock)
	}
	from, err := s.From.resolved()
	if err != nil {
		return s, err
	}
	s.From = from
	if s.PVC != nil && s.PVC.Name == "" {
		return s, errors.New("pvc: it has no claimname: name a claim that the server has mounted")
	}
	if err := s.Size.check(); err != nil {
		return s, err
	}
	return s, s.resolveCopy()
}

func (s *Spec) resolveCopy() error {
	c := orZero(s.Copy)
	imageless := s.From == nil || s.From.Upload
	switch c.Mode {
	case "", CopyClone:
		c.Mode = CopyClone
	case CopyNone:
		if !imageless {
			return fmt.Errorf("copy.mode: %q would write to the image itself, which others "+
				"use, too: use %s, %s or %s", c.Mode, CopyClone, CopyOnWrite, CopyOnRead)
		}
		c.Mode = CopyClone
	case CopyOnWrite, CopyOnRead:
		if imageless || s.PVC != nil {
			return fmt.Errorf("copy.mode: %q needs an image that the disk keeps using: leave it "+
				"out, or use %s", c.Mode, CopyClone)
		}
	default:
		return fmt.Errorf("copy.mode: %q is unknown: use %s, %s, %s or %s", c.Mode, CopyClone,
			CopyOnWrite, CopyOnRead, CopyNone)
	}
	if s.PVC != nil && c.UsageType != "" {
		return errors.New("pvc and copy.usage-type both say where the disk is to be: " +
			"leave one of them out")
	}
	s.Copy = &c
	return nil
}

// resolved returns the source as Resolved does. It returns nil for an empty disk.
func (s *Source) resolved() (*Source, error) {
	if s == nil || *s == (Source{}) {
		return nil, nil
	}
	set := 0
	for _, is := range []bool{s.Image != "", s.Reference != "", s.URL != "", s.Snapshot != "",
		s.Upload} {
		if is {
			set++
		}
	}
	switch {
	case set != 1:
		return nil, errors.New("from: say one of image, reference, url, snapshot and upload")
	case s.URL != "" && !isDigest(s.Digest):
		return nil, errors.New("from.digest: it says which file at the address is meant: write " +
			"sha256: and 64 hexadecimal digits in lower case")
	case s.Digest != "" && s.URL == "":
		return nil, errors.New("from.digest: it belongs to a url, and there is none")
	case s.Disk != "" && s.Reference == "":
		return nil, errors.New("from.disk: it tells the disks of a reference apart, and there is " +
			"no reference")
	}
	if disk, name := s.Cloned(); s.Snapshot != "" && (disk == "" || name == "") {
		return nil, fmt.Errorf("from.snapshot: %q names no snapshot: say DISK@NAME, such as "+
			"vm1@monday", s.Snapshot)
	}
	copied := *s
	return &copied, nil
}

func isDigest(text string) bool {
	digits, ok := strings.CutPrefix(text, "sha256:")
	return ok && len(digits) == 64 && strings.Trim(digits, "0123456789abcdef") == ""
}

// Far reports whether the content has to be fetched.
func (s *Source) Far() bool { return s != nil && (s.Reference != "" || s.URL != "") }

// Shown returns the source as everybody may see it who may see the volume: without the query of an
// address.
func (s *Source) Shown() *Source {
	if s == nil || s.URL == "" {
		return s
	}
	copied := *s
	copied.URL, _, _ = strings.Cut(s.URL, "?")
	return &copied
}

// Cloned returns the disk and the name in Snapshot. A name has no '@'.
func (s *Source) Cloned() (disk, snapshot string) {
	if s == nil || s.Snapshot == "" {
		return "", ""
	}
	at := strings.LastIndexByte(s.Snapshot, '@')
	return s.Snapshot[:max(at, 0)], s.Snapshot[at+1:]
}

// Needed reports whether the request has to name a size.
func (s Spec) Needed() bool { return s.Size == 0 && s.From == nil }

// Differences compares two resolved requests: the one that a volume was made from, and a new one.
// It returns the fields that differ. It does not compare sizes, because a volume may have grown,
// and not the block size if the new request has none.
func Differences(is, asked Spec) []Difference {
	var all []Difference
	compare := func(field, is, asked string) {
		if is != asked {
			all = append(all, Difference{field, cmp.Or(is, "nothing"), cmp.Or(asked, "nothing")})
		}
	}
	compare("from", is.From.String(), asked.From.String())
	if asked.BlockSize != 0 {
		compare("block-size", strconv.Itoa(max(is.BlockSize, shortBlock)),
			strconv.Itoa(asked.BlockSize))
	}
	compare("access-mode", is.AccessMode, asked.AccessMode)
	compare("copy.mode", orZero(is.Copy).Mode, orZero(asked.Copy).Mode)
	compare("copy.usage-type", orZero(is.Copy).UsageType, orZero(asked.Copy).UsageType)
	compare("pvc", orZero(is.PVC).Name, orZero(asked.PVC).Name)
	return all
}

func orZero[T any](p *T) T { return *cmp.Or(p, new(T)) }

// String describes the source for people.
func (s *Source) String() string {
	switch {
	case s == nil:
		return ""
	case s.Upload:
		return "an upload"
	case s.Snapshot != "":
		return fmt.Sprintf("the snapshot %q", s.Snapshot)
	case s.Image != "":
		return fmt.Sprintf("the image %q", s.Image)
	case s.URL != "":
		return s.Shown().URL + "@" + s.Digest
	case s.Disk != "":
		return fmt.Sprintf("the disk %q of %s", s.Disk, s.Reference)
	}
	return s.Reference
}
