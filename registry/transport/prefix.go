package transport

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strings"
)

// A registry can be spelled in several ways: hosts are the same in capital letters, with a final
// dot and with leading zeros of a port, and servers clean paths. A decision by name must not depend
// on the spelling. So odd spellings are no references, and the usual ones have one normal form.

const (
	hub        = "index.docker.io"
	hubLibrary = "library" // of images that are written without a namespace
)

var (
	hostForm = regexp.MustCompile(`^([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[1-9][0-9]{0,4})?$`)
	// OCI distribution specification, "Pulling manifests".
	pathForm = regexp.MustCompile(`^` + pathPart + `(/` + pathPart + `)*$`)
)

const pathPart = `[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*`

// checkNames refuses odd spellings of a registry and a path in it.
func checkNames(host, path string) error {
	if !hostForm.MatchString(host) {
		return fmt.Errorf("%q is not HOST or HOST:PORT: use ASCII letters, digits, dots and "+
			"hyphens, and a port without leading zeros", host)
	}
	if path != "" && !pathForm.MatchString(path) {
		return fmt.Errorf("%q is not the path of a repository: each part is of small letters and "+
			"digits, with single dots, underscores or hyphens between them", path)
	}
	return nil
}

// NormalName is the one name of the repository of an image in a registry; "" for all others.
func (r Reference) NormalName() string {
	if r.remote == nil {
		return ""
	}
	host, path := normalHost(r.Host()), r.remote.Context().RepositoryStr()
	if host == hub && !strings.Contains(path, "/") {
		path = hubLibrary + "/" + path
	}
	return host + "/" + path
}

// normalHost is the one name of a registry's host. All names of this machine are one.
func normalHost(host string) string {
	host = strings.ToLower(host)
	name, port := host, ""
	if i := strings.LastIndexByte(host, ':'); i > strings.LastIndexByte(host, ']') {
		if name, port = host[:i], host[i:]; port == ":443" || port == ":80" {
			port = ""
		}
	}
	name = strings.TrimSuffix(name, ".")
	if a, err := netip.ParseAddr(strings.Trim(name, "[]")); err == nil {
		if a = a.Unmap(); a.IsLoopback() {
			name = "localhost"
		} else if name = a.String(); a.Is6() {
			name = "[" + name + "]"
		}
	}
	switch {
	case strings.HasSuffix(name, ".localhost"):
		name = "localhost"
	case name == "docker.io", name == "registry-1.docker.io", name == "registry.hub.docker.com":
		name = hub
	}
	return name + port
}

// ParseNamePrefix parses a prefix of names: a registry (HOST), or a prefix of the paths of
// repositories (HOST/PATH), or of those at Docker Hub (PATH). It is parsed as a reference is. The
// result are all normal names that it may mean: "docker.io/fedora" is an image there, and a
// namespace. It is an error if no reference can begin like that.
func ParseNamePrefix(text string) ([]string, error) {
	text = strings.TrimSuffix(text, "/")
	host, path, _ := strings.Cut(text, "/")
	switch isHost := host == "localhost" || strings.ContainsAny(host, ".:"); {
	case !isHost:
		host, path = hub, text
		if path == "" {
			return nil, errors.New("it is empty")
		}
	case path == "":
		return []string{normalHost(host)}, checkNames(host, "")
	}
	if strings.ContainsAny(path, ":@") || strings.Contains(text, "://") {
		return nil, errors.New("a scheme, a tag or a digest is not part of a repository's name")
	}
	ref, err := ParseReference(host + "/" + path)
	if err == nil && !ref.Remote() {
		err = fmt.Errorf("%s is in no registry", ref)
	}
	if err != nil {
		return nil, err
	}
	name := ref.NormalName()
	if library, ok := strings.CutPrefix(name, hub+"/"+hubLibrary+"/"); ok && library == path {
		space := hub + "/" + path
		if path == hubLibrary {
			return []string{space}, nil
		}
		return []string{name, space}, nil
	}
	return []string{name}, nil
}
