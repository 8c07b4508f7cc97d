package nbd

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"io"
	mathrand "math/rand/v2"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/internal/testtool/certtest"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// authority signs certificates, in files that are called as libnbd and QEMU want it.
type authority struct {
	t    testing.TB
	pool *x509.CertPool // of its certificate
	dir  string
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir()}
	require.NoError(t, certtest.Authority(a.file("ca-cert.pem"), a.file("ca-key.pem")))
	a.pool = testtool.Must(certtest.Pool(a.file("ca-cert.pem")))(t)
	return a
}

// issue writes NAME-cert.pem and NAME-key.pem.
func (a *authority) issue(name string, change certtest.Change) tls.Certificate {
	a.t.Helper()
	cert, key := a.file(name+"-cert.pem"), a.file(name+"-key.pem")
	require.NoError(a.t, certtest.Sign(a.file("ca-cert.pem"), a.file("ca-key.pem"), cert, key,
		change))
	return testtool.Must(tls.LoadX509KeyPair(cert, key))(a.t)
}

func (a *authority) file(name string) string { return filepath.Join(a.dir, name) }

func (a *authority) issueServer() {
	a.issue("server", func(c *x509.Certificate) {
		c.Subject.CommonName = "localhost" // QEMU wants one
		c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	})
}

// serveTLS serves the disks with certificates of a, and returns the port.
func (v *served) serveTLS(t testing.TB, a *authority, log *zap.Logger) string {
	t.Helper()
	a.issueServer()
	config := testtool.Must(LoadTLS(a.file("server-cert.pem"), a.file("server-key.pem"),
		a.file("ca-cert.pem"), log))(t)
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	portal := Portal{Name: serving.AddressPrefix + l.Addr().String(), TLS: config}
	go func() { _ = v.Serve(l, portal) }()
	_, port := testtool.Must2(net.SplitHostPort(l.Addr().String()))(t)
	return port
}

func dialPort(t testing.TB, port string) *client {
	t.Helper()
	c := greet(t, testtool.Must(net.Dial("tcp", "127.0.0.1:"+port))(t))
	c.send(u32(flagFixedNewstyle | flagNoZeroes))
	return c
}

// secure is a client in TLS. The server may still refuse its certificate.
func (a *authority) secure(t testing.TB, port string, certs ...tls.Certificate) *client {
	t.Helper()
	c := dialPort(t, port)
	c.last(optStartTLS, nil, repAck)
	nc := tls.Client(c.Conn, &tls.Config{RootCAs: a.pool, ServerName: "localhost",
		Certificates: certs})
	require.NoError(t, nc.Handshake())
	c.Conn = nc
	c.in.Reset(nc)
	return c
}

// TestCertificates: a client goes by the name in its certificate, and has to have a good one.
func TestCertificates(t *testing.T) {
	v, a := serve(t, 1, nil), newAuthority(t)
	port := v.serveTLS(t, a, nil)
	uri := testtool.Must(url.Parse("spiffe://cluster/ns/a/vm/X"))(t)
	for name, change := range map[string]func(*x509.Certificate){
		"cert:Alice": certtest.Client("Alice"),
		"cert:vm.example": func(c *x509.Certificate) {
			certtest.Client("Alice")(c)
			c.DNSNames = []string{"vm.example", "b.example"}
		},
		"cert:spiffe://cluster/ns/a/vm/X": func(c *x509.Certificate) {
			certtest.Client("Alice")(c)
			c.DNSNames, c.URIs = []string{"vm.example"}, []*url.URL{uri}
		},
	} {
		c := a.secure(t, port, a.issue("client", change))
		c.last(optStartTLS, nil, repErrInvalid)
		c.choose("disk1.raw", structured)
		c.writeAt(0, []byte("hello"))
		require.Equal(t, []byte("hello"), c.readAt(0, 5))
		require.Equal(t, name, v.Sessions()[0].Initiator)
		require.Contains(t, v.Sessions()[0].Remote, "127.0.0.1:")
		require.NoError(t, v.Server.disks.Admit(1, name+"2", time.Time{}), "capitals are kept")
		require.NoError(t, testtool.Err(v.Server.disks.Withdraw(1)))
		_ = c.Close()
		testtool.Eventually(t, func() bool { return len(v.Sessions()) == 0 },
			"the session ends: %+v", func() any { return v.Sessions() })
	}
	for name, certs := range map[string][]tls.Certificate{
		"none":     nil,
		"stranger": {newAuthority(t).issue("client", certtest.Client("Alice"))},
		"expired": {a.issue("client", func(c *x509.Certificate) {
			certtest.Client("Alice")(c)
			c.NotAfter = time.Now().Add(-time.Minute)
		})},
		"server's": {a.issue("client", func(c *x509.Certificate) {
			c.Subject.CommonName = "Alice"
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		})},
		"no name": {a.issue("client", certtest.Client(""))},
		"a space": {a.issue("client", certtest.Client("Alice B"))},
		"too long": {a.issue("client", func(c *x509.Certificate) {
			certtest.Client("")(c)
			long := strings.Repeat("y", 300)
			c.URIs = []*url.URL{{Scheme: "spiffe", Host: "x", Path: "/" + long}}
		})},
	} {
		t.Run(name, func(t *testing.T) {
			c := a.secure(t, port, certs...)
			_, _ = c.Write(optionBytes(optList, nil))
			rest, err := io.ReadAll(c.in)
			require.Empty(t, rest)
			var timeout net.Error
			require.False(t, asTimeout(err, &timeout))
		})
	}
}

