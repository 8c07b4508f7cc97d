package nbd

import (
	"cmp"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// served is a server with disks in memory, at a Unix socket.
type served struct {
	*Server
	disks  []*disktest.Fault
	socket string
}

const diskSize = 16 << 20

// serve serves that many disks, called disk1.raw and so on.
func serve(t testing.TB, count int, change func(*serving.Options)) *served {
	t.Helper()
	return serveAs(t, "", count, change)
}

// serveAs is serve with a name for all clients; "": the one of the socket.
func serveAs(t testing.TB, name string, count int, change func(*serving.Options)) *served {
	t.Helper()
	return serveBeside(t, serving.Config{}, nil, name, count, change)
}

// serveBeside is serveAs with other settings, and with another front end beside; nil: there is
// none.
func serveBeside(t testing.TB, config serving.Config, other serving.Front, name string, count int,
	change func(*serving.Options)) *served {
	t.Helper()
	log := zaptest.NewLogger(t)
	config.Log = log
	all := serving.New(config)
	if other != nil {
		require.NoError(t, all.Serve(other))
	}
	s := testtool.Must(New(Options{Disks: all, Log: log, ReconnectDelay: -1}))(t)
	v := &served{Server: s, socket: filepath.Join(t.TempDir(), "nbd.sock")}
	for i := range count {
		v.disks = append(v.disks, disktest.NewFault(disktest.NewMemory(diskSize)))
		o := serving.Options{Number: uint16(i + 1), Name: "disk" + string(rune('1'+i)) + ".raw",
			Disk: v.disks[i], Identity: disk.Identity{Serial: "x", NAA: [8]byte{0x30, byte(i)}}}
		if change != nil {
			change(&o)
		}
		require.NoError(t, all.Add(o))
	}
	l := testtool.Must(net.Listen("unix", v.socket))(t)
	done := testtool.Go(func() error {
		return s.Serve(l, Portal{Name: cmp.Or(name, serving.SocketPrefix+v.socket)})
	})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, s.Shutdown(ctx))
		require.ErrorIs(t, <-done, ErrServerClosed)
		require.Zero(t, all.Memory.Used(), "memory is given back")
	})
	return v
}

func (v *served) uri(export string) string {
	return "nbd+unix:///" + export + "?socket=" + v.socket
}

// tool runs a client.
func tool(t *testing.T, name string, args ...string) string {
	t.Helper()
	testtool.Need(t, name)
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return string(out)
}

// Nbdsh is a process of libnbd's shell. Its module belongs to the Python of the distribution, which
// may not be the first one.
func Nbdsh(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	testtool.Need(t, "nbdsh")
	cmd := exec.CommandContext(t.Context(), "nbdsh", args...)
	cmd.Env = append(os.Environ(), "PATH=/usr/bin:/bin")
	return cmd
}
