package transport

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
)

// TestSpoolsShareRoom: blobs that are fetched as a whole do not count on the same free space.
func TestSpoolsShareRoom(t *testing.T) {
	r := &repository{spoolDir: filetest.TinyFS(t, "32m")}
	first, err := r.spoolFile(20 << 20)
	require.NoError(t, err)
	_, err = r.spoolFile(20 << 20)
	require.ErrorContains(t, err, "has room for 12 MiB")
	require.NoError(t, first.Close())
	second, err := r.spoolFile(20 << 20)
	require.NoError(t, err)
	require.NoError(t, second.Close())
}
