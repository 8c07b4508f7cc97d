package instance

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
)

// scanReasons scans a directory that cannot be served, and returns the reason for each file.
func scanReasons(t *testing.T, dir string) map[string]string {
	t.Helper()
	images, err := image.ScanDir(dir, image.Options{})
	var bad *image.ScanError
	require.ErrorAs(t, err, &bad)
	require.Nil(t, images)
	reasons := make(map[string]string)
	for _, f := range bad.Files {
		reasons[f.Name] = f.Explain()
		require.Contains(t, err.Error(), f.Error(), "the message lists every file")
	}
	return reasons
}

// openGood opens a valid image, and closes it at the end of the test.
func openGood(t testing.TB, path string) *image.Image {
	t.Helper()
	img := testtool.Must(image.Open(path, image.Options{}))(t)
	t.Cleanup(func() { img.Close() })
	return img
}
