package nbd

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/internal/testtool/certtest"
	"kubevirt.io/disk/serving"
)

// TestOneClientDoesNotTakeAll: a certificate has its limit of connections, and others still come
// in. Those of the same address with another certificate are other clients.
func TestOneClientDoesNotTakeAll(t *testing.T) {
	v, a := serve(t, 2, nil), newAuthority(t)
	port := v.serveTLS(t, a, nil)
	one := a.issue("one", certtest.Client("one"))
	var all []*client
	for range 256 {
		c := a.secure(t, port, one)
		c.choose("disk1.raw", extended)
		all = append(all, c)
	}
	c := a.secure(t, port, one)
	r := c.option(optGo, infoData("disk1.raw"))
	require.Equal(t, uint32(repErrPolicy), r[0].kind)
	require.Contains(t, string(r[0].data),
		"cert:one has as many connections as one client may have")
	other := a.secure(t, port, a.issue("two", certtest.Client("two")))
	other.choose("disk2.raw", extended)
	other.writeAt(0, []byte("hello"))
	require.NoError(t, all[0].Close())
	testtool.Eventually(t, func() bool {
		return c.option(optGo, infoData("disk1.raw"))[0].kind == repInfo
	}, "there is room again")
}

// TestFailedGoLeavesNothing: a connection whose GO fails after it has taken the disk ends, and with
// it what it has taken.
func TestFailedGoLeavesNothing(t *testing.T) {
	v := serve(t, 1, nil)
	open := func(session string) *client {
		c := v.hello(t)
		require.Equal(t, uint32(repAck), c.option(optStructuredReply, nil)[0].kind)
		require.Len(t, c.option(optSetMeta, metaData("", sessionContext+session)), 2)
		c.structured = true
		return c
	}
	first := open("a")
	first.info(first.option(optGo, infoData("")))
	first.writeAt(0, []byte("first"))
	late := open("a")
	require.NoError(t, first.Close())
	testtool.Eventually(t, func() bool { return len(v.Sessions()) == 0 }, "the first one has gone")
	second := open("b")
	second.info(second.option(optGo, infoData("")))
	second.writeAt(0, []byte("second")) // now the session a is over

	r := late.option(optGo, infoData(""))
	require.Equal(t, uint32(repErrPolicy), r[0].kind)
	require.Contains(t, string(r[0].data), errSuperseded.Error())
	late.ended()
	testtool.Eventually(t, func() bool { return len(v.Sessions()) == 1 }, "the late one has gone")
	second.alive()
}

// TestStrangersInTheLog: clients without a certificate cost a few lines of the log a minute,
// however many there are.
func TestStrangersInTheLog(t *testing.T) {
	log, lines := observer.New(zap.WarnLevel)
	v, a := serve(t, 1, nil), newAuthority(t)
	v.log = zap.New(log)
	port := v.serveTLS(t, a, nil)
	for range 20 {
		c := dialPort(t, port)
		c.send(optionBytes(optExportName, nil)) // in plain text: the server ends the connection
		c.ended()
	}
	strangers := func() (n int) {
		for _, l := range lines.All() {
			if strings.Contains(l.Message, "ended") {
				n++
			}
		}
		return n
	}
	testtool.Eventually(t, func() bool {
		return len(v.conns.All(func(*conn) bool { return true })) == 0
	}, "all of them are gone")
	// The first failures have a line each, and then one a minute.
	require.Equal(t, 3, strangers())
}

// TestClientsThatTakeNothing: a client with many connections that asks for data and takes none of
// it has its part of the memory, with TLS or without. Others still get theirs at once.
func TestClientsThatTakeNothing(t *testing.T) {
	const limit, conns = 16 << 20, 100
	for name, secure := range map[string]bool{"plain": false, "TLS": true} {
		for mode, flags := range map[int]uint16{compact: 0, structured: 0, extended: cmdFlagDF} {
			t.Run(fmt.Sprint(name, mode), func(t *testing.T) {
				v := serveBeside(t, serving.Config{Memory: limit}, nil, "", 1,
					func(o *serving.Options) { o.Access = serving.AccessWriteShared })
				a := newAuthority(t)
				open := v.portal(t, a, secure)
				one := a.issue("one", certtest.Client("one"))
				two := a.issue("two", certtest.Client("two"))
				other := v.portal(t, a, secure)
				good := other(two)
				good.info(good.option(optGo, infoData("")))
				good.writeAt(0, bytes.Repeat([]byte{1}, 1<<20))
				for range conns {
					c := open(one)
					if mode != compact {
						number := uint32(optStructuredReply)
						if mode == extended {
							number = optExtendedHeaders
						}
						c.option(number, nil)
						c.structured, c.extended = true, mode == extended
					}
					c.info(c.option(optGo, infoData("")))
					for range 16 {
						c.send(c.request(cmdRead, flags, 0, chunk, nil))
					}
				}
				used := v.Server.disks.Memory.Used
				still := func() (n int) {
					return len(v.conns.All(func(c *conn) bool {
						return c.tx.WriteSince.Load() != 0
					}))
				}
				testtool.Eventually(t, func() bool { return used() > limit*3/4 && still() > 0 },
					"the memory is in use: %d", func() any { return used() })
				// beyond the limit: what all clients have their part of, receive buffers, and
				// what each connection has in hand
				const beyond = limit/4 + limit/4 + conns*(poorPiece+tlsCost)
				for range 100 {
					good.readAt(0, chunk)
					require.Less(t, used(), int64(limit+beyond))
				}
			})
		}
	}
}

// portal serves at another Unix socket, and returns what connects a client there, with its
// certificate if that is secure.
func (v *served) portal(t *testing.T, a *authority, secure bool) func(tls.Certificate) *client {
	t.Helper()
	path := filepath.Join(t.TempDir(), "nbd.sock")
	l := testtool.Must(net.Listen("unix", path))(t)
	portal := Portal{Name: serving.SocketPrefix + path}
	if secure {
		a.issueServer()
		portal.TLS = testtool.Must(LoadTLS(a.file("server-cert.pem"), a.file("server-key.pem"),
			a.file("ca-cert.pem"), nil))(t)
	}
	go func() { _ = v.Serve(l, portal) }()
	return func(cert tls.Certificate) *client {
		t.Helper()
		c := greet(t, testtool.Must(net.Dial("unix", path))(t))
		c.send(u32(flagFixedNewstyle | flagNoZeroes))
		if secure {
			c.last(optStartTLS, nil, repAck)
			s := tls.Client(c.Conn, &tls.Config{RootCAs: a.pool, ServerName: "localhost",
				Certificates: []tls.Certificate{cert}})
			require.NoError(t, s.Handshake())
			c.Conn = s
			c.in.Reset(s)
		}
		return c
	}
}

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
