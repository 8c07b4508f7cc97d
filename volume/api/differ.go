package api

import (
	"cmp"
	"fmt"
	"strconv"
)

// Differences compares two resolved requests: the one that a volume was made by, and a new one. It
// names the fields in which they differ. It does not compare sizes, because a volume may have
// grown, and any length of blocks will do for a request that says none.
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
