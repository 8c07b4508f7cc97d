package transport

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"syscall"
)

// tokensOf is in the context of a request to a token server, for the transport of such requests. It
// says which registry has named the server.
type tokensOf struct {
	registry string // HOST or HOST:PORT
	proxied  bool   // a proxy is used, and connects to the token server
}

type tokensOfKey struct{}

// tokenTransport is a transport for token servers of registries with TLS. It has its own
// connections, and checks the address of each before it connects. The name proves nothing, because
// its owner also decides where it leads.
func tokenTransport(base *http.Transport, dialer net.Dialer) *http.Transport {
	t := base.Clone()
	dialer.ControlContext = func(ctx context.Context, _, address string, _ syscall.RawConn) error {
		of, _ := ctx.Value(tokensOfKey{}).(*tokensOf)
		at, err := netip.ParseAddrPort(address)
		if err != nil || of == nil || of.proxied {
			return err
		}
		return of.mayConnect(ctx, at.Addr())
	}
	t.DialContext = dialer.DialContext
	t.Proxy = func(req *http.Request) (*url.URL, error) {
		proxy, err := base.Proxy(req)
		if of, _ := req.Context().Value(tokensOfKey{}).(*tokensOf); of != nil {
			of.proxied = proxy != nil
		}
		return proxy, err
	}
	return t
}

// distance says how near an address is.
type distance int

const (
	public  distance = iota
	private          // in a network that is not public
	local            // this machine
	link             // only on one link: the metadata servers of clouds, but no registry
)

var shared = netip.MustParsePrefix("100.64.0.0/10") // of carriers, RFC 6598

func distanceOf(a netip.Addr) distance {
	switch a = a.Unmap().WithZone(""); {
	case a.IsUnspecified(), a.IsLinkLocalUnicast(), a.IsMulticast():
		return link
	case a.IsLoopback():
		return local
	case a.IsPrivate(), shared.Contains(a):
		return private
	}
	return public
}

// mayConnect refuses an address that is nearer than the registry itself. A registry in a private
// network has its token server there.
func (of *tokensOf) mayConnect(ctx context.Context, at netip.Addr) error {
	near := distanceOf(at)
	if near == public {
		return nil
	}
	host := (&url.URL{Host: of.registry}).Hostname()
	all, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	own := len(all) > 0 && err == nil
	for _, a := range all {
		d := distanceOf(a)
		own = own && d != public && d >= near && near != link
	}
	if own {
		return nil
	}
	return permanent(fmt.Errorf("%s wants a token from %s, a private address: if that is "+
		"intended, name %[1]s with --insecure-registry", of.registry, at))
}
