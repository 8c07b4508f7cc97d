package nbd

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// watched is a server with one disk, at a Unix socket and at a TCP port, and its log.
func watched(t *testing.T, delay time.Duration) (v *served, port string,
	logs *observer.ObservedLogs) {
	t.Helper()
	core, logs := observer.New(zapcore.InfoLevel)
	all := serving.New(serving.Config{})
	s := testtool.Must(New(Options{Disks: all, Log: zap.New(core), ReconnectDelay: delay}))(t)
	require.NoError(t, all.Add(serving.Options{Number: 1, Name: "d",
		Disk: disktest.NewMemory(diskSize), Identity: disk.Identity{NAA: [8]byte{0x30}}}))
	v = &served{Server: s, socket: filepath.Join(t.TempDir(), "nbd.sock")}
	l := testtool.Must(net.Listen("unix", v.socket))(t)
	go s.Serve(l, Portal{Name: "unix:" + v.socket})
	tcp := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	go s.Serve(tcp, Portal{Name: "tcp:" + tcp.Addr().String()})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, s.Shutdown(ctx))
	})
	return v, tcp.Addr().String(), logs
}

// us is what the server takes a client of this process for.
func us() string { return fmt.Sprintf("process %d", os.Getpid()) }

// TestHotClient: a client that comes back at once after each failure fills no log. Others at its
// side are not slowed down, and when it has learnt the protocol it is served.
func TestHotClient(t *testing.T) {
	for name, spoil := range map[string]func(c *client){
		"garbage": func(c *client) {
			c.send(bytes.Repeat([]byte("garbage "), 4))
			c.ended()
		},
		"no use for the answer": func(c *client) { require.NoError(t, c.Close()) },
	} {
		t.Run(name, func(t *testing.T) {
			v, port, logs := watched(t, time.Millisecond)
			for range 100 {
				spoil(v.open(t, "", extended))
			}
			testtool.Eventually(t, func() bool {
				_, slowed := v.conns.Delay(us(), time.Now())
				return slowed && len(v.Sessions()) == 0
			}, "it is slowed down")
			require.LessOrEqual(t, logs.FilterMessage("NBD connection ended").Len(), 3)
			// The next client may come before a failure is counted.
			require.Less(t, logs.FilterMessage("NBD client").Len(), 20)
			other := greet(t, testtool.Must(net.Dial("tcp", port))(t))
			other.send(u32(flagFixedNewstyle | flagNoZeroes))
			other.choose("", structured)
			other.alive()
			require.Equal(t, 1, logs.FilterMessage("NBD client").
				FilterField(zap.String("client", "tcp:"+port)).Len())
			require.NoError(t, other.Close())
			testtool.Eventually(t, func() bool { return len(v.Sessions()) == 0 },
				"the disk is free for another client")
			v.open(t, "", extended).alive()
		})
	}
}

// TestWaitingClient: a client that must wait long gets no greeting, and the server ends without it.
func TestWaitingClient(t *testing.T) {
	v, _, _ := watched(t, time.Hour)
	for range 30 {
		v.conns.Failed(us(), "test")
	}
	nc := testtool.Must(net.Dial("unix", v.socket))(t)
	defer nc.Close()
	testtool.Eventually(t, func() bool { return v.conns.Strangers() == 1 }, "it is accepted")
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	require.NoError(t, v.Shutdown(ctx))
	require.Empty(t, testtool.Must(io.ReadAll(nc))(t))
}

// TestHotServer: the log has it once a minute that connections to a server break at once, again and
// again. The disk works when one lasts.
func TestHotServer(t *testing.T) {
	n := relay(t, serve(t, 1, nil))
	core, logs := observer.New(zapcore.InfoLevel)
	r, err := OpenRemote(t.Context(), RemoteOptions{Address: serving.SocketPrefix + n.socket,
		Log: zap.New(core), ReconnectDelay: time.Millisecond})
	require.NoError(t, err)
	t.Cleanup(func() { _ = r.Close() })
	for range 50 {
		former := r.now()
		n.cut()
		testtool.Eventually(t, func() bool {
			now := r.now()
			return now != nil && now != former
		}, "it is connected again")
	}
	_, slowed := r.breaks.Delay("", time.Now())
	require.True(t, slowed)
	require.Equal(t, freeBreaks, logs.FilterMessageSnippet("is lost").Len())
	require.Less(t, logs.FilterMessageSnippet("connected again").Len(), freeBreaks)
	require.NoError(t, r.Flush())
}

// freeBreaks is how many of them have a line of their own: two, and one for a minute of others.
const freeBreaks = 3