// TestPlainTextAtATLSPortal: nothing works without TLS, and nothing that came before it counts.
func TestPlainTextAtATLSPortal(t *testing.T) {
	v, a := serve(t, 1, nil), newAuthority(t)
	port := v.serveTLS(t, a, nil)
	c := dialPort(t, port)
	for number, data := range map[uint32][]byte{optList: nil, optStructuredReply: nil,
		optExtendedHeaders: nil, optInfo: infoData(""), optGo: infoData(""),
		optSetMeta: metaData("", "base:allocation"), optListMeta: metaData(""), 99: nil} {
		c.last(number, data, repErrTLSRequired)
	}
	c.last(optAbort, nil, repAck)
	c.ended()
	c = dialPort(t, port)
	c.send(optionBytes(optExportName, nil))
	c.ended()
	c = dialPort(t, port) // somebody between puts a request into the plain text
	c.send(optionBytes(optStartTLS, nil), optionBytes(optGo, infoData("")))
	c.ended()
	c = dialPort(t, port)
	c.last(optStartTLS, nil, repAck)
	c.send(optionBytes(optGo, infoData("")))
	rest, _ := io.ReadAll(c.in)
	require.NotContains(t, string(rest), string(u64(magicReply)))
	require.Empty(t, v.Sessions())
}

// TestTLSFilesAreReadAgain: changed files count at the next connection, broken ones do not.
func TestTLSFilesAreReadAgain(t *testing.T) {
	v, a := serve(t, 1, nil), newAuthority(t)
	core, logs := observer.New(zap.InfoLevel)
	port := v.serveTLS(t, a, zap.New(core))
	good := a.issue("client", certtest.Client("a"))
	a.secure(t, port, good).choose("", extended)
	was := testtool.Must(os.ReadFile(a.file("server-cert.pem")))(t)
	for times := range 2 {
		require.NoError(t, os.WriteFile(a.file("server-cert.pem"), []byte("broken"), 0o600))
		a.secure(t, port, good).choose("", extended)
		a.secure(t, port, good).choose("", extended)
		require.Equal(t, times+1, logs.FilterMessageSnippet("cannot be used").Len(), "said once")
		require.NoError(t, os.WriteFile(a.file("server-cert.pem"), was, 0o600))
		a.secure(t, port, good).choose("", extended)
	}
	a.issue("server", func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) })
	c := dialPort(t, port)
	c.last(optStartTLS, nil, repAck)
	require.Error(t, tls.Client(c.Conn, &tls.Config{RootCAs: a.pool,
		ServerName: "localhost"}).Handshake())
	require.Equal(t, 1, logs.FilterMessageSnippet("has expired, so clients refuse it").Len())
	a.issueServer()
	other := newAuthority(t)
	both := testtool.Must(os.ReadFile(other.file("ca-cert.pem")))(t)
	require.NoError(t, os.WriteFile(a.file("ca-cert.pem"), both, 0o600))
	a.secure(t, port, other.issue("client", certtest.Client("b"))).choose("", extended)
	require.Equal(t, 2, logs.FilterMessageSnippet("read again").Len())
	c = a.secure(t, port, good)
	_, _ = c.Write(optionBytes(optList, nil))
	rest, _ := io.ReadAll(c.in)
	require.Empty(t, rest, "the former authority counts no more")

	_, err := LoadTLS(a.file("server-cert.pem"), a.file("client-key.pem"), a.file("ca-cert.pem"),
		nil)
	require.ErrorContains(t, err, "server-cert.pem")
	_, err = LoadTLS(a.file("server-cert.pem"), a.file("server-key.pem"), a.file("server-key.pem"),
		nil)
	require.ErrorContains(t, err, "has no certificate")
}

