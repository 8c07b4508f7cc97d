package daemon

import (
	"bytes"
	"context"
	"io"
	"net"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/nbd"
	"kubevirt.io/disk/serving"
)

// passes connects clients of a socket to another one, until it is cut. Then it refuses them, until
// it is mended.
type passes struct {
	t    *testing.T
	path string
	to   string
	l    net.Listener
	all  chan net.Conn
}

func pass(t *testing.T, to string) *passes {
	p := &passes{t: t, path: filepath.Join(t.TempDir(), "pass.sock"), to: to}
	p.mend()
	return p
}

func (p *passes) mend() {
	l := testtool.Must(net.Listen("unix", p.path))(p.t)
	p.t.Cleanup(func() { _ = l.Close() })
	all := make(chan net.Conn, 100)
	p.l, p.all = l, all
	go func() {
		defer close(all)
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("unix", p.to)
			if err != nil {
				_ = in.Close()
				continue
			}
			all <- in
			go func() {
				_, _ = io.Copy(out, in)
				_ = out.Close()
			}()
			go func() {
				_, _ = io.Copy(in, out)
				_ = in.Close()
			}()
		}
	}()
}

func (p *passes) cut() {
	_ = p.l.Close()
	for in := range p.all {
		_ = in.Close()
	}
}

// TestRevertWhileARelayIsAway: a disk gets the content of a snapshot while a relay is away. The
// relay does not go on with it, and the next client does. A relay that only lost its connection
// goes on.
func TestRevertWhileARelayIsAway(t *testing.T) {
	opt := testOptions(t, "a.raw")
	socket := filepath.Join(t.TempDir(), "nbd.sock")
	opt.NBD = []options.NBDPortal{{Socket: socket}}
	d := launch(t, opt)
	d.awaitReady()
	p := pass(t, socket)
	open := func() *nbd.Remote {
		r := testtool.Must(nbd.OpenRemote(t.Context(), nbd.RemoteOptions{Export: "a.raw",
			Address: serving.SocketPrefix + p.path}))(t)
		t.Cleanup(func() { _ = r.Close() })
		return r
	}
	away := func() {
		p.cut()
		testtool.Eventually(t, func() bool { return len(d.nbd.Sessions()) == 0 })
	}
	r := open()
	content := func(b byte) []byte { return bytes.Repeat([]byte{b}, 4096) }
	write := func(b byte) {
		require.NoError(t, testtool.Err(r.WriteAt(t.Context(), content(b), 0)))
	}
	write(1)
	s := d.disks.Served()[0]
	require.NoError(t, d.disks.TakeSnapshot(context.Background(), "s", s))
	away()
	p.mend()
	write(2)
	away()
	require.NoError(t, d.disks.Revert(context.Background(), s, "s"))
	p.mend()
	got := make([]byte, 4096)
	_, err := r.ReadAt(t.Context(), got, 0)
	require.ErrorIs(t, err, disk.ErrFailed)
	require.ErrorContains(t, err, "another content than before")
	require.NoError(t, r.Close())
	testtool.Eventually(t, func() bool { return len(d.nbd.Sessions()) == 0 },
		"what passes connections on has passed on the end")
	require.NoError(t, testtool.Err(open().ReadAt(t.Context(), got, 0)))
	require.Equal(t, content(1), got)
}

// TestRelayStopsWithoutItsServer: a relay that has acknowledged nothing does not wait for a server
// that is away when it stops.
func TestRelayStopsWithoutItsServer(t *testing.T) {
	opt := testOptions(t, "a.raw")
	socket := filepath.Join(t.TempDir(), "nbd.sock")
	opt.NBD = []options.NBDPortal{{Socket: socket}}
	start(t, opt)
	p := pass(t, socket)
	opt = testOptions(t)
	opt.Remotes.Disks = []options.Remote{{Address: serving.SocketPrefix + p.path, Export: "a.raw"}}
	relay := start(t, opt)
	inst := relay.disks.Served()[0].Instance()
	require.NoError(t, testtool.Err(inst.ReadAt(t.Context(), make([]byte, 4096), 0)))
	p.cut()
	relay.stop()
	require.NoError(t, <-relay.ended)
}

// TestMemoryOfRelayedDisks: what is kept for disks of other servers is a part of the limit.
func TestMemoryOfRelayedDisks(t *testing.T) {
	for disks, want := range map[int][2]int64{
		0: {64 << 20, 0}, 1: {48 << 20, 16 << 20}, 2: {32 << 20, 16 << 20}, 8: {32 << 20, 4 << 20},
	} {
		opt := options.Options{Memory: 64 << 20}
		opt.Remotes.Disks = make([]options.Remote, disks)
		requests, each := opt.MemoryFor()
		require.Equal(t, want, [2]int64{requests, int64(each)}, "%d disks", disks)
	}
}
