package daemon

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/options/optionstest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// TestAddresses serves a disk of a web server, and makes volumes of others. Clients reach no server
// that they must not, and nobody is told a query, which may be a secret.
func TestAddresses(t *testing.T) {
	content := bytes.Repeat([]byte("a disk  "), 8192)
	digest := transport.DigestOf(content)
	web, inside := registrytest.NewWeb(t), registrytest.NewPlainWeb(t)
	web.Files["/images/a.img"], web.Files["/other/a.img"] = content, content
	inside.Put("/secret", content, "")
	ref, err := transport.ParseSource(web.Server.URL + "/other/a.img?sig=hush@" + digest)
	require.NoError(t, err)
	allowed := testtool.Must(transport.ParsePrefix(web.Server.URL + "/images"))(t)
	opt := testOptions(t)
	opt.Streams = options.Streams{References: []transport.Reference{ref},
		Registry: transport.Options{CA: web.CA(t)},
		CacheDir: filepath.Join(filepath.Dir(opt.WorkDir), "cache"), CacheSize: 1 << 30}
	opt.Volumes = &options.Volumes{Listen: optionstest.Loopback(),
		URLs: []transport.Prefix{allowed}}
	r := start(t, opt)
	ask := func(method, address, body string) (int, string) {
		req := testtool.Must(http.NewRequest(method, address, strings.NewReader(body)))(t)
		req.Header.Set("Content-Type", "application/json")
		res := testtool.Must(http.DefaultClient.Do(req))(t)
		defer res.Body.Close()
		text := testtool.Must(io.ReadAll(res.Body))(t)
		return res.StatusCode, string(text)
	}
	volumes := "http://" + r.Status().Volumes.Address + "/volume/"
	put := func(name, url, digest string) (int, string) {
		return ask(http.MethodPut, volumes+name,
			fmt.Sprintf(`{"from": {"url": %q, "digest": %q}}`, url, digest))
	}
	asked := len(web.Said())
	for url, why := range map[string]string{
		inside.Server.URL + "/secret":               "is not below an address that is allowed",
		web.Server.URL + "/other/b.img":             "is not below an address that is allowed",
		web.Server.URL + "/images/../other/a.img":   "leave them out",
		"https://me:hush@" + web.Host() + "/images": "credentials come from",
		"docker-archive:/etc/passwd":                "is not an address",
	} {
		status, text := put("no", url, digest)
		require.Equal(t, http.StatusBadRequest, status, url)
		require.Contains(t, text, why)
		require.NotContains(t, text, "hush")
	}
	status, text := put("no", web.Server.URL+"/images/a.img", "")
	require.Equal(t, http.StatusBadRequest, status)
	require.Contains(t, text, "from.digest")
	require.Len(t, web.Said(), asked)

	made := func(name, url string) {
		status, text = put(name, url, digest)
		testtool.Eventually(t, func() bool {
			require.NotContains(t, text, "hush")
			if status == http.StatusAccepted {
				status, text = ask(http.MethodGet, volumes+name, "")
			}
			return status != http.StatusAccepted
		})
		require.Less(t, status, 300, text)
		p := make([]byte, len(content))
		all := r.disks.Served()
		require.NoError(t, testtool.Err(all[len(all)-1].Instance().ReadAt(t.Context(), p, 0)))
		require.True(t, bytes.Equal(content, p))
	}
	made("vm1", web.Server.URL+"/images/a.img?sig=hush")
	require.Contains(t, text, "url: "+web.Server.URL+"/images/a.img\n")
	made("vm2", web.Server.URL+"/other/a.img") // the daemon's own settings name it
	kept := testtool.Must(os.ReadFile(filepath.Join(opt.VolumesDir(), "vm1", "volume.json")))(t)
	require.Contains(t, string(kept), "hush")

	// A redirect does not lead out of what is allowed.
	for _, to := range []string{web.Server.URL + "/other/a.img", inside.Server.URL + "/secret"} {
		web.Fail(registrytest.Redirects(to))
		status, text = put("vm3", web.Server.URL+"/images/a.img?other", digest)
		require.GreaterOrEqual(t, status, 400)
		require.Empty(t, inside.Said())
	}
	_, page := ask(http.MethodGet, "http://"+r.PagesAddress()+"/status", "")
	require.Contains(t, page, ref.String())
	_, metrics := ask(http.MethodGet, "http://"+r.PagesAddress()+"/metrics", "")
	require.NotContains(t, page+metrics, "hush")
	for _, line := range r.log.All() {
		require.NotContains(t, fmt.Sprint(line.Message, line.ContextMap()), "hush")
	}
	require.NoError(t, r.end())
}

func TestPortalNetworks(t *testing.T) {
	parse := func(text string) (all []options.Address) {
		for s := range strings.FieldsSeq(text) {
			all = append(all, mustAddress(t, s))
		}
		return all
	}
	for text, want := range map[string]string{
		"0.0.0.0":                  "tcp4",
		"[::]":                     "tcp", // IPv4 too
		"0.0.0.0 [::]":             "tcp4 tcp6",
		"0.0.0.0:1 [::]:2":         "tcp4 tcp",
		":3260":                    "tcp",
		"127.0.0.1 [::1]":          "tcp4 tcp6",
		"192.0.2.1:5 [::]:5 [::1]": "tcp4 tcp6 tcp6",
	} {
		all := parse(text)
		var got []string
		for _, p := range all {
			got = append(got, p.Network(all))
		}
		require.Equal(t, want, strings.Join(got, " "), text)
	}
}

func TestListenAllBindsAllOrNone(t *testing.T) {
	taken := testtool.Must(net.Listen("tcp4", "127.0.0.1:0"))(t)
	defer taken.Close()
	p := mustAddress(t, taken.Addr().String())
	opt := options.Options{Table: optionstest.Table}
	by := opt.SettingsOf(&opt.Portals)
	_, err := listenAll(t.Context(), []options.Address{loopback(), p}, by)
	require.ErrorContains(t, err, p.String())
	require.ErrorContains(t, err, "taken")
	require.ErrorContains(t, err, "--listen (LISTEN) or --port (PORT)")

	all := testtool.Must(listenAll(t.Context(), []options.Address{loopback(), loopback()}, nil))(t)
	require.Len(t, all, 2)
	closeAll(all)
	_, err = listenAll(t.Context(), []options.Address{mustAddress(t, "192.0.2.77:0")}, by)
	require.ErrorContains(t, err, "does not have the address")
}

// mustAddress parses an address. Without a port it gets port 3260.
func mustAddress(t *testing.T, text string) options.Address {
	t.Helper()
	if addr, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil {
		return options.Address{Addr: addr, Port: 3260}
	}
	host, port := testtool.Must2(net.SplitHostPort(text))(t)
	n := testtool.Must(strconv.ParseUint(port, 10, 16))(t)
	if host == "" {
		return options.Address{Port: uint16(n)}
	}
	addr := testtool.Must(netip.ParseAddr(host))(t)
	return options.Address{Addr: addr, Port: uint16(n)}
}

func TestReachable(t *testing.T) {
	for from, want := range map[string]string{
		"0.0.0.0:3260": "127.0.0.1:3260", "[::]:3260": "[::1]:3260", "10.0.0.1:1": "10.0.0.1:1",
		"[::1]:1": "[::1]:1", ":9260": "127.0.0.1:9260",
	} {
		require.Equal(t, want, options.Reachable(from))
	}
}
