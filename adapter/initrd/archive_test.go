package initrd

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestArchive compares an archive with one written by hand: a directory that is there once, a file,
// a link, a device, and the end.
func TestArchive(t *testing.T) {
	build := func() string {
		var a Archive
		a.File("/lib/modules/x.ko", 0o644, []byte("abc"))
		a.File("lib/y", 0o755, []byte("#!"))
		a.Symlink("z", "y")
		a.CharDevice("dev/console", 5, 1)
		return string(a.Bytes())
	}
	archive := build()
	require.Equal(t, archive, build(), "the same calls, the same bytes")
	field := func(inode, mode, size, major, minor, name string) string {
		const none = "00000000"
		return "070701" + inode + mode + none + none + "00000001" + none + size + none + none +
			major + minor + name + none
	}
	const none = "00000000"
	want := field("00000001", "000041ed", none, none, none, "00000004") + "lib\x00\x00\x00" +
		field("00000002", "000041ed", none, none, none, "0000000c") + "lib/modules\x00\x00\x00" +
		field("00000003", "000081a4", "00000003", none, none, "00000011") +
		"lib/modules/x.ko\x00\x00" + "abc\x00" +
		field("00000004", "000081ed", "00000002", none, none, "00000006") + "lib/y\x00" +
		"#!\x00\x00" +
		field("00000005", "0000a1ff", "00000001", none, none, "00000002") + "z\x00" +
		"y\x00\x00\x00" +
		field("00000006", "000041ed", none, none, none, "00000004") + "dev\x00\x00\x00" +
		field("00000007", "00002180", none, "00000005", "00000001", "0000000c") +
		"dev/console\x00\x00\x00" +
		field("00000008", none, none, none, none, "0000000b") + "TRAILER!!!\x00\x00\x00\x00"
	require.Equal(t, want, archive)
	require.Zero(t, strings.Count(archive, "lib/modules\x00")-1)
}
