package disk

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// scanReasons scans a directory that cannot be served, and returns what is said of each file.
func scanReasons(t *testing.T, dir string) map[string]string {
	t.Helper()
	images, err := ScanDir(dir, ImageOptions{})
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

// openGood opens an image that has to be good, and closes it in the end.
func openGood(t testing.TB, path string) *Image {
	t.Helper()
	img, err := OpenImage(path, ImageOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { img.Close() })
	return img
}
