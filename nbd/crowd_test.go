package nbd

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

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
