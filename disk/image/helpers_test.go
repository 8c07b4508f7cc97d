package image

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// scanErrors scans a directory that cannot be served, and returns the message for each file.
func scanErrors(t *testing.T, dir string) map[string]string {
	t.Helper()
	images, err := ScanDir(dir, Options{})
	var bad *ScanError
	require.ErrorAs(t, err, &bad)
	require.Nil(t, images)
	reasons := make(map[string]string)
	for _, f := range bad.Files {
		reasons[f.Name] = f.Explain()
		require.Contains(t, err.Error(), f.Error(), "the message lists every file")
	}
	return reasons
}

// openImage opens an image that has to be good, and closes it in the end.
func openImage(t testing.TB, path string) *Image {
	t.Helper()
	img := testtool.Must(Open(path, Options{}))(t)
	t.Cleanup(func() { img.Close() })
	return img
}
