package transport

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/keychain"
	"kubevirt.io/disk/registry/registrytest"
)

// names makes this process find names, by IPv4, in place of a name server.
func names(t *testing.T, addresses map[string]string) {
	old := net.DefaultResolver
	t.Cleanup(func() { net.DefaultResolver = old })
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(context.Context, string,
		string) (net.Conn, error) {
		client, server := net.Pipe()
		go answerNames(server, addresses)
		return client, nil
	}}
}

// answerNames answers questions as a name server does by TCP (RFC 1035, section 4).
func answerNames(conn net.Conn, addresses map[string]string) {
	defer conn.Close()
	for {
		size := make([]byte, 2)
		if _, err := io.ReadFull(conn, size); err != nil {
			return
		}
		q := make([]byte, binary.BigEndian.Uint16(size))
		if _, err := io.ReadFull(conn, q); err != nil {
			return
		}
		var labels []string
		end := 12
		for q[end] != 0 {
			labels = append(labels, string(q[end+1:end+1+int(q[end])]))
			end += 1 + int(q[end])
		}
		isA := q[end+2] == 1
		a := append([]byte{}, q[:end+5]...)
		copy(a[2:12], []byte{0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0})
		if to, ok := addresses[strings.Join(labels, ".")]; ok && isA {
			for one := range strings.FieldsSeq(to) {
				ip := netip.MustParseAddr(one).As4()
				a[7]++
				a = append(a, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4)
				a = append(a, ip[:]...)
			}
		}
		if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(a))),
			a...)); err != nil {
			return
		}
	}
}

// TestWhereTokenServersMayLie: a token server is no nearer than its registry, whatever it is
// called.
func TestWhereTokenServersMayLie(t *testing.T) {
	names(t, map[string]string{"public.test": "192.0.2.1", "corp.test": "10.1.1.1",
		"mixed.test": "10.1.1.1 192.0.2.1", "here.test": "127.0.0.1"})
	for address, from := range map[string]string{ // who may name it, of those below
		"192.0.2.7":              "public corp mixed here none",
		"2001:db8::1":            "public corp mixed here none",
		"10.9.9.9":               "corp here",
		"192.168.0.1":            "corp here",
		"100.64.0.1":             "corp here",
		"fd00:ec2::254":          "corp here",
		"::ffff:10.9.9.9":        "corp here",
		"127.0.0.1":              "here",
		"127.8.8.8":              "here",
		"::1":                    "here",
		"::ffff:127.0.0.1":       "here",
		"169.254.169.254":        "",
		"::ffff:169.254.169.254": "",
		"fe80::1":                "",
		"0.0.0.0":                "",
		"::":                     "",
		"224.0.0.1":              "",
	} {
		for _, registry := range []string{"public", "corp", "mixed", "here", "none"} {
			err := (&tokensOf{registry: registry + ".test:5000"}).mayConnect(t.Context(),
				netip.MustParseAddr(address))
			if strings.Contains(from, registry) {
				require.NoError(t, err, "%s from %s", address, registry)
			} else {
				require.ErrorContains(t, err, "a private address", "%s from %s", address, registry)
			}
		}
	}
	for host, want := range map[string]bool{"localhost": true, "LOCALHOST.": true,
		"a.localhost": true, "127.1": true, "0x7f.1": true, "[::1]": true, "[::ffff:7f00:1]": true,
		"100.64.0.1": true, "localhost.example.com": false, "example.com": false} {
		require.Equal(t, want, isPrivate((&url.URL{Host: host}).Hostname()), host)
	}
}

// TestTokenServerByName: what a registry names as its token server gets no password if its name
// leads to this machine or its link, but it does where the registry is as near.
func TestTokenServerByName(t *testing.T) {
	for name, c := range map[string]struct{ realm, address, want string }{
		"as near":   {realm: "example.com", address: "127.0.0.1"},
		"localhost": {"localhost", "", "localhost"},
		"below":     {"a.localhost", "", "a.localhost"},
		"the link":  {"example.com", "169.254.169.254", "from 169.254.169.254"},
	} {
		t.Run(name, func(t *testing.T) {
			names(t, map[string]string{"example.com": c.address})
			if c.address == "" {
				names(t, nil)
			}
			l := newLying(t)
			ca := l.TLS(t)
			l.NewImage(t, registrytest.Noise(65, 8192))
			asked := 0
			tokens := registrytest.NewWeb(t) // its certificate is that of the registry, too
			tokens.Server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter,
				r *http.Request) {
				asked++
				_, password, _ := r.BasicAuth()
				require.Equal(t, "pa55word", password)
				_, _ = w.Write([]byte(`{"token":"good"}`))
			})
			_, port := testtool.Must2(net.SplitHostPort(tokens.Host()))(t)
			l.WantsTokens(t, func(string) string { return "https://" + c.realm + ":" + port + "/" },
				nil)
			opt := Options{CA: ca, Timeout: time.Second, OwnHost: l.Host(),
				Own: keychain.Credential{Username: "me", Password: "pa55word"}}
			src := testtool.Must(newClient(t, opt).Source(l.ref(t, "vm/a:1"), ""))(t)
			defer src.Close()
			_, _, err := src.Manifest(t.Context(), "")
			if c.want == "" {
				require.NoError(t, err)
				require.NotZero(t, asked)
				return
			}
			require.ErrorContains(t, err, c.want)
			require.ErrorContains(t, err, "a private address: if that is intended")
			require.Zero(t, asked)
			require.NotContains(t, err.Error(), "pa55word")
		})
	}
}

