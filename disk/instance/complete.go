package instance

import (
	"os"
	"slices"

	"kubevirt.io/disk/internal/osfile"
)

// IsComplete reports whether Open needs no image: an earlier start left a complete disk that was
// made of the image whose files have these digests, its own first. Open finds that disk with the
// same WorkDir, PersistentDir and Name.
func IsComplete(opt Options, digests []string) bool {
	d := persistentDirOf(opt.PersistentDir)
	if opt.PersistentDir == "" {
		root, err := osfile.Resolved(opt.WorkDir)
		if err != nil {
			return false
		}
		d = workDirOf(root, escapeName(opt.Name))
		if osfile.CheckOwner(d.path) != nil {
			return false
		}
	}
	s, err := loadState(d.state())
	if err != nil || !s.Complete || !s.survivesBoot(bootID()) {
		return false
	}
	if !d.persistent && s.Image != storedName(opt.Name) {
		return false
	}
	st, err := os.Lstat(d.disk())
	if err != nil || !st.Mode().IsRegular() || st.Size() < s.Size {
		return false
	}
	var made []string
	for _, f := range s.Chain {
		made = append(made, f.Digest)
	}
	return len(digests) > 0 && !slices.Contains(digests, "") && slices.Equal(made, digests)
}
