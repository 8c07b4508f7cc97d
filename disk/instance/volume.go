package instance

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/osfile"
)

// volumeID identifies a mounted volume for as long as the kernel is up: by its device number and,
// because numbers are reused, by the sequence number of a block device. A copy of a volume, such as
// a snapshot, has another identifier, and so has a volume that was gone for a while. The result is
// empty if it would mean nothing: the file system of a container gets a new number at every start.
// After an error the identifier is unknown for now. Half of it would look like another volume, and
// the live map would not count.
func volumeID(path string) (string, error) {
	var st unix.Stat_t
	var fs unix.Statfs_t
	if osfile.Retry(func() error { return unix.Stat(path, &st) }) != nil ||
		osfile.Retry(func() error { return unix.Statfs(path, &fs) }) != nil ||
		fs.Type == unix.OVERLAYFS_SUPER_MAGIC {
		return "", nil
	}
	number := fmt.Sprintf("%d:%d", unix.Major(uint64(st.Dev)), unix.Minor(uint64(st.Dev)))
	// The link leads to the device, or to a partition in the directory of its device. Cleaning the
	// path would change its meaning.
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
