package registry

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
)

// repositoryText names where the reference's image lies, without its tag or digest. What is not
// verified belongs to it: another repository may have other bytes under the same digest.
func (r Reference) repositoryText() string {
	switch {
	case r.oci != "":
		return prefixOCI + r.oci
	case r.packed:
		return prefixOCIArchive + r.file
	case r.file != "":
		return prefixArchive + r.file
	}
	return r.remote.Context().Name()
}

// originOf names everybody whose bytes a source returns: each registry and mirror that it may ask,
// and how well the connection is protected; or the very directory or file.
func originOf(src source) string {
	switch s := src.(type) {
	case *repository:
		var all []string
		for _, e := range s.order() {
			all = append(all, fmt.Sprintf("%t %s", e.secure, e.repo.Name()))
		}
		slices.Sort(all) // the order changes while they are asked
		return strings.Join(all, "\n")
	case *layout:
		if s.packed != nil {
			info, err := os.Stat(s.where)
			return prefixOCIArchive + s.where + identityOf(info, err)
		}
		info, err := s.dir.Stat(".")
		return prefixOCI + s.where + identityOf(info, err)
	case archiveSource:
		info, err := os.Stat(s.file)
		return prefixArchive + s.file + identityOf(info, err)
	}
	return fmt.Sprintf("%p", src) // nobody else's
}

func identityOf(info os.FileInfo, err error) string {
	if err != nil {
		return " " + err.Error()
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return fmt.Sprintf(" %d %d", st.Dev, st.Ino)
	}
	return ""
}
