package transfer

import (
	"crypto/tls"
	"net"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// slow is a connection whose peer takes an hour before it sends more of a disk.
type slow struct{ net.Conn }

func (c slow) Write(p []byte) (int, error) {
	if len(p) > 4<<10 { // not the handshake
		time.Sleep(time.Hour)
	}
	return c.Conn.Write(p)
}

// TestSlowDisk: a sender says nothing for long if a guest has written many zeros, and a receiver
// takes nothing for long while it brings a file to storage. Neither is given up for that.
func TestSlowDisk(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	content := filetest.Sample(1<<20, 1)
	require.NoError(t, os.WriteFile(filepath.Join(from, diskName), content, 0o600))
	synctest.Test(t, func(t *testing.T) {
		secret := testtool.Must(NewSecret([]byte("correct horse battery")))(t)
		config := testtool.Must(secret.config())(t)
		source := testtool.Must(OpenSource(from))(t)
		target := testtool.Must(OpenTarget(to, false))(t)
		ours, theirs := net.Pipe()
		served := testtool.Go(func() error {
			return serve(t.Context(), tls.Server(slow{ours}, config), source, new(Progress))
		})
		require.NoError(t, fetch(t.Context(), tls.Client(theirs, config), target, new(Progress)))
		require.NoError(t, <-served)
		require.NoError(t, source.Close())
		require.NoError(t, target.Close())
	})
	require.Equal(t, content, testtool.Must(os.ReadFile(filepath.Join(to, diskName)))(t))
}