// TestTLSCarriesData moves data in pieces that are smaller and larger than what is sent together,
// many requests at once. When the client is done, the server ends TLS before the connection, as the
// specification asks for: without that, a client cannot know that nothing was cut off.
func TestTLSCarriesData(t *testing.T) {
	v, a := serve(t, 1, nil), newAuthority(t)
	port := v.serveTLS(t, a, nil)
	good := a.issue("client", certtest.Client("a"))
	c := a.secure(t, port, good)
	c.choose("", extended)
	want := make([]byte, diskSize)
	random := mathrand.NewChaCha8([32]byte{1})
	_, _ = random.Read(want)
	for off, length := uint64(0), uint64(1); off < diskSize; length *= 3 {
		length = min(length, diskSize-off, 300<<10)
		c.writeAt(off, want[off:off+length])
		off += length
	}
	const piece = 64 << 10
	lengths := map[uint64]uint64{}
	for off := uint64(0); off < diskSize; off += piece {
		p := c.request(cmdRead, 0, off, piece, nil)
		lengths[binary.BigEndian.Uint64(p[8:])] = off
		c.send(p)
	}
	for range len(lengths) {
		cookie, got := c.answer(func(uint64) (uint16, uint64) { return cmdRead, piece })
		off := lengths[cookie]
		require.True(t, bytes.Equal(want[off:off+piece], c.content(got, off, piece)))
	}
	c.send(c.request(cmdDisconnect, 0, 0, 0, nil))
	rest := testtool.Must(io.ReadAll(c.Conn.(*tls.Conn).NetConn()))(t)
	require.NotEmpty(t, rest, "TLS ends before the connection")
}

// TestNamesThatReadTheSame: a common name, a DNS name and a URI that read the same are not one
// client. Who is there first keeps the name, and the others are told.
func TestNamesThatReadTheSame(t *testing.T) {
	v, a := serve(t, 1, nil), newAuthority(t)
	port := v.serveTLS(t, a, nil)
	forms := map[string]tls.Certificate{
		"common name": a.issue("cn", certtest.Client("vm1")),
		"DNS name": a.issue("dns", func(c *x509.Certificate) {
			certtest.Client("x")(c)
			c.DNSNames = []string{"vm1"}
		}),
		"URI": a.issue("uri", func(c *x509.Certificate) {
			certtest.Client("x")(c)
			c.URIs = []*url.URL{{Path: "vm1"}}
		}),
	}
	for first, cert := range forms {
		c := a.secure(t, port, cert)
		c.choose("", extended)
		c.writeAt(0, []byte("hello"))
		a.secure(t, port, cert).choose("", extended) // its next connection
		for form, other := range forms {
			if form == first {
				continue
			}
			late := a.secure(t, port, other)
			for _, option := range []uint32{optList, optGo} {
				data := infoData("")
				if option == optList {
					data = nil
				}
				r := late.option(option, data)
				require.Equal(t, uint32(repErrPolicy), r[0].kind)
				require.Contains(t, string(r[0].data), "cert:vm1 by the "+form)
				require.Contains(t, string(r[0].data), "by the "+first+":")
			}
			late.send(optionBytes(optExportName, nil))
			late.ended()
		}
		v.EndSessions(func(status.Session) bool { return true })
		testtool.Eventually(t, func() bool {
			v.mu.Lock()
			defer v.mu.Unlock()
			return len(v.named) == 0
		}, "the name is free")
	}
}
