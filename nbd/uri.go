package nbd

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"strings"

	"kubevirt.io/disk/internal/loopback"
	"kubevirt.io/disk/serving"
)

// defaultPort is the port of NBD (IANA).
const defaultPort = "10809"

// URI is where an export is, in the notation of the NBD URI specification (doc/uri.md):
//
//	nbds://HOST[:PORT]/EXPORT        by TLS
//	nbd://HOST[:PORT]/EXPORT         without, so HOST must be this machine: 127.0.0.1 or localhost
//	nbd+unix:///EXPORT?socket=PATH
type URI struct {
	Address string // as in RemoteOptions
	Host    string // by TLS, the name that the server's certificate must have; "": a socket
	Export  string // "": the server's only disk
	TLS     bool
}

// ParseURI reads a URI. Its errors do not repeat the text, which may have a password.
func ParseURI(text string) (u URI, err error) {
	p, err := url.Parse(text)
	if err != nil {
		return u, errors.New("it is no URI, such as nbds://HOST/EXPORT")
	}
	u.Export, u.TLS = strings.TrimPrefix(p.Path, "/"), p.Scheme == "nbds"
	query := p.Query()
	path := query.Get("socket")
	delete(query, "socket")
	switch {
	case p.Scheme != "nbd" && p.Scheme != "nbds" && p.Scheme != "nbd+unix":
		return u, errors.New("its scheme must be nbds, nbd or nbd+unix, as in nbds://HOST/EXPORT")
	case p.User != nil:
		return u, errors.New("it names a user; clients are known by their certificate")
	case p.Fragment != "" || len(query) > 0:
		return u, errors.New("only nbd+unix has a parameter, socket=PATH")
	case checkText(u.Export) != nil:
		return u, fmt.Errorf("its export: %w", checkText(u.Export))
	case p.Scheme == "nbd+unix" && (p.Host != "" || !filepath.IsAbs(path)):
		return u, errors.New("it must be as nbd+unix:///EXPORT?socket=PATH, with an absolute path")
	case p.Scheme == "nbd+unix":
		u.Address = serving.SocketPrefix + path
		return u, nil
	case path != "":
		return u, errors.New("a socket goes with nbd+unix")
	case p.Hostname() == "":
		return u, errors.New("it names no host")
	}
	port := cmp.Or(p.Port(), defaultPort)
	u.Host, u.Address = p.Hostname(), net.JoinHostPort(p.Hostname(), port)
	if !u.TLS && !loopback.Is(u.Host) {
		return u, errors.New("it is not on this machine, and without TLS others could read and " +
			"change the disk on its way: use nbds")
	}
	return u, nil
}
