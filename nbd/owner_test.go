package nbd_test

import (
	"context"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/nbd"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target"
	tt "kubevirt.io/disk/target/targettest"
)

// both serves disk 1 by iSCSI and by NBD.
type both struct {
	t         *testing.T
	disks     *serving.Disks
	server    *nbd.Server
	iscsi     net.Addr
	uri, peer string // of NBD
}

func serveBoth(t *testing.T, access serving.AccessMode) *both {
	t.Helper()
	all := serving.New(serving.Config{})
	iscsi := testtool.Must(target.New(target.Options{Disks: all}))(t)
	server := testtool.Must(nbd.New(nbd.Options{Disks: all}))(t)
	require.NoError(t, all.Add(serving.Options{Number: 1, Name: "d",
		Disk: disktest.NewMemory(1 << 20), Access: access,
		Identity: disk.Identity{Serial: "x", NAA: [8]byte{0x30}}}))
	tcp := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	go func() { _ = iscsi.Serve(tcp) }()
	socket := filepath.Join(t.TempDir(), "nbd.sock") // its directory has capitals
	unix := testtool.Must(net.Listen("unix", socket))(t)
	peer := serving.SocketPrefix + socket
	go func() { _ = server.Serve(unix, nbd.Portal{Name: peer}) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, server.Shutdown(ctx))
		require.NoError(t, iscsi.Close())
	})
	return &both{t, all, server, tcp.Addr(), "nbd+unix:///d?socket=" + socket, peer}
}

// shell runs a process with libnbd. Its words say what it saw.
func (b *both) shell(script string) string {
	b.t.Helper()
	out, err := nbd.Nbdsh(b.t, "-u", b.uri, "-c", script).CombinedOutput()
	require.NoError(b.t, err, "%s", out)
	return string(out)
}

// everyWay is a script for nbdsh that says which requests are refused with EPERM.
const everyWay = `
import errno
for name, f in (('read', lambda: h.pread(512, 0)), ('cache', lambda: h.cache(512, 0)),
                ('write', lambda: h.pwrite(b'x' * 512, 0)), ('zero', lambda: h.zero(512, 0)),
                ('trim', lambda: h.trim(4096, 0))):
    try:
        f()
    except nbd.Error as e:
        assert e.errnum == errno.EPERM, e
        print(name, end=' ')
`

// TestReservationsBindClients: a persistent reservation of an initiator holds for clients of NBD,
// too, which cannot register for it.
func TestReservationsBindClients(t *testing.T) {
	b := serveBoth(t, serving.AccessWriteShared)
	sess := tt.MustLogin(t, b.iscsi, tt.LoginOptions{Initiator: "iqn.2026-01.test:initiator"}, 1)
	out := func(p tt.Persist) { sess.MustGood(t, tt.PersistOut(1, p)) }
	out(tt.Persist{Action: tt.PersistRegister, ActionKey: 7})
	require.Empty(t, b.shell(everyWay), "a registration alone keeps nobody out")
	for kind, refused := range map[uint8]string{
		tt.WriteExclusive:        "write zero trim ",
		tt.ExclusiveAccess:       "read cache write zero trim ",
		tt.WriteExclusiveRO:      "write zero trim ",
		tt.ExclusiveAccessShared: "read cache write zero trim ",
	} {
		out(tt.Persist{Action: tt.PersistReserve, Type: kind, Key: 7})
		require.Equal(t, refused, b.shell(everyWay), "type %d", kind)
		_ = sess.Conn.Close() // it holds without a session
		require.Equal(t, refused, b.shell(everyWay), "type %d", kind)
		sess = tt.MustLogin(t, b.iscsi, tt.LoginOptions{Initiator: "iqn.2026-01.test:initiator"}, 1)
		out(tt.Persist{Action: tt.PersistRelease, Type: kind, Key: 7})
		require.Empty(t, b.shell(everyWay))
	}
	out(tt.Persist{Action: tt.PersistRegister, Key: 7})
	sess.MustGood(t, tt.Reserve6(1))
	require.Equal(t, "read cache write zero trim ", b.shell(everyWay))
	_ = sess.Conn.Close()
	testtool.Eventually(t, func() bool { return b.shell(everyWay) == "" },
		"the session's reservation ends")
}

// TestOneOwnerOfBothProtocols has an initiator and processes of NBD use one write-exclusive disk.
func TestOneOwnerOfBothProtocols(t *testing.T) {
	b := serveBoth(t, serving.AccessWriteExclusive)
	all, server, uri, peer, shell := b.disks, b.server, b.uri, b.peer, b.shell
	const try = `
try:
    h.pwrite(b'x' * 512, 0)
    print('written')
except nbd.Error as e:
    print(e.errno)
`
	const initiator = "iqn.2026-01.test:initiator"
	block := make([]byte, 512)
	sess := tt.MustLogin(t, b.iscsi, tt.LoginOptions{Initiator: initiator}, 1)
	sess.MustGood(t, tt.Write10(1, 0, block))
	require.Contains(t, shell(try), "EPERM")

	// to NBD, while its process has a connection, and back
	require.NoError(t, all.Admit(1, peer, time.Time{}))
	stay := nbd.Nbdsh(t, "-u", uri, "-c", try, "-c", "import time\ntime.sleep(600)")
	require.NoError(t, stay.Start())
	gone := func() {
		_ = stay.Process.Kill()
		_ = stay.Wait()
	}
	defer gone()
	wrote := func() bool {
		s := server.Sessions()
		return len(s) == 1 && s[0].BytesWritten > 0
	}
	testtool.Eventually(t, wrote,
		"the first process writes: %+v", func() any { return server.Sessions() })
	_, err := all.RemoveUnused(1)
	require.Equal(t, &serving.InUseError{LUN: 1, Initiators: []string{initiator, peer}}, err)
	former := testtool.Must(all.HandOver(1))(t)
	require.Equal(t, initiator, former)
	sess.MustFail(t, tt.Write10(1, 0, block), "status 0x18")
	require.Contains(t, shell(try), "EPERM", "another process at the same socket")
	gone()
	testtool.Eventually(t, func() bool { return len(server.Sessions()) == 0 },
		"its session ends: %+v", func() any { return server.Sessions() })
	require.Contains(t, shell(try), "written", "the first process has gone")

	require.NoError(t, all.Admit(1, initiator, time.Time{}))
	sess.MustGood(t, tt.Write10(1, 0, block))
	former = testtool.Must(all.HandOver(1))(t)
	require.Equal(t, peer, former)
	require.Contains(t, shell(try), "EPERM", "it is fenced")
	sess.MustGood(t, tt.Write10(1, 0, block))
}
