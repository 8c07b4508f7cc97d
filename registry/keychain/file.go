package keychain

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"

	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/internal/bounded"
)

// credentialFile is a file that docker login, podman login or kubectl writes: credentials by
// registry or repository, and the programs that have others.
type credentialFile struct {
	place   string
	Auths   map[string]json.RawMessage `json:"auths"`
	Store   string                     `json:"credsStore"`
	Helpers map[string]string          `json:"credHelpers"`
}

// legacyConfig is the name of docker's first file of credentials, which has only the auths.
const legacyConfig = ".dockercfg"

// configNames are the names to look for in a directory: of a mounted Kubernetes pull secret, of
// docker, of podman, and of docker's first versions.
var configNames = []string{".dockerconfigjson", "config.json", "auth.json", legacyConfig}

// readConfig reads a file of credentials, or the one in a directory. An error never contains its
// content.
func readConfig(file string) (*credentialFile, error) {
	info, err := os.Stat(file)
	if err != nil {
		return nil, fmt.Errorf("registry credentials: %w", err)
	}
	if info.IsDir() {
		dir := file
		file = ""
		for _, n := range configNames {
			if _, err := os.Stat(filepath.Join(dir, n)); !errors.Is(err, fs.ErrNotExist) {
				file = filepath.Join(dir, n)
				break
			}
		}
		if file == "" {
			return nil, fmt.Errorf("registry credentials: %q has none of the files %s", dir,
				strings.Join(configNames, ", "))
		}
	}
	f, err := osfile.OpenText(file)
	if err != nil {
		return nil, fmt.Errorf("registry credentials: %w", err)
	}
	defer f.Close()
	content, err := bounded.Read(f, maxConfig)
	if err != nil {
		return nil, fmt.Errorf("registry credentials %q: %w", file, err)
	}
	return parseConfig(file, content)
}

func parseConfig(place string, content []byte) (*credentialFile, error) {
	parsed := &credentialFile{place: place}
	var into any = parsed
	if filepath.Base(place) == legacyConfig {
		into = &parsed.Auths
	}
	// An empty file has no credentials. The text of a decoder's error may contain a part of the
	// content.
	if err := json.NewDecoder(bytes.NewReader(content)).Decode(into); err != nil && err != io.EOF {
		return nil, fmt.Errorf(
			"registry credentials: %q is not what docker writes into its config.json", place)
	}
	return parsed, nil
}

// credential finds the credential for a repository. Zero: none. It calls problem with errors of
// entries and programs that cannot be used, and goes on without these.
func (c *credentialFile) credential(ctx context.Context, target authn.Resource,
	problem func(error)) authn.AuthConfig {
	host := target.RegistryStr()
	named := matches(c.Auths, target)
	// An entry for a part of the registry is more specific than a program for all of it.
	parts := slices.IndexFunc(named, func(m match) bool { return m.path == "" || m.vague > 0 })
	if parts < 0 {
		parts = len(named)
	}
	if found := c.entry(named[:parts], problem); found != (authn.AuthConfig{}) {
		return found
	}
	helper, key := c.Store, ""
	if keys := matches(c.Helpers, target); len(keys) > 0 {
		key = keys[0].key
		helper = c.Helpers[key]
	}
	if helper != "" {
		found, err := askHelper(ctx, helper, helperKeys(host, key))
		if err != nil && ctx.Err() == nil {
			problem(fmt.Errorf("%q names docker-credential-%s for the credentials of %s, which "+
				"cannot be asked: %w; going on without it", c.place, helper, host, err))
		}
		if found != (authn.AuthConfig{}) {
			return found
		}
	}
	return c.entry(named[parts:], problem)
}

// entry is the first of the entries that is a credential. docker writes empty entries for
// credentials that a program has.
func (c *credentialFile) entry(named []match, problem func(error)) authn.AuthConfig {
	for _, m := range named {
		var found authn.AuthConfig
		if json.Unmarshal(c.Auths[m.key], &found) != nil { // its text may show a part of a secret
			problem(fmt.Errorf("registry credentials: the entry of %q for %q has no credential "+
				"that can be read: log in to it again; going on without it", c.place, m.key))
			continue
		}
		found.Auth = "" // it is in Username and Password now, and may lack padding
		found.Password = strings.Trim(found.Password, "\x00")
		if found != (authn.AuthConfig{}) {
			return found
		}
	}
	return authn.AuthConfig{}
}

// match is a key that covers a repository.
type match struct {
	key  string
	path string // its path below the registry
	// vague is how inexactly the key names the registry: 0: exactly; 1: by wildcards in the host;
	// 2: by the address of something else there, as docker once wrote for the registry.
	vague int
}

// matches are the keys that cover a repository, the best first: as for podman and the kubelet, the
// one that names most of its path.
func matches[V any](of map[string]V, target authn.Resource) []match {
	var all []match
	host, repository, _ := strings.Cut(target.String(), "/")
	host = hubName(host)
	for key := range of {
		keyHost, keyPath, address := splitKey(key)
		m := match{key: key, path: keyPath}
		switch {
		case hubName(keyHost) == host:
		case hostMatches(keyHost, host):
			m.vague = 1
		default:
			continue
		}
		if keyPath != "" && repository != keyPath && !strings.HasPrefix(repository, keyPath+"/") {
			if !address || m.vague > 0 {
				continue
			}
			m.path, m.vague = "", 2
		}
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b match) int {
		return cmp.Or(a.vague-b.vague, len(b.path)-len(a.path), len(a.key)-len(b.key),
			cmp.Compare(a.key, b.key))
	})
	return all
}

// splitKey parses the key of an entry: HOST, HOST/PATH, or the address of a registry, which may
// have a version of its interface.
func splitKey(key string) (host, path string, address bool) {
	for _, scheme := range []string{"https://", "http://"} {
		if rest, ok := strings.CutPrefix(key, scheme); ok {
			key, address = rest, true
		}
	}
	host, path, _ = strings.Cut(key, "/")
	for _, version := range []string{"v1", "v2"} {
		if path == version || strings.HasPrefix(path, version+"/") {
			path = strings.TrimPrefix(path, version)
			break
		}
	}
	return host, strings.Trim(path, "/"), address
}

// hubName is the one name of a registry. Docker Hub has several.
func hubName(host string) string {
	if host == "docker.io" || host == "registry-1.docker.io" {
		return name.DefaultRegistry
	}
	return host
}

// hostMatches reports whether the host of a key has wildcards and covers a host: each label by
// itself, with the same port.
func hostMatches(pattern, host string) bool {
	if !strings.ContainsAny(pattern, "*?[") {
		return false
	}
	pattern, patternPort := splitPort(pattern)
	host, port := splitPort(host)
	globs, labels := strings.Split(pattern, "."), strings.Split(host, ".")
	if port != patternPort || len(globs) != len(labels) {
		return false
	}
	for i, g := range globs {
		if ok, err := path.Match(g, labels[i]); err != nil || !ok {
			return false
		}
	}
	return true
}

func splitPort(address string) (host, port string) {
	if host, port, err := net.SplitHostPort(address); err == nil {
		return host, port
	}
	return address, ""
}
