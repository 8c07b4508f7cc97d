package control

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/status"
)

// TestHandoverWithoutAnAnswer asks a daemon that waits for its disk.
func TestHandoverWithoutAnAnswer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	l, err := socket.ListenUnix(path)
	require.NoError(t, err)
	defer l.Close()
	ctx, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	_, err = Client{Socket: path}.Handover(ctx, status.Handover{})
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestHandoverOfAnotherContainersDaemon(t *testing.T) {
	machine, container := Client{}, Client{OwnIsInit: true}
	require.NoError(t, container.checkDaemon(&unix.Ucred{Pid: 1}), "its own")
	require.NoError(t, machine.checkDaemon(&unix.Ucred{Pid: 0}),
		"of a container without a daemon, to control one")
	require.NoError(t, machine.checkDaemon(&unix.Ucred{Pid: 77}), "on a machine")
	require.NoError(t, container.checkDaemon(nil), "the kernel does not tell")
	for _, pid := range []int32{0, 77} {
		require.ErrorIs(t, container.checkDaemon(&unix.Ucred{Pid: pid}), ErrStranger)
	}

	path := filepath.Join(t.TempDir(), "control.sock")
	l, err := socket.ListenUnix(path)
	require.NoError(t, err)
	defer l.Close()
	c, err := net.Dial("unix", path)
	require.NoError(t, err)
	defer c.Close()
	require.EqualValues(t, os.Getpid(), socket.Peer(c).Pid, "the listener, seen from the client")
	_, err = Client{Socket: path, OwnIsInit: true}.Sessions(t.Context())
	require.ErrorIs(t, err, ErrStranger, "the test is not the first process of its container")
}

// TestHandoverAsksSomethingElse asks a server that is not a daemon of this program.
func TestHandoverAsksSomethingElse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	l, err := socket.ListenUnix(path)
	require.NoError(t, err)
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	require.NoError(t, server.Listener.Close())
	server.Listener = l
	server.Start()
	defer server.Close()
	_, err = Client{Socket: path}.Handover(t.Context(), status.Handover{})
	require.ErrorIs(t, err, ErrUnknown)
}
