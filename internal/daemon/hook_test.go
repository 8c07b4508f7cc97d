package daemon

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// attended is a launcher whose machine has that many connections.
type attended struct {
	*Launcher
	connections atomic.Int64
	terminate   func() // SIGTERM
	longer      context.Context
	logs        *observer.ObservedLogs
}

func attend(t *testing.T, connections int64) *attended {
	t.Helper()
	core, logs := observer.New(zap.InfoLevel)
	a := &attended{logs: logs}
	a.connections.Store(connections)
	a.Launcher = &Launcher{log: zap.New(core), ended: make(chan struct{}),
		refused: make(chan struct{}), machines: func() int { return int(a.connections.Load()) }}
	ctx, terminate := context.WithCancel(t.Context())
	longer, stop := a.attend(ctx)
	a.terminate, a.longer = terminate, longer
	t.Cleanup(stop)
	t.Cleanup(terminate)
	return a
}

// TestAttend is about what comes first: SIGTERM, the launcher's word, or the end of QEMU. The clock
// is not the real one: it moves when all wait.
func TestAttend(t *testing.T) {
	for name, test := range map[string]func(*testing.T){
		"the word, without QEMU": func(t *testing.T) {
			a := attend(t, 0)
			synctest.Wait()
			require.NoError(t, a.longer.Err())
			close(a.ended)
			<-a.longer.Done()
		},
		"SIGTERM, without QEMU": func(t *testing.T) {
			a := attend(t, 0)
			a.terminate()
			synctest.Wait()
			require.NoError(t, a.longer.Err(), "it may be about to connect")
			<-a.longer.Done()
		},
		"SIGTERM before the disks": func(t *testing.T) {
			a := attend(t, -1)
			a.terminate()
			synctest.Wait()
			require.Error(t, a.longer.Err())
		},
		"SIGTERM, the word, QEMU": func(t *testing.T) {
			a := attend(t, 1)
			a.terminate()
			synctest.Wait()
			close(a.ended)
			synctest.Wait()
			require.NoError(t, a.longer.Err())
			a.connections.Store(0)
			<-a.longer.Done()
			require.Zero(t, a.logs.FilterLevelExact(zap.WarnLevel).Len())
		},
		"the word, SIGTERM, QEMU": func(t *testing.T) {
			a := attend(t, 2)
			close(a.ended)
			a.terminate()
			synctest.Wait()
			require.NoError(t, a.longer.Err())
			a.connections.Store(0)
			<-a.longer.Done()
			require.Zero(t, a.logs.FilterLevelExact(zap.WarnLevel).Len())
		},
		"the word, and somebody who stays": func(t *testing.T) {
			a := attend(t, 1)
			close(a.ended)
			<-a.longer.Done()
			require.Equal(t, 1, a.logs.FilterMessageSnippet("somebody still uses").Len())
		},
		"a refused machine": func(t *testing.T) {
			a := attend(t, 0)
			began := time.Now()
			close(a.refused)
			<-a.longer.Done()
			require.GreaterOrEqual(t, time.Since(began), hookRefused, "QEMU is told why")
		},
		"a refused machine, SIGTERM": func(t *testing.T) {
			a := attend(t, 0)
			began := time.Now()
			close(a.refused)
			a.terminate()
			<-a.longer.Done()
			require.Less(t, time.Since(began), hookRefused)
		},
		"an end for another reason": func(t *testing.T) {
			a := attend(t, 1)
			_, stop := a.attend(t.Context())
			stop()
			synctest.Wait()
		},
	} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, test) })
	}
}

// TestLauncherEnds: a launcher that ends without a word is missed, but only if it was there.
func TestLauncherEnds(t *testing.T) {
	dir := t.TempDir()
	socket := testtool.Must(net.Listen("unix", filepath.Join(dir, "launcher-init-sock")))(t)
	defer socket.Close()
	synctest.Test(t, func(t *testing.T) {
		l := NewLauncher(new(options.Hook), nil)
		l.sockets = filepath.Join(t.TempDir(), "of another pod")
		go l.watch()
		time.Sleep(time.Minute)
		require.False(t, l.Ended(), "it may be to come")
		l.Close()

		var connections atomic.Int64
		l = NewLauncher(new(options.Hook), nil)
		l.sockets, l.machines = dir, func() int { return int(connections.Load()) }
		go l.watch()
		time.Sleep(2 * hookLook)
		require.False(t, l.Ended())
		var limit unix.Rlimit
		require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
		require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Max: limit.Max}))
		time.Sleep(2 * hookLook) // nobody can look
		require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
		connections.Store(1)
		require.NoError(t, socket.Close())
		time.Sleep(time.Minute)
		require.False(t, l.Ended(), "QEMU uses a disk, so its launcher is there")
		connections.Store(0)
		begin := time.Now()
		<-l.ended
		require.GreaterOrEqual(t, time.Since(begin), (hookMissed-1)*hookLook)
	})
}

// TestClientOfALauncher: the socket of a connection is listed with the path of the one that it was
// accepted from, among those of the client, which may be another launcher's.
func TestClientOfALauncher(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "launcher-sock")
	socket := testtool.Must(net.Listen("unix", path))(t)
	c := testtool.Must(net.Dial("unix", path))(t)
	defer c.Close()
	accepted := testtool.Must(socket.Accept())(t)
	defer accepted.Close()
	listed := func() []byte {
		sockets := testtool.Must(os.ReadFile("/proc/self/net/unix"))(t)
		require.Contains(t, string(sockets), " "+path)
		return sockets
	}
	l := &Launcher{sockets: dir}
	require.True(t, l.listens(listed()))
	socket.(*net.UnixListener).SetUnlinkOnClose(false)
	require.NoError(t, socket.Close())
	require.False(t, l.listens(listed()))
}

// TestRefusalIsKept: a hook that was started again after it has refused a machine for good ends as
// the first one would have.
func TestRefusalIsKept(t *testing.T) {
	hook := &options.Hook{Dir: t.TempDir()}
	own := hook.NBD()
	require.NoError(t, os.MkdirAll(filepath.Dir(own.Socket), 0o755))
	require.NoError(t, os.WriteFile(own.Answer(), []byte(answerRefused+"it moves"), 0o600))
	d := &Daemon{inUse: serving.New(serving.Config{}), launcher: NewLauncher(hook, nil)}
	d.opt.Hook, d.opt.NBD = hook, []options.NBDPortal{own}
	require.NoError(t, d.closeGate())
	require.EqualError(t, d.gate.refused, "it moves")
	<-d.launcher.refused
}
