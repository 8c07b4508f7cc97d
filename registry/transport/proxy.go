package transport

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
)

// checkProxies refuses what net/http would ignore, so that a registry is not asked without the
// proxy. The error does not show the value, which may have a password.
func checkProxies() error {
	for _, name := range []string{"HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"} {
		value := os.Getenv(name)
		if value == "" {
			continue
		}
		if !strings.Contains(value, "://") {
			value = "http://" + value // as net/http does
		}
		if u, err := url.Parse(value); err != nil || u.Hostname() == "" {
			return fmt.Errorf("%s is not the address of a proxy: write it as "+
				"http://USER:PASSWORD@HOST:PORT, and special characters of the password as %%23",
				name)
		}
	}
	return nil
}

// proxyAnswer explains the answer of a proxy that leads to no registry. The error of net/http would
// be the words of the status alone, as if the registry had said them.
func proxyAnswer(_ context.Context, proxy *url.URL, req *http.Request, res *http.Response) error {
	if res.StatusCode == http.StatusOK {
		return nil
	}
	err := fmt.Errorf("the proxy %s does not connect to %s: it answers %s", proxy.Host,
		req.Host, res.Status)
	switch {
	case res.StatusCode == http.StatusProxyAuthRequired:
		return permanent(fmt.Errorf("%w; name its user and password in HTTPS_PROXY, as "+
			"http://USER:PASSWORD@HOST:PORT", err))
	case res.StatusCode < http.StatusInternalServerError:
		return permanent(err)
	}
	return err
}
