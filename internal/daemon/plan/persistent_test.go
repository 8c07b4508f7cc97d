package plan

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestVolatilePlace(t *testing.T) {
	require.Contains(t, volatilePlace(unix.OVERLAYFS_SUPER_MAGIC), "layer")
	require.Contains(t, volatilePlace(unix.TMPFS_MAGIC), "memory")
	require.Contains(t, volatilePlace(unix.RAMFS_MAGIC), "memory")
	for _, lasting := range []int64{
		unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.NFS_SUPER_MAGIC,
		unix.FUSE_SUPER_MAGIC,
	} {
		require.Empty(t, volatilePlace(lasting))
	}
}
