package nbd

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/serving"
)

// TestRemoteOnce: a disk that is for one connection has failed when that breaks.
func TestRemoteOnce(t *testing.T) {
	n := relay(t, serve(t, 1, nil))
	r := openRemote(t, RemoteOptions{Address: serving.SocketPrefix + n.socket,
		Export: "disk1.raw", Once: true})
	_, err := r.ReadAt(make([]byte, 512), 0)
	require.NoError(t, err)
	n.cut()
	_, err = r.ReadAt(make([]byte, 512), 0)
	require.ErrorIs(t, err, disk.ErrFailed)
}
