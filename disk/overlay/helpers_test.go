package overlay

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
)

// openGood opens a valid image, and closes it at the end of the test.
func openGood(t testing.TB, path string) *image.Image {
	t.Helper()
	img, err := image.Open(path, image.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { img.Close() })
	return img
}
