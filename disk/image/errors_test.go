package image

import (
	"fmt"
	"io/fs"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/words"
)

func TestScanErrorIsTheErrorOfEveryFile(t *testing.T) {
	cause := &fs.PathError{Op: "read", Path: "b", Err: unix.EIO}
	err := fmt.Errorf("start: %w", &ScanError{Dir: "/disk", Files: []*Error{
		{Name: "a", Reason: "is empty"},
		{Name: "b", Reason: "cannot be read", Action: "fetch it again", Err: cause},
	}})
	require.ErrorIs(t, err, unix.EIO)
	var image *Error
	require.ErrorAs(t, err, &image)
	require.Equal(t, "start: 2 files in \"/disk\" cannot be served:\n  \"a\": is empty\n  \"b\": "+
		"cannot be read; fetch it again", err.Error())
	require.Contains(t, (&ScanError{Dir: "/disk", Files: []*Error{image}}).Error(),
		`1 file in "/disk"`)
}

func TestExplainOpen(t *testing.T) {
	for cause, want := range map[error]string{
		unix.ELOOP: "symbolic link", unix.EXDEV: "outside the directory of the image",
		unix.ENOENT: "does not exist",
		unix.EACCES: "cannot be read by user", unix.EMFILE: "cannot be opened",
		&notRegularError{"a socket"}: "is a socket",
	} {
		reason, _ := explainOpen(&fs.PathError{Op: "open", Path: "x", Err: cause}, useFound)
		require.Contains(t, reason, want)
	}
}

func TestSizesForPeople(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB",
		1000 << 10: "1000 KiB", 12345: "12.1 KiB", 123456: "121 KiB", 1300: "1.27 KiB",
		1048575:  "1 MiB",
		10 << 30: "10 GiB", 64 << 40: "64 TiB", 1<<63 - 1: "8 EiB"} {
		require.Equal(t, want, words.Bytes(n))
	}
}
