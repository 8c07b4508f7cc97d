package nbd

import (
	"encoding/binary"
	"io"
	"net"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/internal/testtool/certtest"
)

// between is somebody between client and server who hides that the server has TLS: a request for
// it is refused, and everything else is passed on.
type between struct {
	port    string
	refused atomic.Int64 // requests for TLS
	passed  atomic.Int64 // other options
}

func standBetween(t *testing.T, server string) *between {
	t.Helper()
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { _ = l.Close() })
	b := &between{}
	_, b.port = testtool.Must2(net.SplitHostPort(l.Addr().String()))(t)
	go func() {
		for {
			victim, err := l.Accept()
			if err != nil {
				return
			}
			go b.relay(victim, server)
		}
	}()
	return b
}

func (b *between) relay(victim net.Conn, server string) {
	defer victim.Close()
	real, err := net.Dial("tcp", "127.0.0.1:"+server)
	if err != nil {
		return
	}
	defer real.Close()
	go func() {
		_, _ = io.Copy(victim, real)
		_ = victim.Close()
	}()
	if _, err := io.CopyN(real, victim, 4); err != nil { // the client's flags
		return
	}
	for {
		head := make([]byte, 16)
		if _, err := io.ReadFull(victim, head); err != nil {
			return
		}
		number := binary.BigEndian.Uint32(head[8:])
		if number == optStartTLS {
			b.refused.Add(1)
			_, err = victim.Write(join(u64(magicReply), u32(number), u32(repErrUnsup), u32(0)))
		} else {
			b.passed.Add(1)
			_, err = real.Write(head)
		}
		if err == nil {
			_, err = io.CopyN(real, victim, int64(binary.BigEndian.Uint32(head[12:])))
		}
		if err != nil {
			return
		}
	}
}

// TestDowngrade: whoever takes TLS out of the negotiation gets nothing of client or server, whether
// the client insists on TLS or would go on without.
func TestDowngrade(t *testing.T) {
	v, a := serve(t, 1, nil), newAuthority(t)
	port := v.serveTLS(t, a, nil)
	a.issue("client", certtest.Client("Alice"))
	testtool.Need(t, "nbdinfo")
	testtool.Need(t, "qemu-img")
	uri := func(port string) string {
		return "nbds://localhost:" + port + "/disk1.raw?tls-certificates=" + a.dir
	}
	// Nobody is between.
	require.Contains(t, tool(t, "nbdinfo", uri(port)), "TLS")
	tool(t, "qemu-img", "map", "--object", "tls-creds-x509,id=tls0,endpoint=client,dir="+a.dir,
		"--image-opts", "driver=nbd,host=localhost,port="+port+",export=disk1.raw,tls-creds=tls0")
	for name, insists := range map[string]*exec.Cmd{
		"libnbd": exec.Command("nbdinfo", "PORT"),
		"QEMU": exec.Command("qemu-img", "map", "--object",
			"tls-creds-x509,id=tls0,endpoint=client,dir="+a.dir, "--image-opts",
			"driver=nbd,host=localhost,port=PORT,export=disk1.raw,tls-creds=tls0"),
	} {
		t.Run(name, func(t *testing.T) {
			b := standBetween(t, port)
			for i, arg := range insists.Args {
				if arg == "PORT" {
					insists.Args[i] = uri(b.port)
				}
				insists.Args[i] = strings.ReplaceAll(insists.Args[i], "port=PORT", "port="+b.port)
			}
			out, err := insists.CombinedOutput()
			require.Error(t, err, "%s", out)
			require.EqualValues(t, 1, b.refused.Load(), "%s", out)
			require.Zero(t, v.Server.disks.Memory.Used())
		})
	}
	t.Run("a client that goes on without", func(t *testing.T) {
		b := standBetween(t, port)
		out, err := Nbdsh(t, "-c", `
h.set_tls(nbd.TLS_ALLOW)
h.set_tls_certificates('`+a.dir+`')
h.set_export_name('disk1.raw')
try:
    h.connect_tcp('localhost', '`+b.port+`')
    print('served')
except nbd.Error as e:
    print('refused', e.string)
`).CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "refused", "the server insists, too")
		require.Positive(t, b.passed.Load())
	})
	require.Empty(t, v.Sessions())
}

// TestTLSThatStops: a client that asks for TLS and then says nothing, or garbage, keeps nobody out
// and reaches nothing.
func TestTLSThatStops(t *testing.T) {
	v, a := serve(t, 1, nil), newAuthority(t)
	port := v.serveTLS(t, a, nil)
	good := a.issue("client", certtest.Client("Alice"))
	for range 2 * manyStrangers {
		dialPort(t, port).last(optStartTLS, nil, repAck)
	}
	a.secure(t, port, good).choose("", extended)
	garbage := map[string][]byte{
		"zeros":              make([]byte, 64<<10),
		"an option":          optionBytes(optGo, infoData("")),
		"a request":          join(u32(magicRequest), make([]byte, 24)),
		"half a record":      {22, 3, 1, 2, 0, 1},
		"a record too large": append([]byte{22, 3, 1, 0xff, 0xff}, make([]byte, 1<<16)...),
		"an alert":           {21, 3, 3, 0, 2, 2, 40},
		"no hello":           append([]byte{22, 3, 3, 0, 4}, 20, 0, 0, 0),
	}
	for name, p := range garbage {
		c := dialPort(t, port)
		c.last(optStartTLS, nil, repAck)
		_, _ = c.Write(p) // the server may end the connection before it has read all
		if tcp, ok := c.Conn.(*net.TCPConn); ok {
			_ = tcp.CloseWrite()
		}
		rest, err := io.ReadAll(c.in)
		var timeout net.Error
		require.False(t, asTimeout(err, &timeout), name)
		require.NotContains(t, string(rest), string(u64(magicReply)), name)
	}
	a.secure(t, port, good).choose("", extended)
}
