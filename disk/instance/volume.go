package instance

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/internal/osfile"
)

// volumeID tells apart what one kernel has mounted, for as long as it is up: by the number of the
// device, and as numbers are used again, by that of its attachment where it is a block device. A
// copy of a volume, as from a snapshot, and a volume that was gone for a while have other ones. It
// is empty where it says nothing: the file system of a container gets a new number with every
// start, whatever lies below it. An error says that it could not be asked for now: half of the
// answer would make another volume of it, on which the live map counts for nothing.
func volumeID(path string) (string, error) {
	var st unix.Stat_t
	var fs unix.Statfs_t
	if osfile.Retry(func() error { return unix.Stat(path, &st) }) != nil ||
		osfile.Retry(func() error { return unix.Statfs(path, &fs) }) != nil ||
		fs.Type == unix.OVERLAYFS_SUPER_MAGIC {
		return "", nil
	}
	number := fmt.Sprintf("%d:%d", unix.Major(uint64(st.Dev)), unix.Minor(uint64(st.Dev)))
	// A link to the device, or to a partition in the directory of its device. Cleaning the path
	// would make another one of it.
	for _, name := range []string{"/diskseq", "/../diskseq"} {
		text, err := os.ReadFile("/sys/dev/block/" + number + name)
		if err == nil {
			return number + "#" + strings.TrimSpace(string(text)), nil
		}
		if isScarce(err) {
			return "", err
		}
	}
	return number, nil
}