// TestNoTokenForElsewhere: whom a registry redirects to gets no token, wherever that would come
// from: else it could have us ask a service inside of our network, and be told what that says.
func TestNoTokenForElsewhere(t *testing.T) {
	names(t, map[string]string{"example.com": "127.0.0.1"})
	asked, issued := 0, 0
	inside := registrytest.NewWeb(t)
	inside.Server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked++
		_, _ = w.Write([]byte(`{"token":"pa55word"}`))
	})
	_, port := testtool.Must2(net.SplitHostPort(inside.Host()))(t)
	for _, realm := range []string{"https://example.com:" + port, "https://" + tokenHost} {
		l := newLying(t)
		ca := l.TLS(t)
		l.NewImage(t, registrytest.Noise(67, 8192))
		storage := registrytest.NewWeb(t)
		storage.Server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter,
			r *http.Request) {
			require.Empty(t, r.Header.Get("Authorization"))
			w.Header().Set("WWW-Authenticate", `Bearer realm="`+realm+`/",service="x"`)
			w.WriteHeader(http.StatusUnauthorized)
		})
		_, at := testtool.Must2(net.SplitHostPort(storage.Host()))(t)
		l.Elsewhere = "https://example.com:" + at
		tokens := registrytest.NewWeb(t)
		tokens.Server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter,
			r *http.Request) {
			issued++
			_, _, ok := r.BasicAuth()
			require.True(t, ok)
			_, _ = w.Write([]byte(`{"token":"good"}`))
		})
		_, at = testtool.Must2(net.SplitHostPort(tokens.Host()))(t)
		l.WantsTokens(t, func(string) string { return "https://example.com:" + at }, nil)
		img := testtool.Must(newClient(t, Options{CA: ca, Timeout: time.Second, OwnHost: l.Host(),
			Own: keychain.Credential{Username: "me", Password: "pa55word"}}).Resolve(t.Context(),
			l.ref(t, "vm/a:1")))(t)
		defer img.Source.Close()
		b := testtool.Must(img.Source.Blob(img.Manifest.Layers[0]))(t)
		require.ErrorContains(t, b.Fill(t.Context(), make([]byte, 512), 0), "example.com")
		require.Zero(t, asked)
		require.NotZero(t, issued)
	}
}

// TestTokenOfTheRegistryElsewhere: a registry may be another one under a name of its own. It names
// the token server of that one, and redirects to it. That one gets a token of its own, without the
// credential.
func TestTokenOfTheRegistryElsewhere(t *testing.T) {
	names(t, map[string]string{"example.com": "127.0.0.1"})
	l := newLying(t)
	ca := l.TLS(t)
	content := registrytest.Noise(69, 8192)
	l.NewImage(t, content)
	tokens := registrytest.NewWeb(t)
	tokens.Server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		require.Equal(t, "repository:vm/a:pull", r.URL.Query().Get("scope"))
		token := "good"
		if _, _, ok := r.BasicAuth(); !ok {
			token = "anonymous"
		}
		fmt.Fprintf(w, `{"token":"%s"}`, token)
	})
	_, at := testtool.Must2(net.SplitHostPort(tokens.Host()))(t)
	realm := "https://example.com:" + at + "/token?a=b"
	l.WantsTokens(t, func(string) string { return realm }, nil)
	other := registrytest.NewWeb(t)
	other.Server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if known := r.Header.Get("Authorization"); known != "" {
			require.Equal(t, "Bearer anonymous", known)
			l.Storage.Config.Handler.ServeHTTP(w, r)
			return
		}
		w.Header().Set("WWW-Authenticate",
			`Bearer realm="`+realm+`",service="x",scope="repository:vm/a:pull"`)
		w.WriteHeader(http.StatusUnauthorized)
	})
	_, at = testtool.Must2(net.SplitHostPort(other.Host()))(t)
	l.Elsewhere = "https://example.com:" + at
	img := testtool.Must(newClient(t, Options{CA: ca, Timeout: time.Second, OwnHost: l.Host(),
		Own: keychain.Credential{Username: "me", Password: "pa55word"}}).Resolve(t.Context(),
		l.ref(t, "vm/a:1")))(t)
	defer img.Source.Close()
	b := testtool.Must(img.Source.Blob(img.Manifest.Layers[0]))(t)
	require.NoError(t, b.Fill(t.Context(), make([]byte, 512), 0))
}

// TestPlainBeforeUnknownCertificate: where the registry answers without TLS, whoever answers there
// with a certificate of nobody is not asked.
func TestPlainBeforeUnknownCertificate(t *testing.T) {
	content := registrytest.Noise(64, 100<<10)
	l, other := newLying(t), newLying(t)
	other.TLS(t)
	l.NewImage(t, content)
	opt := l.options()
	opt.Timeout = time.Second
	c := newClient(t, opt)
	for _, transport := range []*http.Transport{c.base, c.open} { // as on ports 443 and 80
		transport.DialTLSContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
			conn, err := tls.Dial(network, other.Host(), transport.TLSClientConfig)
			if err != nil {
				return nil, err
			}
			return conn, nil
		}
	}
	src := testtool.Must(c.Source(l.ref(t, "vm/a:1"), ""))(t)
	require.NoError(t, testtool.Err2(src.Manifest(t.Context(), "")))
	require.Zero(t, other.Requests(""))
	a := testtool.Must(c.endpoint(l.Host(), "vm/b"))(t)
	require.NoError(t, testtool.Err(a.authorize(t.Context(), pullScopes(a)))) // as for a push
	require.Zero(t, other.Requests(""))
}
